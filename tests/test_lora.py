"""Adapters are trained, the base is not; the engine samples from both together."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from dclightning import GRPOModule, LoRA, ParallelStrategy, ReferenceKL, Sampling, VLLMEngine
from dclightning.callbacks import RolloutCheckpoint, StaleWeights
from dclightning.errors import UserError
from dclightning.export import export
from dclightning.lora import is_adapter, save_adapters, without_adapters
from dclightning.models import load_policy, named_weights, resolve_model, token_logprobs
from dclightning.packing import pack
from tests.helpers import TINY, GivenRollouts, quiet_trainer, random_rollout, train
from tests.test_engine import PROMPTS, as_rollout, trainer_logprobs
from tests.test_fit import fit, same_weights
from tests.test_models import FAMILIES, saved


@torch.no_grad()
def moved(path=TINY, lora=LoRA(rank=4, alpha=6.0)):
    """A policy whose adapters have left zero."""
    policy = load_policy(path, lora=lora)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return policy


def test_training_moves_adapters_and_nothing_else():
    rollouts = [random_rollout([3, 9, 1, 6], seed=i, version=i) for i in range(3)]
    base = dict(load_policy(TINY).named_parameters())
    module, recorder = train(rollouts, lora=LoRA(rank=4))
    assert all((output["ratio"] == 1).all() for output in recorder.outputs)  # one optimizer step to a rollout
    trained = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
    assert len(trained) == 70
    assert recorder.gradients.keys() == trained.keys()
    assert sum(p.numel() for group in module.optimizers().param_groups for p in group["params"]) == sum(
        p.numel() for p in trained.values()
    )
    for name, parameter in module.model.named_parameters():
        if name in trained:
            assert is_adapter(name)
            assert parameter.abs().sum() > 0  # B began as zero
        else:
            assert torch.equal(parameter, base[name.replace(".base_layer", "")])
    assert module.state_dict().keys() == {f"model.{name}" for name in trained}


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_merged_weights_are_pefts_own_merge(tmp_path, family):
    path = saved(tmp_path, FAMILIES[family]())
    policy = moved(path)
    before = {name: parameter.clone() for name, parameter in policy.named_parameters()}
    merged = [dict(named_weights(policy)) for _ in range(2)]
    assert all(torch.equal(parameter, before[name]) for name, parameter in policy.named_parameters())
    save_adapters(named_weights(policy).adapters(), policy.lora, path, tmp_path)
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tmp_path)
    want = dict(theirs.merge_and_unload().named_parameters())
    plain = dict(load_policy(path).named_parameters())
    assert want.keys() == plain.keys() == merged[0].keys()
    assert any(not torch.equal(want[name], plain[name]) for name in want)
    for name, weight in want.items():
        assert torch.equal(merged[0][name], weight)
        assert torch.equal(merged[1][name], weight)


def test_gradients_are_those_of_the_merged_weights(tmp_path):
    policy = moved(saved(tmp_path, FAMILIES["qwen3"]()))
    packed = pack(random_rollout([3, 9, 1, 6]), [0, 1, 2, 3])
    token_logprobs(policy, packed, 1.0).logprobs.sum().backward()
    path = str(tmp_path / "model")
    whole = load_policy(path)
    whole.load_state_dict(dict(named_weights(policy)), strict=False)
    token_logprobs(whole, packed, 1.0).logprobs.sum().backward()
    scale = 6.0 / 4
    for layer, module in policy.named_modules():
        if hasattr(module, "lora_A"):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            gradient = whole.get_submodule(layer).weight.grad  # of W + scale B A
            torch.testing.assert_close(a.grad, scale * b.T @ gradient, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(b.grad, scale * gradient @ a.T, rtol=1e-3, atol=1e-5)


def test_recomputed_activations_give_adapters_the_same_gradients():
    rollout = random_rollout([3, 9, 1, 6])
    (_, plain), (_, recomputed) = (
        train([rollout], lora=LoRA(rank=4), gradient_checkpointing=on) for on in (False, True)
    )
    assert plain.gradients.keys() == recomputed.gradients.keys()
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(recomputed.gradients[name], gradient, rtol=1e-5, atol=1e-7)
    assert any(gradient.abs().sum() > 0 for gradient in plain.gradients.values())


@torch.no_grad()
def test_the_reference_is_the_policy_without_adapters():
    rollouts = [random_rollout([3, 9, 1, 6], seed=i, version=i) for i in range(2)]
    module, recorder = train(rollouts, lora=LoRA(rank=4), reference_kl=ReferenceKL(0.1))
    assert module.reference is module.model
    assert recorder.metrics[0]["train/reference_kl"] > 0
    packed = pack(rollouts[0], [0, 1, 2, 3])
    with without_adapters(module.model):
        base = token_logprobs(module.model, packed, 1.0).logprobs
    assert torch.equal(base, token_logprobs(load_policy(TINY), packed, 1.0).logprobs)
    assert not torch.equal(base, token_logprobs(module.model, packed, 1.0).logprobs)
    assert all(p.requires_grad == is_adapter(name) for name, p in module.model.named_parameters())


def test_the_seed_decides_the_first_adapters():
    def first(seed):
        torch.rand(1)  # however much is drawn from the global generator
        return named_weights(load_policy(TINY, lora=LoRA(), seed=seed)).adapters()

    one, again, other = first(1), first(1), first(2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    plain = dict(named_weights(load_policy(TINY)))
    assert all(torch.equal(plain[name], w) for name, w in named_weights(load_policy(TINY, lora=LoRA())))


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "input_layernorm", "nothing"])
def test_layers_that_cannot_have_adapters_are_refused(name):
    with pytest.raises(UserError, match=rf"lora.target_modules=\['{name}'\]: linear layers are down_proj, gate_proj"):
        load_policy(TINY, lora=LoRA(target_modules=[name]))


@pytest.mark.parametrize("options", [{"rank": 0}, {"alpha": 0.0}, {"target_modules": "q_proj"}])
def test_bad_settings_are_named(options):
    ((field, value),) = options.items()
    with pytest.raises(ValueError, match=f"lora.{field}={value!r}: must be"):
        LoRA(**options)


def test_what_adapters_cannot_be_with_is_refused():
    with pytest.raises(TypeError, match="lora='yes': must be a LoRA"):
        GRPOModule(TINY, lora="yes")
    with pytest.raises(UserError, match=r"tensor_parallel_size=2: must be 1 with model\.lora"):
        load_policy(TINY, ParallelStrategy(tensor_parallel_size=2), lora=LoRA())


@pytest.fixture(scope="module")
def engines():
    """One takes merged weights, one adapters."""
    both = [VLLMEngine(dtype="float32", kv_cache_gib=0.0625, lora_rank=rank) for rank in (0, 4)]
    for engine in both:
        engine.start(resolve_model(TINY), max_length=128)
    yield both
    for engine in both:
        engine.close()


@pytest.mark.slow
def test_both_engines_sample_from_the_trained_policy(engines):
    for version in (1, 2):  # the second sync meets what the first left behind
        policy = moved(lora=LoRA(rank=4, alpha=6.0))
        found = []
        for engine in engines:
            engine.load_weights(named_weights(policy), version)
            assert engine.version == version
            assert engine.differing_weights(named_weights(policy)) == []
            completions = engine.generate(PROMPTS, Sampling(max_tokens=30), 4, seed=version)
            rollout = as_rollout(PROMPTS, completions, 4, 1.0)
            assert (trainer_logprobs(policy, rollout) - rollout.rollout_logprobs).abs().max() < 1e-3
            found.append(engine.distributions(PROMPTS, 1.0))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        policy.model.layers[1].self_attn.k_proj.lora_B["default"].weight[0, 0] += 1e-3
    assert engines[1].differing_weights(named_weights(policy)) == ["model.layers.1.self_attn.qkv_proj.lora_B"]


@pytest.mark.slow
def test_an_engine_for_adapters_refuses_others(engines, tmp_path):
    with pytest.raises(UserError, match="engine lora_rank=4: there are no adapters"):
        engines[1].load_weights(named_weights(load_policy(TINY)), 1)
    with pytest.raises(UserError, match=r"engine lora_rank=4: must be at least model.lora.rank, 8"):
        engines[1].load_weights(named_weights(load_policy(TINY, lora=LoRA(rank=8))), 1)
    mixture = saved(tmp_path, FAMILIES["qwen3-moe"]())
    with pytest.raises(UserError, match="engine lora_rank=4: must be 0 for models with experts on a CPU"):
        VLLMEngine(lora_rank=4).start(mixture, 64)
    with pytest.raises(ValueError, match="sleep: must be false with lora_rank"):
        VLLMEngine(sleep=True, lora_rank=4)
    with pytest.raises(ValueError, match="lora_rank=513: must be from 0 to 512"):
        VLLMEngine(lora_rank=513)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose FP8 engine takes adapters; of two epochs at once, and with a break between them."""

    def run(folder, epochs, ckpt_path=None):
        engine = VLLMEngine("fp8_per_channel", dtype="bfloat16", kv_cache_gib=0.0625, lora_rank=4)
        callbacks = [StaleWeights(action="stop"), RolloutCheckpoint()]
        options = {"rollouts": 2, "epochs": epochs, "ckpt_path": ckpt_path, "engine": engine}
        return fit(folder, callbacks, module_options={"lora": LoRA(rank=4)}, **options)

    folder = tmp_path_factory.mktemp("lora")
    whole, rows = run(folder / "whole", 2)
    _, before = run(folder / "parts", 1)
    resumed, after = run(folder / "parts", 2, folder / "parts" / "run" / "checkpoints" / "last.ckpt")
    assert before + after == rows
    assert same_weights(resumed, whole)
    return folder / "parts" / "run", resumed.model


@pytest.mark.slow
def test_a_resumed_run_equals_the_whole_and_its_checkpoints_hold_adapters_alone(trained):
    folder, policy = trained
    saved = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert saved["lora"] == {"rank": 4, "alpha": 32.0, "target_modules": "all-linear"}
    adapters = named_weights(policy).adapters()
    assert saved["state_dict"].keys() == {f"model.{name}" for name in adapters}
    assert all(torch.equal(saved["state_dict"][f"model.{name}"], weight) for name, weight in adapters.items())
    assert len(saved["optimizer_states"][0]["state"]) == len(adapters)


@pytest.mark.slow
@torch.no_grad()
def test_both_exports_are_the_policy(trained, tmp_path):
    folder, policy = trained
    for name, merge in (("merged", True), ("adapters", False)):
        export(folder, tmp_path / name, model=TINY, dtype="float32", merge=merge)
        card = (tmp_path / name / "README.md").read_text()
        assert ("library_name: transformers" if merge else "library_name: peft") in card
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    merged = dict(named_weights(policy))
    assert all(torch.equal(parameter, merged[name]) for name, parameter in loaded.named_parameters())
    base = AutoModelForCausalLM.from_pretrained(resolve_model(TINY), dtype=torch.float32)
    base_logits = base(torch.tensor(PROMPTS[:1])).logits
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapters")(torch.tensor(PROMPTS[:1])).logits
    policy.set_attn_implementation("sdpa")
    logits = policy(torch.tensor(PROMPTS[:1])).logits
    policy.set_attn_implementation("dclightning_packed")
    assert (logits - base_logits).abs().max() > 1e-3
    torch.testing.assert_close(adapted, logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(loaded(torch.tensor(PROMPTS[:1])).logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_a_checkpoint_of_other_adapters_is_refused(trained):
    path = trained[0] / "checkpoints" / "last.ckpt"
    for lora in (LoRA(rank=8), None):
        with pytest.raises(UserError, match=r"model.lora=.*: the checkpoint is of lora=\{'rank': 4"):
            quiet_trainer(max_epochs=3).fit(
                GRPOModule(TINY, lora=lora), GivenRollouts([random_rollout([3, 5])]), ckpt_path=path
            )
