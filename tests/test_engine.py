"""The real engine against transformers on the same weights."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dclightning import Sampling, VLLMEngine
from dclightning.discrepancy import divergences
from dclightning.errors import UserError
from dclightning.models import load_policy, load_tokenizer, named_weights, resolve_model, token_logprobs
from dclightning.packing import pack
from dclightning.rollout.rounding import FORMATS
from dclightning.rollout.transformers import TransformersEngine
from dclightning.rollout.types import Rollout, Scores
from tests.helpers import TINY
from tests.test_models import FAMILIES, saved

PROMPTS = [[6, 40, 41, 42, 7], [6, 50, 51, 7], [6, 60, 61, 62, 63, 7]]


def as_rollout(prompts, completions, group_size, temperature):
    scores = Scores(torch.zeros(len(completions)), {})
    return Rollout.of(prompts, completions, scores, Sampling(64, temperature), group_size, weight_version=0)


@torch.no_grad()
def trainer_logprobs(model, rollout):
    packed = pack(rollout, list(range(len(rollout))))
    logprobs = torch.empty(len(packed.index))
    logprobs[packed.index] = token_logprobs(model, packed, rollout.temperature)[0]
    return logprobs


@torch.no_grad()
def greedy(model, prompt, length, end=None):
    ids = list(prompt)
    model.set_attn_implementation("eager")
    for _ in range(length):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == end:
            break
    model.set_attn_implementation("dclightning_packed")
    return ids[len(prompt) :]


# Those with experts come first: vLLM cannot start them beside the dense ones that the rest share.


@pytest.mark.parametrize("family", ["qwen3", "qwen3-untied", "qwen3-moe"])
def test_after_a_sync_the_engine_is_the_trainers_model(tmp_path, family):
    path = saved(tmp_path, FAMILIES[family]())
    engine = VLLMEngine(dtype="float32", kv_cache_gib=0.0625)
    engine.start(path, max_length=64)
    try:
        model = load_policy(path)
        for version in (1, 2):  # the second sync meets what the first left behind
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.1)
            engine.load_weights(named_weights(model), version)
            assert engine.version == version
            completions = engine.generate(PROMPTS, Sampling(max_tokens=20, temperature=0.0), 1, seed=0)
            for prompt, completion in zip(PROMPTS, completions, strict=True):
                assert completion.token_ids == greedy(model, prompt, len(completion.token_ids))
            completions = engine.generate(PROMPTS, Sampling(max_tokens=20), 2, seed=0)
            rollout = as_rollout(PROMPTS, completions, 2, 1.0)
            gap = trainer_logprobs(model, rollout) - rollout.rollout_logprobs
            assert gap.abs().max() < 1e-3
    finally:
        engine.close()


def test_simulated_experts_round(tmp_path):
    path = saved(tmp_path, FAMILIES["qwen3-moe"]())
    model, apart = load_policy(path), {}
    for quantization in ("fp8_per_channel", "int4"):
        engine = VLLMEngine(quantization, dtype="float32", kv_cache_gib=0.0625)
        engine.start(path, max_length=64)
        try:
            sampled = [engine.distributions(PROMPTS, 1.0)]
            engine.load_weights(((name, weight * 2) for name, weight in named_weights(model)), 1)
            sampled.append(engine.distributions(PROMPTS, 1.0))
            engine.load_weights(named_weights(model), 2)
            sampled.append(engine.distributions(PROMPTS, 1.0))
        finally:
            engine.close()
        assert torch.equal(sampled[0], sampled[2])
        assert not torch.equal(sampled[0], sampled[1])
        plain = TransformersEngine()
        plain.start(path, 64)
        apart[quantization] = divergences(plain.distributions(PROMPTS, 1.0), sampled[0])["total_variation"].mean()
    assert 0 < apart["fp8_per_channel"] < apart["int4"]


@pytest.fixture(scope="module")
def fp32_engine():
    """The tiny model in FP32: nothing but kernels between it and transformers."""
    engine = VLLMEngine(dtype="float32", kv_cache_gib=0.0625)
    engine.start(resolve_model(TINY), max_length=128)
    from vllm.v1.sample import sampler

    assert not hasattr(sampler.batched_count_greater_than, "_torchdynamo_orig_callable")  # is not compiled
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_logprobs_are_the_trainers_at_every_temperature(fp32_engine, temperature):
    model = load_policy(TINY)
    fp32_engine.load_weights(named_weights(model), 0)
    completions = fp32_engine.generate(PROMPTS, Sampling(max_tokens=40, temperature=temperature), 4, seed=1)
    rollout = as_rollout(PROMPTS, completions, 4, temperature)
    gap = (trainer_logprobs(model, rollout) - rollout.rollout_logprobs).abs()
    assert gap.median() < 1e-4
    assert gap.max() < 1e-2


def test_the_end_token_is_sampled_trained_on_and_has_a_logprob(fp32_engine):
    tokenizer = load_tokenizer(TINY)
    question = [{"role": "user", "content": "What is 12 + 34?"}]
    prompt = list(tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"])
    completions = fp32_engine.generate([prompt], Sampling(max_tokens=60), 4, seed=0)
    for completion in completions:
        assert completion.finish_reason == "stop"
        assert completion.token_ids[-1] == tokenizer.eos_token_id
        assert len(completion.logprobs) == len(completion.token_ids)
    (cut,) = fp32_engine.generate([prompt], Sampling(max_tokens=3), 1, seed=0)
    assert (cut.finish_reason, len(cut.token_ids)) == ("length", 3)


def test_a_seed_decides_every_token(fp32_engine):
    sampling = Sampling(max_tokens=30, temperature=1.5)

    def draw(seed):
        return [c.token_ids for c in fp32_engine.generate(PROMPTS, sampling, 4, seed)]

    first = draw(0)
    assert draw(1) != first
    assert draw(0) == first
    assert len({tuple(ids) for ids in first[:4]}) > 1  # the responses to one prompt differ


def test_groups_are_told_as_they_finish_and_are_those_of_vllms_own_loop(fp32_engine):
    from vllm import SamplingParams

    sampling, told = Sampling(max_tokens=30, temperature=1.5), []

    def finished(place, group):
        told.append((place, group, fp32_engine._llm.llm_engine.has_unfinished_requests()))

    completions = fp32_engine.generate(PROMPTS, sampling, 2, 5, finished)
    assert sorted(place for place, _, _ in told) == [0, 1, 2]
    for place, group, _ in told:
        assert group == completions[2 * place : 2 * place + 2]
    longest = [max(len(c.token_ids) for c in group) for _, group, _ in told]
    assert longest == sorted(longest)
    assert [unfinished for _, _, unfinished in told] == [length < longest[-1] for length in longest]

    torch.manual_seed(5)
    options = SamplingParams(n=2, max_tokens=30, temperature=1.5, logprobs=0, detokenize=False)
    theirs = fp32_engine._llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], options, use_tqdm=False)
    assert [c.token_ids for c in completions] == [list(o.token_ids) for request in theirs for o in request.outputs]


def test_sampling_leaves_the_callers_random_state_alone(fp32_engine):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    fp32_engine.generate(PROMPTS, Sampling(max_tokens=5), 1, seed=9)
    assert torch.equal(torch.get_rng_state(), before)


def test_whole_distributions_are_transformers(fp32_engine, plain_engine):
    for engine in (fp32_engine, plain_engine):
        engine.load_weights(named_weights(load_policy(TINY)), 0)
    ours, theirs = (engine.distributions(PROMPTS, temperature=0.7) for engine in (fp32_engine, plain_engine))
    assert ours.shape == (3, fp32_engine._llm.llm_engine.model_config.get_vocab_size())
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(ours.exp().sum(-1), torch.ones(3))


def test_ranks_are_those_of_the_distributions(fp32_engine):
    fp32_engine.load_weights(named_weights(load_policy(TINY)), 0)
    completions = fp32_engine.generate(PROMPTS, Sampling(max_tokens=1, temperature=2.0), 20, seed=0)
    rows = fp32_engine.distributions(PROMPTS, temperature=2.0).repeat_interleave(20, dim=0)
    for row, completion in zip(rows, completions, strict=True):
        assert completion.ranks == [int((row > row[completion.token_ids[0]]).sum()) + 1]


def test_weights_that_are_not_the_trainers_are_named(fp32_engine):
    model = load_policy(TINY)
    fp32_engine.load_weights(named_weights(model), 0)
    assert fp32_engine.differing_weights(named_weights(model)) == []
    with torch.no_grad():
        model.model.norm.weight[3] *= 1.0001
    assert fp32_engine.differing_weights(named_weights(model)) == ["model.norm.weight"]


def test_logprobs_are_finite(fp32_engine):
    completions = fp32_engine.generate(PROMPTS, Sampling(max_tokens=20, temperature=2.0), 8, seed=0)
    assert all(math.isfinite(logprob) and logprob <= 1e-4 for c in completions for logprob in c.logprobs)


@pytest.fixture(scope="module")
def plain_engine():
    """transformers on the same weights, in batches that do not fit groups."""
    engine = TransformersEngine(batch_size=5)
    engine.start(resolve_model(TINY), max_length=128)
    yield engine
    engine.close()


@pytest.mark.parametrize("temperature", [0.6, 1.5])
def test_transformers_samples_with_the_trainers_logprobs(plain_engine, temperature):
    model, told = load_policy(TINY), []
    plain_engine.load_weights(named_weights(model), 3)
    completions = plain_engine.generate(
        PROMPTS,
        Sampling(max_tokens=40, temperature=temperature),
        4,
        1,
        lambda place, group: told.append((place, group)),
    )
    assert told == [(place, completions[4 * place : 4 * place + 4]) for place in range(3)]
    rollout = as_rollout(PROMPTS, completions, 4, temperature)
    torch.testing.assert_close(trainer_logprobs(model, rollout), rollout.rollout_logprobs, rtol=1e-4, atol=1e-4)
    assert plain_engine.version == 3


def test_transformers_and_vllm_give_the_same_tokens_the_same_logprobs(fp32_engine, plain_engine):
    fp32_engine.load_weights(named_weights(load_policy(TINY)), 0)
    plain_engine.load_weights(named_weights(load_policy(TINY)), 0)
    tokenizer, found = load_tokenizer(TINY), []
    chats = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in ((12, 34), (7, 50), (61, 18))]
    prompts = [list(tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) for chat in chats]
    for engine in (plain_engine, fp32_engine):
        for completion in engine.generate(prompts, Sampling(max_tokens=60, temperature=0.0), 1, 0):
            found.append(completion)
            assert completion.finish_reason == "stop"
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        # From where a tie is broken otherwise, they go different ways.
        same = next(
            (i for i, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=False)) if a != b),
            len(ours.token_ids),
        )
        assert same >= 5
        torch.testing.assert_close(
            torch.tensor(ours.logprobs[:same]), torch.tensor(theirs.logprobs[:same]), rtol=1e-3, atol=1e-3
        )


def test_transformers_sampling_follows_the_seed_and_stops_at_the_end_token(plain_engine):
    tokenizer = load_tokenizer(TINY)
    question = [{"role": "user", "content": "What is 12 + 34?"}]
    prompt = list(tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"])

    def draw(seed):
        return plain_engine.generate([prompt], Sampling(max_tokens=60), 8, seed)

    first = draw(0)
    assert first == draw(0) != draw(1)
    assert all(c.token_ids.index(tokenizer.eos_token_id) == len(c.token_ids) - 1 for c in first)
    assert len({tuple(c.token_ids) for c in first}) > 1
    top = plain_engine.generate([prompt], Sampling(max_tokens=60, top_k=1), 2, 0)
    assert top[0] == top[1]


def test_bf16_rounds_and_its_engine_leaves_others_as_they_are(fp32_engine):
    model = load_policy(TINY)
    sampled = fp32_engine.generate(PROMPTS, Sampling(max_tokens=30), 4, seed=0)
    engine = VLLMEngine(dtype="bfloat16", kv_cache_gib=0.0625)
    engine.start(resolve_model(TINY), max_length=64)
    try:
        engine.load_weights(named_weights(model), 1)
        completions = engine.generate(PROMPTS, Sampling(max_tokens=30), 4, seed=0)
    finally:
        engine.close()
    rollout = as_rollout(PROMPTS, completions, 4, 1.0)
    delta = (trainer_logprobs(model, rollout).exp() - rollout.rollout_logprobs.exp()).abs()
    assert 1e-6 < delta.mean() < 0.02
    assert fp32_engine.generate(PROMPTS, Sampling(max_tokens=30), 4, seed=0) == sampled


def test_fp8_rounds_and_a_sync_rounds_like_a_fresh_load():
    model = load_policy(TINY)
    engine = VLLMEngine("fp8_per_channel", dtype="bfloat16", kv_cache_gib=0.0625)
    engine.start(resolve_model(TINY), max_length=64)
    try:
        sampling = Sampling(max_tokens=30)
        fresh = engine.generate(PROMPTS, sampling, 4, seed=0)
        negated = (
            (name, -weight if name.endswith("gate_proj.weight") else weight) for name, weight in named_weights(model)
        )
        engine.load_weights(negated, 1)  # no scale changes
        other = engine.generate(PROMPTS, sampling, 4, seed=0)
        engine.load_weights(named_weights(model), 2)
        back = engine.generate(PROMPTS, sampling, 4, seed=0)
    finally:
        engine.close()
    assert [c.logprobs for c in other] != [c.logprobs for c in fresh]
    assert [(c.token_ids, c.logprobs) for c in back] == [(c.token_ids, c.logprobs) for c in fresh]
    rollout = as_rollout(PROMPTS, fresh, 4, 1.0)
    delta = (trainer_logprobs(model, rollout).exp() - rollout.rollout_logprobs.exp()).abs()
    assert 1e-5 < delta.mean() < 0.05  # real, and small


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quantization": "fp8", "simulate": False}, "vLLM has no CPU kernel for it"),
        ({"quantization": "int4", "simulate": False}, "from checkpoints only"),
        ({"quantization": "fp8_per_channel", "simulate": False, "dtype": "float32"}, "bfloat16 or float16 only"),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, "kv_cache_dtype='bfloat16': on a CPU it must be auto"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': on a CPU it must be auto"),
        ({"routing_replay": True}, "has no experts"),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_the_reason(options, reason):
    with pytest.raises(UserError, match=reason):
        VLLMEngine(**options).start(resolve_model(TINY), 64)


def test_quantised_experts_and_their_choices_are_refused_on_a_cpu(tmp_path):
    path = saved(tmp_path, FAMILIES["qwen3-moe"]())
    with pytest.raises(UserError, match="no CPU kernel for quantised experts"):
        VLLMEngine("fp8_per_channel", simulate=False, dtype="bfloat16").start(path, 64)
    with pytest.raises(UserError, match="tells the experts on GPUs only"):
        VLLMEngine(routing_replay=True).start(path, 64)


def test_a_model_that_is_quantised_already_can_be_sampled_from_but_not_trained(tmp_path):
    path = Path(saved(tmp_path, FAMILIES["qwen3"]()))
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if "proj" in name]:
        scale = weights[name].float().abs().amax(1, keepdim=True) / 127
        weights[name.replace("weight", "weight_scale")] = scale
        weights[name] = (weights[name] / scale).round().to(torch.int8)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**eight_bits, "strategy": "channel"},
        "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
    }
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (path / "config.json").write_text(json.dumps(config))
    engine = VLLMEngine(kv_cache_gib=0.0625, dtype="bfloat16")
    engine.start(str(path), 64)
    try:
        assert len(engine.generate(PROMPTS, Sampling(max_tokens=4), 1, 0)) == 3
        with pytest.raises(UserError, match="is quantised already"):
            engine.load_weights(iter(()), 1)
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"quantization": "fp9"}, "quantization='fp9': must be one of none, fp8"),
        ({"simulate": "yes"}, "simulate='yes': must be auto, true or false"),
        ({"simulate": True}, "nothing to simulate"),
        ({"options": {"quantization_config": {"linear": "fp8_per_channel"}}}, "quantization_config is a setting"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(options, reason):
    with pytest.raises(ValueError, match=reason):
        VLLMEngine(**options)


def linear_weights(model):
    """The weights that vLLM's linear layers compute with, however they are packed: what they make of unit vectors."""
    from vllm.model_executor.layers.linear import LinearBase

    found = {}
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            unit = torch.eye(module.input_size)
            activations, module.quant_method.activations = module.quant_method.activations, None
            found[name] = module.quant_method.apply(module, unit).T.contiguous()
            module.quant_method.activations = activations
    return found


@pytest.mark.parametrize("quantization", list(FORMATS))
def test_a_simulated_engine_computes_with_the_rounded_weights_of_the_trainer(tmp_path, quantization):
    path = saved(tmp_path, FAMILIES["qwen3"]())
    model, rounding = load_policy(path), FORMATS[quantization][0]
    engine = VLLMEngine(quantization, simulate=True, dtype="float32", kv_cache_gib=0.0625)
    engine.start(path, max_length=64)
    try:
        for version in (0, 1):
            if version:  # a sync rounds as a fresh load does
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.add_(torch.randn_like(parameter) * 0.1)
                engine.load_weights(named_weights(model), version)
            (held,) = engine._llm.apply_model(linear_weights)
            sent = dict(named_weights(model))
            for name, weight in held.items():
                parts = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
                *path_of, last = name.split(".")
                whole = torch.cat([sent[".".join([*path_of, part, "weight"])] for part in parts.get(last, (last,))])
                assert torch.equal(weight, rounding(whole)), name
                assert not torch.equal(weight, whole)
            assert engine.differing_weights(named_weights(model)) == []
    finally:
        engine.close()


def test_simulated_fp8_is_close_to_native_fp8():
    """Both round weights and activations alike; only the accumulation differs."""
    rows = {}
    for simulate in (False, True):
        engine = VLLMEngine("fp8_per_channel", simulate=simulate, dtype="bfloat16", kv_cache_gib=0.0625)
        engine.start(resolve_model(TINY), max_length=64)
        try:
            rows[simulate] = engine.distributions(PROMPTS * 4, temperature=1.0)
        finally:
            engine.close()
    exact = TransformersEngine()
    exact.start(resolve_model(TINY), 64)
    truth = exact.distributions(PROMPTS * 4, temperature=1.0)
    apart = divergences(rows[True], rows[False])["total_variation"].mean()
    assert 0 < apart < divergences(truth, rows[False])["total_variation"].mean()
