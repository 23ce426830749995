"""Models that benchmarks make."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from dclightning.models import load_tokenizer

TINY = "dclightning/tiny-arithmetic"


def mixture(folder: str) -> str:
    """A random mixture of experts with the bundled tokenizer; its weights are large, so that it is sure of tokens."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "decoder_sparse_step": 1}
    tokenizer = load_tokenizer(TINY)
    config = Qwen3MoeConfig(
        **sizes,
        **heads,
        **experts,
        vocab_size=len(tokenizer),
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def dense(folder: str, vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, groups: int) -> str:
    """A random dense model with the bundled tokenizer, which does not know most of its tokens and is given names."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer(TINY)
    tokenizer.add_tokens([f"<{i}>" for i in range(vocabulary - len(tokenizer))])
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
