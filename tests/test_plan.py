"""What ``dclightning plan`` says is what is there: parameters, shards, states, activations, caches."""

import json
import os
import socket
import subprocess
import sys
from logging.handlers import MemoryHandler
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM, DistributedConfig, Qwen3Config, Qwen3MoeConfig
from transformers.distributed.utils import initialize_distributed_mesh

from dclightning.attention import PACKED
from dclightning.errors import UserError
from dclightning.estimate import PHASES
from dclightning.memory import Layout, active, engine_weights, kv_bytes_per_token, parts, skeleton, total
from dclightning.models import LOGITS_IN_A_CHUNK, add_logprobs, load_policy, resolve_model, token_logprobs
from dclightning.packing import pack
from dclightning.plan import PlanCLI, PlanTrainer
from dclightning.rehearsal import rehearse
from dclightning.rollout.vllm import VLLMEngine
from tests.helpers import TINY, random_rollout

ROOT = Path(__file__).parent.parent
PUBLISHED = {
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8,
    },
}  # fmt: skip
SMALL = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip
PUBLISHED["short"] = {**PUBLISHED["qwen3-8b"], "num_hidden_layers": 4}
LORA = str(ROOT / "configs" / "scale" / "lora.yaml")
ALONE = Layout(1, sharded=False)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Folders with the config of the paper's models, and nothing else."""
    folders = {}
    for name, values in PUBLISHED.items():
        folder = folders[name] = tmp_path_factory.mktemp(name)
        common = {"vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 40960}
        (folder / "config.json").write_text(json.dumps({**values, **common}))
    return folders


class Planned(PlanCLI):
    """Keeps the plan."""

    def __init__(self, arguments):
        super().__init__(["plan", *arguments], MemoryHandler(1), PlanTrainer)


def planned(capsys, config, *options):
    """What is printed, and whether it fits."""
    try:
        Planned(["--config", str(ROOT / "configs" / config), *options])
    except SystemExit as end:
        return capsys.readouterr().out, end.code == 0
    return capsys.readouterr().out, True


def column(printed, name):
    """The numbers of a row."""
    (row,) = [line for line in printed.splitlines() if line.startswith(f"│ {name} ")]
    return [float(cell.replace(",", "")) if cell.strip() else 0.0 for cell in row.split("│")[2 : 2 + len(PHASES)]]


@pytest.mark.parametrize(
    ("name", "parameters", "of_a_token"),
    [("qwen3-8b", 8_190_735_360, 8.19e9), ("qwen3-30b-a3b", 30_532_122_624, 3.35e9)],
)
def test_parameters_are_those_that_the_models_are_called_after(published, name, parameters, of_a_token):
    config = AutoConfig.from_pretrained(published[name])
    of = parts(skeleton(config), ALONE)
    assert total(of) == total(of, "held") == parameters
    looked_up = sum(part.whole for part in of if part.is_embedding)
    assert active(of, config) + looked_up == pytest.approx(of_a_token, rel=2e-3)


def test_states_are_those_of_a_loaded_model():
    policy = load_policy(TINY)
    of = parts(skeleton(policy.config), ALONE)
    assert {part.name: part.held for part in of} == {name: p.numel() for name, p in policy.named_parameters()}
    optimizer = torch.optim.AdamW(policy.parameters())
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    states = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert sum(state.numel() * state.element_size() for state in states) == 8 * total(of, "held")


def sharded_by_transformers(config, ranks, tp, ep):
    """How many numbers of each parameter transformers gives to the first of so many ranks."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        model = skeleton(config)
        layout = DistributedConfig(fsdp_size=ranks // tp, tp_size=tp, ep_size=ep)
        model.config.distributed_config = layout
        _, mesh = initialize_distributed_mesh(layout)
        model = type(model).maybe_distribute_model(model, layout, mesh)
        return {n: getattr(p, "to_local", lambda p=p: p)().numel() for n, p in model.named_parameters()}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("qwen3-8b", (8, 1, 1)),
        ("qwen3-8b", (8, 2, 1)),
        ("qwen3-8b", (8, 8, 1)),
        ("qwen3-8b", (3, 1, 1)),  # nothing can be divided by 3
        ("qwen3-30b-a3b", (32, 2, 8)),
        ("qwen3-30b-a3b", (8, 1, 8)),
        ("qwen3-30b-a3b", (8, 4, 4)),
    ],
)
def test_shards_are_those_that_transformers_makes(monkeypatch, published, name, layout):
    for variable, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(layout[0])}.items():
        monkeypatch.setenv(variable, value)
    config = AutoConfig.from_pretrained(published[name])
    mine = {part.name: part.held for part in parts(skeleton(config), Layout(layout[0], True, *layout[1:]))}
    assert mine == sharded_by_transformers(config, *layout)


LOADED = """
import json, sys, torch
from transformers import AutoModelForCausalLM, DistributedConfig
for tp in (1, 2):
    config = DistributedConfig(fsdp_size=2 // tp, tp_size=tp)
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32, distributed_config=config)
    held = {n: p.to_local().numel() if hasattr(p, "to_local") else p.numel() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    local = lambda t: t.to_local() if hasattr(t, "to_local") else t
    states = sum(local(s[n]).nbytes for s in optimizer.state.values() for n in ("exp_avg", "exp_avg_sq"))
    print(json.dumps([held, states]), flush=True)
"""


@pytest.mark.slow
def test_shards_and_states_are_those_of_two_processes():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOADED, resolve_model(TINY)],
            env={**os.environ, "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": port},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in "01"
    ]  # fmt: skip
    first, _ = [process.communicate(timeout=300)[0].splitlines() for process in processes]
    config = AutoConfig.from_pretrained(resolve_model(TINY))
    for tp, line in enumerate(first, 1):
        held, states = json.loads(line)
        of = parts(skeleton(config), Layout(2, True, tp))
        assert {part.name: part.held for part in of} == held
        assert 8 * total(of, "held") == states


def measured_peak(config, lengths, precision, checkpointing, sharded):
    """The most memory that torch's own allocator has given out at a time, over what was there before, in bytes."""
    dtype = torch.bfloat16 if sharded and precision == "bfloat16" else torch.float32
    policy = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED, dtype=dtype)
    policy.train(checkpointing)
    if checkpointing:
        policy.gradient_checkpointing_enable()
    add_logprobs(policy, precision, as_on_gpu=True)
    for parameter in policy.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    batch = pack(random_rollout(lengths, prompt=1), list(range(len(lengths))))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        token_logprobs(policy, batch, 1.0).logprobs.sum().backward()
    now = peak = 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("kind", "precision", "sharded"),
    [(Qwen3Config, "float32", False), (Qwen3Config, "bfloat16", False), (Qwen3MoeConfig, "bfloat16", True)],
)
@pytest.mark.parametrize("lengths", [[100, 60, 40, 20], [500, 400, 300, 30]])
def test_a_pass_takes_what_was_counted(kind, precision, sharded, checkpointing, lengths):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    config = kind(**SMALL, **(experts if kind is Qwen3MoeConfig else {}))
    counted = rehearse(config, lengths, precision, checkpointing, sharded=sharded)
    measured = measured_peak(config, lengths, precision, checkpointing, sharded)
    assert counted.peak == pytest.approx(measured, rel=0.02)
    assert counted.kept < counted.peak


def test_logits_are_counted_as_a_gpu_holds_them():
    config = Qwen3Config(**{**SMALL, "vocab_size": 151_936, "hidden_size": 32, "num_hidden_layers": 1})
    logits = 4 * LOGITS_IN_A_CHUNK
    assert logits < rehearse(config, [1000]).peak < 2 * logits


@pytest.mark.slow
def test_a_token_in_the_cache_takes_what_vllm_reserves():
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    config = AutoConfig.from_pretrained(resolve_model(TINY))
    for dtype in (torch.bfloat16, torch.float32):
        page = FullAttentionSpec(
            block_size=16, num_kv_heads=config.num_key_value_heads, head_size=config.head_dim, dtype=dtype
        )
        engine = VLLMEngine(dtype=str(dtype).removeprefix("torch."))
        assert kv_bytes_per_token(config, engine) == config.num_hidden_layers * page.page_size_bytes / 16


def test_engines_of_eight_bits_hold_half(published):
    config = AutoConfig.from_pretrained(published["qwen3-30b-a3b"])
    of = parts(skeleton(config), ALONE)
    whole, half = engine_weights(of, VLLMEngine()), engine_weights(of, VLLMEngine("fp8"))
    assert whole == 2 * total(of)
    embeddings = 2 * 2 * 151936 * 2048  # and the head stay as they were
    assert half == pytest.approx((whole - embeddings) / 2 + embeddings, rel=1e-3)
    assert engine_weights(of, VLLMEngine("fp8", simulate=True)) == engine_weights(of, VLLMEngine("int4")) == whole
    assert engine_weights(of, VLLMEngine(tensor_parallel_size=4)) == whole / 4


@pytest.mark.slow
def test_the_papers_layouts_fit(capsys, published):
    for name, gib in (("qwen3-8b", 8.1907e9 / 8 * 4 / 2**30), ("qwen3-30b-a3b", 964_252_544 * 4 / 2**30)):
        printed, fits = planned(capsys, f"paper/{name}.yaml", "--model.model", str(published[name]))
        assert fits
        assert printed.splitlines()[-1].startswith("Fits: ")
        assert printed.rstrip() in (ROOT / "docs" / "scaling.md").read_text()
        assert column(printed, "weights") == pytest.approx([gib] * 3, abs=0.01)
        assert column(printed, "AdamW") == pytest.approx([2 * gib] * 3, abs=0.01)
        assert column(printed, "gradients") == pytest.approx([gib, gib, 0], abs=0.01)


def test_what_does_not_fit_is_said_with_what_would_help(capsys, published):
    options = [
        "--model.model",
        str(published["short"]),
        "--model.gradient_checkpointing",
        "false",
        "--gpu",
        "L40S",
        "--trainer.devices",
        "1",
    ]
    printed, fits = planned(capsys, "paper/qwen3-8b.yaml", *options)
    assert not fits
    for said in ("GiB too much on each GPU", "model.gradient_checkpointing: true", "twice the GPUs"):
        assert said in printed
    small = ["--data.engine.init_args.gpu_memory_utilization", "0.05"]
    printed, fits = planned(capsys, "paper/qwen3-8b.yaml", "--model.model", str(published["short"]), *small)
    assert not fits
    assert "gpu_memory_utilization=0.05 leaves 0.00 GiB for the KV cache" in printed


def test_everything_is_alone_on_one_gpu_and_copied_by_ddp(capsys):
    alone, _ = planned(capsys, "quickstart.yaml", "--model.model", TINY)
    four, _ = planned(capsys, "quickstart.yaml", "--trainer.devices", "4", "--trainer.strategy", "ddp")
    assert column(alone, "weights") == column(four, "weights")
    assert "DDP's buckets" in four
    assert "DDP's buckets" not in alone


def test_a_sleeping_engine_leaves_its_memory_to_the_update(capsys, published):
    model = ["--model.model", str(published["short"])]
    printed, _ = planned(capsys, "paper/qwen3-8b.yaml", *model, "--data.engine.init_args.sleep", "true")
    awake, asleep = column(printed, "total, engine awake"), column(printed, "total, engine asleep in the update")
    engine = 0.4 * 80e9 / 2**30
    assert [a - b for a, b in zip(awake, asleep, strict=True)] == pytest.approx([engine, engine, 0], abs=0.02)
    assert f"Fits: {80e9 / 2**30 - max(asleep):.1f} GiB" in printed


def test_adapters_alone_have_gradients_and_a_copy_takes_as_much_as_the_weights(capsys, published):
    paths = [str(ROOT / "configs" / "scale" / f"{name}.yaml") for name in ("lora", "one-step-off")]
    overlays = [word for path in paths for word in ("--config", path)]
    printed, _ = planned(capsys, "paper/qwen3-8b.yaml", *overlays, "--model.model", str(published["short"]))
    model = skeleton(AutoConfig.from_pretrained(published["short"]))
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.lm_head]
    adapters = 16 * sum(layer.in_features + layer.out_features for layer in layers)
    assert f"FP32, {adapters / 1e6:,.1f} million in all" in printed
    assert column(printed, "AdamW") == pytest.approx([8 * adapters / 8 / 2**30] * 3, abs=0.006)
    assert column(printed, "policy that sampled") == column(printed, "weights")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--trainer.strategy.tensor_parallel_size", "16"], "tensor_parallel_size=16: must divide the number of ranks"),
        (["--trainer.strategy.expert_parallel_size", "2"], "expert_parallel_size=2: the model has no experts"),
        (["--trainer.strategy", "fsdp"], "trainer.strategy='fsdp': must be auto, ddp or dclightning.ParallelStrategy"),
        (["--trainer.devices", "auto"], "trainer.devices='auto': to plan, say how many"),
        (["--trainer.devices", "7"], "prompts_per_step=64: must be a multiple of 7, so that"),
        (["--model.mini_batches", "3"], "mini_batches=3: must divide"),
        (["--mfu", "40"], "mfu=40.0: must be a share"),
        (["--data.one_step_off", "true", "--data.engine.init_args.sleep", "true"], "set its sleep to false"),
        (["--config", LORA, "--trainer.strategy.tensor_parallel_size", "2"], "must be 1 with model.lora"),
        (
            ["--data.dynamic_sampling", "2", "--data.engine.init_args.tensor_parallel_size", "2"],
            "dynamic_sampling=2: needs",
        ),
        (["--response_length", "10000"], "response_length=10000: must be from 1 to sampling.max_tokens, 8192"),
    ],
)
def test_layouts_that_cannot_be_are_refused(published, options, message):
    model = ["--model.model", str(published["short"])]
    with pytest.raises(UserError) as error:
        Planned(["--config", str(ROOT / "configs/paper/qwen3-8b.yaml"), *model, *options])
    assert message in str(error.value)


def seconds(capsys, published, *options):
    printed, _ = planned(capsys, "paper/qwen3-8b.yaml", "--model.model", str(published["short"]), *options)
    rows = [[cell.strip() for cell in line.split("│")[1:3]] for line in printed.splitlines() if line.count("│") == 4]
    return {name: float(cell.replace(",", "")) for name, cell in rows}


@pytest.mark.slow
def test_time_follows_operations_and_bytes(capsys, published):
    many = ["--data.prompts_per_step", "6400"]
    usual = seconds(capsys, published, *many)
    assert usual["update"] == pytest.approx(4 * usual["score"], rel=0.01)  # activations are computed again
    assert usual["total"] == pytest.approx(sum(usual[name] for name in ("rollout", "score", "update", "sync")), abs=0.3)
    faster = seconds(capsys, published, *many, "--mfu", "0.8")
    assert faster["update"] == pytest.approx(usual["update"] / 2, rel=0.01)
    assert faster["rollout"] == usual["rollout"]  # it waits for memory
    h200 = seconds(capsys, published, *many, "--gpu", "H200")
    assert h200["score"] == usual["score"]
    assert h200["rollout"] < usual["rollout"] * 3.35 / 4.8  # it has room for more at a time, too


@pytest.mark.slow
def test_nothing_is_started_and_the_exit_code_tells(published):
    code = (
        "import sys; from dclightning.__main__ import main; import atexit; "
        "atexit.register(lambda: print('vllm' in sys.modules, 'torch' in sys.modules)); main()"
    )
    options = ["--config", "configs/paper/qwen3-8b.yaml", "--model.model", str(published["short"])]
    too_small = ["--trainer.devices", "1", "--gpu", "L40S"]
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", *options, *too_small], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "False True"
    assert "Traceback" not in done.stderr
