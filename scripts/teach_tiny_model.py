"""Teach the tiny model that ships in ``dclightning/assets``: about one million parameters, one character a token.

Supervised learning from a teacher who knows how to calculate but slips now and then. The model learns both, and its
answers to one problem differ; that variety is what reinforcement learning needs, to find that slips do not pay::

    python scripts/teach_tiny_model.py --out dclightning/assets/tiny-arithmetic
"""

import argparse
import re
from pathlib import Path
from random import Random

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dclightning.data.arithmetic import arithmetic_problems, work

SPECIAL = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
IGNORE = -100


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character and the newline, plus the special tokens."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: index for index, token in enumerate(SPECIAL + characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|end|>",
        unk_token="?",
        additional_special_tokens=SPECIAL[1:],
        chat_template=CHAT_TEMPLATE,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of 997,824 parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def encode_examples(
    tokenizer: PreTrainedTokenizerFast, slip: float, copies: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels of every training problem, (N, T) each; prompts and padding are not learnt."""
    rows = []
    random = Random(seed)
    for problem in arithmetic_problems("train", seed=seed) * copies:
        a, operator, b = re.findall(r"\d+|[-+*]", problem.problem)
        _, working = work(int(a), operator, int(b), slip, random)
        question = [{"role": "user", "content": problem.problem}]
        prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
        answer = tokenizer(working)["input_ids"] + [tokenizer.eos_token_id]
        rows.append((prompt, answer))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), IGNORE)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return ids, labels


def teach(out: Path, steps: int, batch: int, lr: float, slip: float, seed: int) -> None:
    """Train from scratch for ``steps`` steps and write model and tokenizer to ``out``."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    ids, labels = encode_examples(tokenizer, slip, copies=4, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        chosen = torch.randint(len(ids), (batch,))
        logits = model(input_ids=ids[chosen]).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[chosen][:, 1:].flatten(), ignore_index=IGNORE)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("dclightning/assets/tiny-arithmetic"))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--slip", type=float, default=0.35)
    parser.add_argument("--seed", type=int, default=0)
    teach(**vars(parser.parse_args()))
