"""Routing replay: the trainer on experts that are given to it."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear, silu
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from dclightning.errors import UserError
from dclightning.models import load_policy, token_logprobs
from dclightning.packing import pack
from dclightning.rollout.types import Completion, gathered_experts
from dclightning.routing import agreement, check_replay, recorded, replayed, routers
from tests.helpers import random_rollout, train

EXPERTS, K, LAYERS, DENSE = 8, 2, 3, 1
SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": K,
    "initializer_range": 0.2,
}
OF_EXPERTS = {"num_experts": EXPERTS, "moe_intermediate_size": 24}
GROUPS = {"n_routed_experts": EXPERTS, "moe_intermediate_size": 24, "n_group": 2, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16}


def qwen3(**options):
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **OF_EXPERTS, head_dim=16, **options))


KNOWN = {
    "qwen3-moe": lambda: qwen3(norm_topk_prob=False),
    "qwen3-moe-norm": lambda: qwen3(norm_topk_prob=True, mlp_only_layers=[DENSE]),
    "qwen2-moe": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(**SMALL, **OF_EXPERTS)),
    "olmoe": lambda: OlmoeForCausalLM(OlmoeConfig(**SMALL, num_experts=EXPERTS)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**SMALL, num_local_experts=EXPERTS)),
    "deepseek-v3": lambda: DeepseekV3ForCausalLM(
        DeepseekV3Config(**SMALL, **GROUPS, **LATENT, first_k_dense_replace=1, routed_scaling_factor=2.5)
    ),
    "glm4-moe": lambda: Glm4MoeForCausalLM(Glm4MoeConfig(**SMALL, **GROUPS, head_dim=16)),
}
UNKNOWN = {
    "dense": lambda: Qwen3ForCausalLM(Qwen3Config(**{k: v for k, v in SMALL.items() if "experts" not in k})),
    "other-output": lambda: GraniteMoeForCausalLM(GraniteMoeConfig(**SMALL, num_local_experts=EXPERTS)),
    "other-weights": lambda: PhimoeForCausalLM(PhimoeConfig(**SMALL, num_local_experts=EXPERTS)),
}

ROLLOUT = random_rollout([3, 9, 1, 6])
BATCH = pack(ROLLOUT, [0, 1, 2, 3])
N = BATCH.input_ids.shape[1]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A model of three layers, the middle one dense."""
    return saved(tmp_path_factory.mktemp("routing"), KNOWN["qwen3-moe-norm"])


def saved(folder, family):
    torch.manual_seed(0)
    family().save_pretrained(folder)
    return str(folder)


def someones_experts(seed=0, tokens=N):
    generator = torch.Generator().manual_seed(seed)
    experts = torch.rand(tokens, LAYERS, EXPERTS, generator=generator).argsort(-1)[..., :K]
    experts[:, DENSE] = 0  # as vLLM fills layers without a router
    return experts


def own_experts(policy):
    with torch.no_grad(), recorded(policy, N) as own:
        token_logprobs(policy, BATCH, 1.0)
    return own


def replay(policy, experts, batch=BATCH):
    """Log-probs, and gradients of a sum of them by name; the backward pass comes after the block."""
    policy.zero_grad()
    with replayed(policy, experts):
        logprobs = token_logprobs(policy, batch, 1.0)[0]
    (logprobs * torch.linspace(-1, 2, len(logprobs))).sum().backward()
    return logprobs.detach(), {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def with_hand_made_experts(policy, experts):
    """Compute the mixtures token by token and expert by expert, with nothing of the routers but their weights."""

    def hand_made(block, chosen):
        def forward(hidden):
            rows = []
            for token, row in zip(hidden[0], chosen.tolist(), strict=True):
                probabilities = linear(token, block.gate.weight).exp()[row]
                probabilities = probabilities / probabilities.sum()
                parts = []
                for expert, probability in zip(row, probabilities, strict=True):
                    gate, up = linear(token, block.experts.gate_up_proj[expert]).chunk(2)
                    parts.append(probability * linear(silu(gate) * up, block.experts.down_proj[expert]))
                rows.append(sum(parts))
            return torch.stack(rows)[None]

        return forward

    for layer in set(range(LAYERS)) - {DENSE}:
        block = policy.model.layers[layer].mlp
        block.forward = hand_made(block, experts[:, layer])
    return policy


def assert_same(got, want, exactly=False):
    (logprobs, gradients), (wanted_logprobs, wanted_gradients) = got, want
    tolerance = {"atol": 0, "rtol": 0} if exactly else {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(logprobs, wanted_logprobs, **tolerance)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted_gradients[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_anyones_experts_give_the_log_probs_and_gradients_of_a_computation_by_hand(path, implementation, checkpointing):
    experts = someones_experts()
    policy = load_policy(path, gradient_checkpointing=checkpointing)
    policy.set_experts_implementation(implementation)
    plain, (logprobs, gradients) = replay(policy, None), replay(policy, experts)
    want = replay(with_hand_made_experts(load_policy(path), experts), None)
    assert_same((logprobs, gradients), want)
    assert (logprobs - plain[0]).abs().max() > 0.1
    for layer in (0, 2):
        assert gradients[f"model.layers.{layer}.mlp.gate.weight"].abs().max() > 1e-3
    assert_same(replay(policy, None), plain, exactly=True)  # nothing stays


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", KNOWN)
def test_replaying_its_own_choices_changes_no_bit(tmp_path, family, precision):
    policy = load_policy(saved(tmp_path, KNOWN[family]), precision=precision)
    check_replay(policy)
    own = own_experts(policy)
    assert_same(replay(policy, own), replay(policy, None), exactly=True)
    assert set(routers(policy)) == {i for i in range(LAYERS) if (own[:, i] >= 0).all()}


@pytest.mark.parametrize("family", UNKNOWN)
def test_routers_that_are_not_known_are_refused_in_one_line(tmp_path, family):
    policy = load_policy(saved(tmp_path, UNKNOWN[family]))
    with pytest.raises(UserError, match=rf"^model: .* routers of {type(policy).__name__}; it knows Qwen2-MoE.*$"):
        check_replay(policy)


def test_a_known_router_that_computes_something_else_is_refused(path):
    policy = load_policy(path)
    gate = policy.model.layers[2].mlp.gate
    forward = gate.forward
    gate.forward = lambda hidden: (lambda logits, weights, own: (logits, 1.01 * weights, own))(*forward(hidden))
    with pytest.raises(UserError, match="Qwen3MoeForCausalLM"):
        check_replay(policy)


def test_a_token_without_experts_gets_the_routers_own(path):
    policy = load_policy(path)
    experts = someones_experts()
    experts[::3, :, 0] = -1  # one unknown of the k is enough
    experts[5] = -1
    unknown = (experts < 0).any(-1, keepdim=True)
    with torch.no_grad(), replayed(policy, experts), recorded(policy, N) as own:
        token_logprobs(policy, BATCH, 1.0)
    mixed = torch.where(unknown, own, experts)
    assert_same(replay(policy, experts), replay(with_hand_made_experts(load_policy(path), mixed), None))
    assert_same(replay(policy, torch.full_like(experts, -1)), replay(policy, None), exactly=True)


@pytest.mark.parametrize("inside", [True, False])
def test_what_is_computed_again_uses_the_experts_of_its_forward_pass(path, inside):
    first, second = someones_experts(1), someones_experts(2)
    policy = load_policy(path)
    want = [replay(policy, experts)[1] for experts in (first, second)]
    policy = load_policy(path, gradient_checkpointing=True)
    losses = []
    for experts in (first, second):
        with replayed(policy, experts):
            logprobs = token_logprobs(policy, BATCH, 1.0)[0]
        losses.append((logprobs * torch.linspace(-1, 2, len(logprobs))).sum())
    with replayed(policy, someones_experts(3)) if inside else nullcontext():
        sum(losses).backward()
    got = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
    both = {name: sum(gradients[name] for gradients in want) for name in got}
    assert_same((torch.zeros(1), got), (torch.zeros(1), both))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_backward_pass_may_be_inside_the_block(path, checkpointing):
    experts = someones_experts()
    want = replay(load_policy(path), experts)
    policy = load_policy(path, gradient_checkpointing=checkpointing)
    with replayed(policy, experts), recorded(policy, N):
        got = replay(policy, experts)
    assert_same(got, want)


def test_experts_are_in_the_order_of_the_row(path):
    policy = load_policy(path)
    lengths = (ROLLOUT.prompt_lengths + ROLLOUT.response_lengths - 1).tolist()
    experts = [someones_experts(i, length) for i, length in enumerate(lengths)]
    alone = torch.zeros_like(ROLLOUT.rollout_logprobs)
    for i in range(len(ROLLOUT)):
        one = pack(ROLLOUT, [i])
        alone[one.index] = replay(policy, experts[i], one)[0]
    longest_first = sorted(range(len(ROLLOUT)), key=lambda i: -lengths[i])
    assert longest_first != sorted(longest_first)
    together, _ = replay(policy, torch.cat([experts[i] for i in longest_first]))
    torch.testing.assert_close(together, alone[BATCH.index], atol=2e-5, rtol=1e-4)


def test_narrow_integers_will_do(path):
    policy = load_policy(path)
    assert_same(replay(policy, someones_experts().to(torch.int8)), replay(policy, someones_experts()), exactly=True)


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (someones_experts()[:, :2], r"of shape \(\d+, 2, 2\); must be signed integers of shape \(tokens, 3, 2\)"),
        (someones_experts()[..., :1], "of shape"),
        (someones_experts().float(), "torch.float32"),
        (someones_experts().to(torch.uint8), "torch.uint8"),
        (someones_experts()[:-1], f"are for {N - 1} tokens, but the row has {N}"),
        (someones_experts() + EXPERTS, "must be from 0 to 7, or -1"),
        (someones_experts() - 2, "must be from 0 to 7, or -1"),
    ],
)
def test_experts_that_do_not_fit_are_refused_and_nothing_stays(path, experts, reason):
    policy = load_policy(path)
    plain = replay(policy, None)
    with pytest.raises(ValueError, match=reason):
        replay(policy, experts)
    assert_same(replay(policy, None), plain, exactly=True)


def test_a_record_has_the_choices_of_the_routers_own_weights(path):
    policy = load_policy(path)
    inputs = {}
    for layer, router in routers(policy).items():
        router.register_forward_pre_hook(lambda module, args, layer=layer: inputs.update({layer: args[0].detach()}))
    own = own_experts(policy)
    for layer, router in routers(policy).items():
        assert torch.equal(own[:, layer], linear(inputs[layer], router.weight).topk(K).indices)
    assert (own[:, DENSE] == -1).all()


def test_agreement_counts_choices_in_any_order_where_both_are_known():
    own = torch.tensor([[[0, 1], [-1, -1]], [[2, 3], [-1, -1]], [[4, 5], [-1, -1]]])
    given = torch.tensor([[[1, 0], [0, 0]], [[3, 7], [0, 0]], [[-1, -1], [0, 0]]])
    assert agreement(own, given).tolist() == [[True, True], [True, False]]
    assert agreement(own, own).all()


# Through rollouts and the module


def with_own_experts(policy, rollout):
    """The rollout as an engine with the policy's own routers would have given it, from one response at a time."""
    completions = []
    for i, (prompt, response) in enumerate(rollout.sequences()):
        batch = pack(rollout, [i])
        with torch.no_grad(), recorded(policy, batch.input_ids.shape[1]) as own:
            token_logprobs(policy, batch, rollout.temperature)
        assert len(own) == len(prompt) + len(response) - 1
        completions.append(Completion(response.tolist(), [], "stop", experts=own.to(torch.int16)))
    return replace(rollout, experts=gathered_experts(completions))


@pytest.mark.parametrize("options", [{"mini_batches": 2, "micro_batch_tokens": 30}, {}])
@pytest.mark.parametrize("shared", [False, True])
def test_a_rollout_with_the_policys_own_experts_trains_as_one_without(path, options, shared):
    given = random_rollout([3, 9, 1, 6], shared=shared)
    plain, _ = train([given], model=path, **options)
    rollout = with_own_experts(load_policy(path), given)
    replayed_, recorder = train([rollout], model=path, **options)
    assert recorder.metrics[0]["train/routing_agreement"] == 1
    for (name, a), b in zip(plain.named_parameters(), replayed_.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_prompt_with_other_experts_is_not_shared(path):
    plain = random_rollout([3, 9, 5, 6], shared=True, rewards=[0.0, 1.0, 0.0, 1.0])
    rollout = with_own_experts(load_policy(path), plain)
    assert rollout.prompt_of == plain.prompt_of == [0, 0, 2, 2]
    last = int(rollout.prompt_lengths[0]) - 1  # where the first response's first token is predicted
    experts = rollout.experts.clone()
    experts[last] = torch.where(experts[last] >= 0, (experts[last] + 1) % EXPERTS, experts[last])
    experts[last, DENSE] = rollout.experts[last, DENSE]
    rollout = replace(rollout, experts=experts)
    assert rollout.prompt_of == [0, 1, 2, 2]
    _, together = train([rollout], model=path)
    _, alone = train([rollout], model=path, micro_batch_tokens=1)
    assert together.metrics[0]["train/routing_agreement"] == alone.metrics[0]["train/routing_agreement"] < 1
    torch.testing.assert_close(together.outputs[0]["scores"].logprobs, alone.outputs[0]["scores"].logprobs)


def test_a_rollout_with_other_experts_trains_on_those(path):
    rollout = with_own_experts(load_policy(path), ROLLOUT)
    other = torch.where(rollout.experts >= 0, (rollout.experts + 1) % EXPERTS, rollout.experts)
    other[:, DENSE] = rollout.experts[:, DENSE]
    (plain, _), (moved, recorder) = (train([some], model=path) for some in (rollout, replace(rollout, experts=other)))
    assert recorder.metrics[0]["train/routing_agreement"] < 1
    assert not all(torch.equal(a, b) for a, b in zip(plain.parameters(), moved.parameters(), strict=True))


def test_experts_stay_with_their_sequences(path):
    rollout = with_own_experts(load_policy(path), ROLLOUT)
    lengths = (rollout.prompt_lengths + rollout.response_lengths).tolist()
    parts = rollout.experts.split(lengths)
    assert all((part[-1] == -1).all() for part in parts)
    assert torch.equal(rollout.select([2, 3]).experts, torch.cat(parts[2:]))
    assert torch.equal((rollout + rollout.select([0, 1])).experts, torch.cat([*parts, *parts[:2]]))
    told = Completion([1], [-0.1], "stop", experts=torch.zeros(3, LAYERS, K, dtype=torch.int16))
    with pytest.raises(RuntimeError, match="1 of 2 responses have no experts"):
        gathered_experts([told, Completion([1], [-0.1], "stop")])
    assert gathered_experts([Completion([1], [-0.1], "stop")]) is None
