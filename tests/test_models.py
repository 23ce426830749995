import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BioGptConfig,
    BioGptForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dclightning import models
from dclightning.errors import UserError
from dclightning.models import check_token_logprobs, load_policy, named_weights, resolve_model, token_logprobs
from dclightning.packing import pack
from tests.helpers import TINY, random_rollout

SMALL = {
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
FAMILIES = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=True)),
    "qwen3-untied": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, tie_word_embeddings=False)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64)
    ),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=4)),
    "gpt2-dropout": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
}


def saved(tmp_path, model):
    model.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def reference(path, rollout):
    """Log-probs of each response token, one sequence at a time through transformers' own attention."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    logprobs, entropies, ranks = [], [], []
    for prompt, response in rollout.sequences():
        logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1] / rollout.temperature
        everything = logits.log_softmax(-1)
        logprobs.append(everything.gather(-1, response[:, None])[:, 0])
        entropies.append(-(everything.exp() * everything).sum(-1))
        places = everything.argsort(-1, descending=True)
        ranks.append((places == response[:, None]).int().argmax(-1) + 1)
    return torch.cat(logprobs), torch.cat(entropies), torch.cat(ranks)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_packed_chunked_logprobs_equal_transformers_one_by_one(tmp_path, monkeypatch, family):
    monkeypatch.setattr(models, "LOGITS_IN_A_CHUNK", 1400)  # 7 tokens a chunk
    path = saved(tmp_path, FAMILIES[family]())
    rollout = random_rollout([3, 9, 1, 0, 6], temperature=0.7)
    policy = load_policy(path)
    check_token_logprobs(policy, path)
    packed = pack(rollout, [0, 1, 2, 3, 4])
    got, entropy, ranks = token_logprobs(policy, packed, 0.7, entropy=True, ranks=True)
    want, want_entropy, want_ranks = reference(path, rollout)
    torch.testing.assert_close(got, want[packed.index], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(entropy, want_entropy[packed.index], atol=2e-5, rtol=1e-4)
    assert torch.equal(ranks, want_ranks[packed.index])


def test_gradients_do_not_depend_on_the_chunks_nor_on_checkpointing(tmp_path, monkeypatch):
    path = saved(tmp_path, FAMILIES["qwen3"]())
    rollout = random_rollout([3, 9, 1, 6])

    def gradients(chunk, checkpointing=False):
        monkeypatch.setattr(models, "LOGITS_IN_A_CHUNK", chunk)
        policy = load_policy(path, gradient_checkpointing=checkpointing)
        token_logprobs(policy, pack(rollout, [0, 1, 2, 3]), 1.0)[0].sum().backward()
        return torch.cat([p.grad.flatten().double() for p in policy.parameters()])

    whole = gradients(2**20)
    for other in (gradients(300), gradients(2**20, checkpointing=True)):
        assert (whole - other).norm() / whole.norm() < 1e-6


@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_scores_of_a_head_are_those_of_float64_even_if_tokens_are_impossible(at_once, with_gradient):
    head, targets = torch.nn.Linear(8, 50), torch.randint(0, 40, (20,))
    if not with_gradient:
        torch.nn.init.constant_(head.bias[45:], -torch.inf)
    hidden = torch.randn(20, 8) * 3
    logits = head(hidden).double().detach().requires_grad_()
    everything = logits.log_softmax(-1)
    want = everything.gather(-1, targets[:, None])[:, 0]
    want_entropy = -(everything.exp() * everything.clamp(min=-1e30)).sum(-1)
    weights = torch.linspace(-1, 1, 20)
    ((want + 0.3 * want_entropy * with_gradient) * weights).sum().backward()
    got, entropy, ranks = models._head(head, hidden.requires_grad_(), targets, 1.0, True, True, with_gradient, at_once)
    ((got + 0.3 * entropy * with_gradient) * weights).sum().backward()
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), want_entropy, atol=1e-5, rtol=0)
    torch.testing.assert_close(hidden.grad.double(), logits.grad @ head.weight.double(), atol=1e-5, rtol=0)
    assert torch.equal(ranks, (logits > logits.gather(-1, targets[:, None])).sum(-1) + 1)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "mistral-window"])
def test_a_shared_prompt_gives_what_each_sequence_gives_alone(tmp_path, family, checkpointing):
    path = saved(tmp_path, FAMILIES[family]())
    rollout = random_rollout([3, 9, 0, 6, 5, 1], group_size=3, shared=True)

    def learnt(packs):
        policy = load_policy(path, gradient_checkpointing=checkpointing)
        found = torch.empty(int(rollout.response_lengths.sum()))
        for batch in packs:
            logprobs = token_logprobs(policy, batch, 1.0).logprobs
            (logprobs * (1 + batch.index)).sum().backward()
            found[batch.index] = logprobs.detach()
        gradients = [p.grad.flatten().double() for p in policy.parameters() if p.grad is not None]
        return found, torch.cat(gradients)

    together = pack(rollout, list(range(6)))
    prompts = rollout.prompt_lengths
    assert together.input_ids.shape[1] == int(prompts[0] + prompts[3]) + 2 + 8 + 0 + 5 + 4 + 0
    shared, alone = learnt([together]), learnt([pack(rollout, [i]) for i in range(6)])
    torch.testing.assert_close(shared[0], alone[0], atol=2e-5, rtol=1e-4)
    assert (shared[1] - alone[1]).norm() / alone[1].norm() < 1e-5


def test_sharing_a_prompt_in_bf16_adds_less_error_than_bf16_has(tmp_path):
    path = saved(tmp_path, FAMILIES["qwen3"]())
    rollout = random_rollout([9] * 8, group_size=8, shared=True)

    def gradient(precision, packs):
        policy = load_policy(path, precision=precision)
        for batch in packs:
            (token_logprobs(policy, batch, 1.0).logprobs * (1 + batch.index)).sum().backward()
        return torch.cat([p.grad.flatten().double() for p in policy.parameters()])

    alone = [pack(rollout, [i]) for i in range(8)]
    exact, rounded = gradient("float32", alone), gradient("bfloat16", alone)
    shared = gradient("bfloat16", [pack(rollout, list(range(8)))])
    assert 0 < (shared - exact).norm() < 1.2 * (rounded - exact).norm()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_dropout_is_gone_in_either_mode(tmp_path, checkpointing):
    path = saved(tmp_path, FAMILIES["gpt2-dropout"]())
    policy = load_policy(path, gradient_checkpointing=checkpointing)
    packed = pack(random_rollout([3, 4]), [0, 1])
    torch.testing.assert_close(token_logprobs(policy, packed, 1.0)[0], token_logprobs(policy, packed, 1.0)[0])


def test_any_kind_of_dropout_is_gone(tmp_path):
    config = BioGptConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    path = saved(tmp_path, BioGptForCausalLM(config))
    policy = load_policy(path, gradient_checkpointing=True)
    check_token_logprobs(policy, path)
    policy.biogpt.dropout = policy.biogpt.layers[0].dropout = 0.5
    with pytest.raises(UserError, match="two passes give different log-probs"):
        check_token_logprobs(policy, path)


def test_a_soft_capped_model_is_refused(tmp_path):
    path = saved(tmp_path, Gemma2ForCausalLM(Gemma2Config(**SMALL)))
    policy = load_policy(path)
    with pytest.raises(UserError, match="Gemma2Attention"):
        check_token_logprobs(policy, path)


def test_logits_changed_after_the_head_are_noticed(tmp_path):
    config = Gemma2Config(**SMALL, attn_logit_softcapping=None, final_logit_softcapping=0.1)
    path = saved(tmp_path, Gemma2ForCausalLM(config))
    with pytest.raises(UserError, match="off by"):
        check_token_logprobs(load_policy(path), path)


@pytest.mark.parametrize("tied", [True, False])
def test_each_weight_is_named_once_as_in_the_checkpoint(tmp_path, tied):
    path = saved(tmp_path, FAMILIES["qwen3" if tied else "qwen3-untied"]())
    names = [name for name, _ in named_weights(load_policy(path))]
    assert len(names) == len(set(names))
    assert ("lm_head.weight" in names) is not tied
    assert "model.embed_tokens.weight" in names


def test_bundled_model_is_small_and_goes_by_name():
    policy = load_policy(TINY)
    assert sum(p.numel() for p in policy.parameters()) < 1_050_000
    assert sum(f.stat().st_size for f in models.Path(resolve_model(TINY)).iterdir()) <= 4 * 2**20


@pytest.mark.parametrize("name", ["nowhere/at-all", "./no/such/folder"])
def test_an_unknown_model_is_one_line(name):
    with pytest.raises(UserError, match=f"model='{name}': no such folder"):
        load_policy(name, None)
