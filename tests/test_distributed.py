"""However ranks share the work, they learn what one process learns; a run goes on with other ranks as it began."""

from pathlib import Path

import pytest
import torch

from tests import ranks
from tests.helpers import random_rollout, train
from tests.test_models import FAMILIES

pytestmark = pytest.mark.slow

LEARNT = ("train/loss", "train/grad_norm", "discrepancy/sequence_mean", "lagrangian/multiplier")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name in ("qwen3", "qwen3-moe"):
        torch.manual_seed(0)
        FAMILIES[name]().save_pretrained(folder / name)
    return {name: str(folder / name) for name in ("qwen3", "qwen3-moe")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def case(name, model, kind="auto", tp=1, ep=1, full=False, **options):
    layout = {"tensor_parallel_size": tp, "expert_parallel_size": ep, "save_distributed_checkpoint": not full}
    return {"name": name, "model": model, "kind": kind, "layout": layout if kind == "parallel" else {}, **options}


def last(folder, name):
    return str(folder / name / "checkpoints" / "last.ckpt")


@pytest.fixture(scope="module")
def one(folder, models):
    """What one process learns."""
    dense, moe = models["qwen3"], models["qwen3-moe"]
    cases = [
        case("dense", dense, epochs=2),
        case("moe", moe),
        case("everything", dense, method="everything"),
        case("lora", dense, method="lora"),
        case("lora, moe", moe, method="lora"),
        case("fsdp of one", dense, "parallel"),
        case("fsdp of one, whole", dense, "parallel", epochs=2),
        case("fsdp of one, resumed", dense, "parallel", epochs=2, ckpt_path=last(folder, "fsdp of one")),
        case("order", ranks.TINY, engine="transformers", epochs=2),
    ]
    return ranks.run(folder, 1, cases)


TWO = {  # and what each has to equal
    "ddp": "dense",
    "fsdp": "dense",
    "tp": "dense",
    "fsdp, full checkpoints": "dense",
    "moe: fsdp": "moe",
    "moe: fsdp x ep": "moe",
    "moe: tp x ep": "moe",
    "everything: ddp": "everything",
    "everything: fsdp": "everything",
    "everything: tp": "everything",
    "lora: ddp": "lora",
    "lora: fsdp": "lora",
    "lora, moe: fsdp": "lora, moe",
    "lora, moe: fsdp x ep": "lora, moe",
}


@pytest.fixture(scope="module")
def two(folder, models):
    dense, moe = models["qwen3"], models["qwen3-moe"]
    cases = [
        case("ddp", dense, "ddp"),
        case("fsdp", dense, "parallel"),
        case("tp", dense, "parallel", tp=2),
        case("fsdp, full checkpoints", dense, "parallel", full=True),
        case("moe: fsdp", moe, "parallel"),
        case("moe: fsdp x ep", moe, "parallel", ep=2),
        case("moe: tp x ep", moe, "parallel", tp=2, ep=2),
        case("everything: ddp", dense, "ddp", method="everything"),
        case("everything: fsdp", dense, "parallel", method="everything"),
        case("everything: tp", dense, "parallel", tp=2, method="everything"),
        case("lora: ddp", dense, "ddp", method="lora"),
        case("lora: fsdp", dense, "parallel", method="lora"),
        case("lora, moe: fsdp", moe, "parallel", method="lora"),
        case("lora, moe: fsdp x ep", moe, "parallel", ep=2, method="lora"),
        case("fsdp, whole", dense, "parallel", epochs=2),
        case("fsdp, resumed", dense, "parallel", epochs=2, ckpt_path=last(folder, "fsdp")),
        case("lora: fsdp, whole", dense, "parallel", epochs=2, method="lora"),
        case("lora: fsdp, resumed", dense, "parallel", epochs=2, method="lora", ckpt_path=last(folder, "lora: fsdp")),
        case("order on 2", ranks.TINY, "parallel", engine="transformers"),
    ]
    return ranks.run(folder, 2, cases)


FOUR = {
    "fsdp of 4": "dense",
    "fsdp x tp": "dense",
    "moe: ep of 4": "moe",
    "moe: fsdp x ep of 2": "moe",
    "moe: fsdp x tp x ep of 2": "moe",
    "moe: fsdp x tp x ep of 4": "moe",
}
RESUMED = {  # on other ranks, in another layout, from what two ranks have saved
    "from fsdp": ("fsdp", 1),
    "from ddp": ("ddp", 1),
    "from tp": ("tp", 2),
    "from full": ("fsdp, full checkpoints", 2),
}


@pytest.fixture(scope="module")
def four(folder, models, two):
    dense, moe = models["qwen3"], models["qwen3-moe"]
    cases = [
        case("fsdp of 4", dense, "parallel"),
        case("fsdp x tp", dense, "parallel", tp=2),
        case("moe: ep of 4", moe, "parallel", ep=4),
        case("moe: fsdp x ep of 2", moe, "parallel", ep=2),
        case("moe: fsdp x tp x ep of 2", moe, "parallel", tp=2, ep=2),
        case("moe: fsdp x tp x ep of 4", moe, "parallel", tp=2, ep=4),
        *(
            case(name, dense, "parallel", tp=tp, epochs=2, ckpt_path=last(folder, source))
            for name, (source, tp) in RESUMED.items()
        ),
        case(
            "order on 4", ranks.TINY, "parallel", engine="transformers", epochs=2, ckpt_path=last(folder, "order on 2")
        ),
    ]
    return ranks.run(folder, 4, cases)


@pytest.fixture(scope="module")
def resumed_on_one(folder, models, two):
    dense = models["qwen3"]
    cases = [
        *(
            case(f"{name}, on 1", dense, "parallel", epochs=2, ckpt_path=last(folder, source))
            for name, (source, _) in RESUMED.items()
        ),
        case(
            "order on 1", ranks.TINY, "parallel", engine="transformers", epochs=2, ckpt_path=last(folder, "order on 2")
        ),
    ]
    (folder / "one").mkdir()
    return ranks.run(folder, 1, cases)


def check_equal(found, want, steps=slice(0, 4)):
    for rank in found:
        assert rank["rows"] == found[0]["rows"]
        assert [row.keys() for row in rank["rows"]] == [row.keys() for row in want["rows"][steps]]
        for row, wanted in zip(rank["rows"], want["rows"][steps], strict=True):
            for name in LEARNT:
                assert row[name] == pytest.approx(wanted[name], rel=2e-6, abs=2e-6), name
            assert row == pytest.approx(wanted, rel=1e-5, abs=2e-6)
        assert rank["history"] == found[0]["history"]  # the multiplier is the same on every rank, bit for bit


def check_weights(found, want):
    for rank in found:
        for name, weight in want["weights"].items():
            # AdamW steps as far for the smallest gradients, and so amplifies their rounding.
            torch.testing.assert_close(rank["weights"][name], weight, rtol=1e-4, atol=5e-5)


@pytest.fixture(scope="module")
def engines(folder):
    """Two ranks that sample with vLLM, in the trainer's own processes."""
    problems, fp32 = str(folder / "one.jsonl"), {"dtype": "float32"}
    adapters = {**fp32, "lora_rank": 4}
    Path(problems).write_text('{"problem": "3 + 4 =", "answer": "7"}\n' * 4)
    cases = [
        case("one prompt", ranks.TINY, "ddp", engine=fp32, problems=problems, epochs=2),
        case("one prompt, again", ranks.TINY, "ddp", engine=fp32, problems=problems, epochs=2),
        case("fsdp with engines", ranks.TINY, "parallel", engine=fp32),
        case("tp with engines", ranks.TINY, "parallel", tp=2, engine=fp32),
        case("one step off", ranks.TINY, "parallel", engine=fp32, one_step_off=True, epochs=2),
        case("adapters, one step off", ranks.TINY, "parallel", engine=adapters, one_step_off=True, method="lora"),
    ]
    return ranks.run(folder, 2, cases)


@pytest.fixture(scope="module")
def spanned(folder):
    """Two ranks that share one engine."""
    engine = {"dtype": "float32", "tensor_parallel_size": 2}
    cases = [
        case("fsdp with one engine", ranks.TINY, "parallel", engine=engine),
        case("tp with one engine", ranks.TINY, "parallel", tp=2, engine=engine),
    ]
    return ranks.run(folder, 2, cases)


@pytest.mark.parametrize(("name", "alone"), TWO.items())
def test_two_ranks_learn_what_one_learns(one, two, name, alone):
    (want,) = one[alone]
    check_equal(two[name], want)
    if alone == "everything":
        assert any(0 < row["rollout_corr/kept_fraction"] < 1 for row in want["rows"])
    if alone != "dense":  # which has gone on for another epoch
        check_weights(two[name], want)


@pytest.mark.parametrize(("name", "alone"), FOUR.items())
def test_four_ranks_learn_what_one_learns(one, four, name, alone):
    check_equal(four[name], one[alone][0])
    if alone != "dense":
        check_weights(four[name], one[alone][0])


@pytest.mark.parametrize("name", ["fsdp of one", "fsdp", "lora: fsdp"])
def test_a_resumed_run_equals_the_whole_bit_for_bit(one, two, name):
    found = one if name == "fsdp of one" else two
    for whole, resumed in zip(found[f"{name}, whole"], found[f"{name}, resumed"], strict=True):
        assert whole["rows"][4:] == resumed["rows"]
        assert whole["history"] == resumed["history"]
        assert all(torch.equal(weight, resumed["weights"][name]) for name, weight in whole["weights"].items())


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_with_other_ranks_in_another_layout(one, four, resumed_on_one, name):
    for found in (four[name], resumed_on_one[f"{name}, on 1"]):
        check_equal(found, one["dense"][0], steps=slice(4, 8))
        check_weights(found, one["dense"][0])


@pytest.mark.parametrize("count", [1, 4])
def test_with_other_ranks_the_order_of_the_problems_goes_on(one, two, four, resumed_on_one, count):
    def asked(found):
        """What each step asked, all ranks together."""
        steps = zip(*(rank["prompts"] for rank in found), strict=True)
        return [[prompt for part in step for prompt in part] for step in steps]

    whole = asked(one["order"])
    assert asked(two["order on 2"]) == whole[:4]
    assert asked(resumed_on_one["order on 1"] if count == 1 else four["order on 4"]) == whole[4:]
    assert whole[4:] != whole[:4]


def test_engines_beside_ranks_draw_different_responses_and_the_same_ones_again(engines):
    first, second = engines["one prompt"]
    prompts = [prompt for step in first["prompts"] + second["prompts"] for prompt in step]
    assert len(prompts) == 16
    assert all(prompt == prompts[0] for prompt in prompts)
    assert first["responses"][0] != second["responses"][0]
    assert first["responses"][0] != first["responses"][1]
    for rank, again in zip(engines["one prompt"], engines["one prompt, again"], strict=True):
        assert rank["responses"] == again["responses"]
        assert rank["rows"] == again["rows"]


ENGINES = [
    "fsdp with engines",
    "tp with engines",
    "one step off",
    "adapters, one step off",
    "fsdp with one engine",
    "tp with one engine",
]


@pytest.mark.parametrize("name", ENGINES)
def test_engines_of_ranks_sample_with_the_weights_of_the_trainer(engines, spanned, name):
    found = {**engines, **spanned}[name]
    assert len(found[0]["rows"]) >= 4
    for rank in found:
        assert rank["rows"] == found[0]["rows"]
        assert rank["history"] == found[0]["history"]
        lags = [row["train/weight_lag"] for row in rank["rows"]]
        assert max(row["train/grad_norm"] for row in rank["rows"]) > 1e-3
        assert lags == [0.0, *[1.0 if "one step off" in name else 0.0] * (len(lags) - 1)]
        for row in rank["rows"]:
            assert row["discrepancy/sequence_mean"] < 1e-5  # both policies compute in FP32
    first, second = found
    together = name.startswith("tp")  # then they learn from the same
    assert (first["responses"] == second["responses"]) == together
    assert [len(step) for step in first["responses"]] == [8 if together else 4] * len(lags)


STOPPING = """
import sys
from pathlib import Path
import lightning as L
from dclightning import GRPOModule, RolloutDataModule, Sampling, TransformersEngine
from dclightning.callbacks import RolloutCheckpoint, WeightSync
from dclightning.errors import RunStoppedError
from tests.helpers import quiet_trainer

sampling = Sampling(max_tokens=8)


def stop(folder, where, limit):
    def breaks(problems, completions):
        breaks.calls += 1
        if trainer.global_rank == 1 and where == "training" and breaks.calls >= 2:
            raise OSError("the server is down")
        return [float(len(c.token_ids) % 3) for c in completions]

    def validates(problems, completions):
        rollouts = trainer.fit_loop.total_batch_idx + 1
        if trainer.global_rank == 1 and (where, rollouts) in (("validation", 1), ("evaluation before training", 0)):
            raise OSError("the server is down")
        return [1.0] * len(completions)

    breaks.calls = 0
    data = RolloutDataModule(
        "dclightning/arithmetic-train", TransformersEngine(), breaks, prompts_per_step=4, group_size=2,
        sampling=sampling, reward_errors="stop", validation_problems={"arithmetic": "dclightning/arithmetic-test"},
        validation_reward=validates, validation_sampling=sampling, validation_limit=limit,
    )
    trainer = quiet_trainer(
        devices=2, strategy="ddp", max_epochs=1, limit_train_batches=3, enable_checkpointing=True,
        callbacks=[WeightSync(), RolloutCheckpoint(100)], default_root_dir=folder, num_sanity_val_steps=-1,
        val_check_interval=1, use_distributed_sampler=False,
    )
    try:
        trainer.fit(GRPOModule("dclightning/tiny-arithmetic", mini_batches=1), data)
        said = ""
    except RunStoppedError as error:
        said = str(error)
    (folder / f"{trainer.global_rank}.txt").write_text(said)


for where, limit in {"training": 3, "validation": 3, "evaluation before training": 3, "nowhere": 1}.items():
    folder = Path(sys.argv[1]) / where
    folder.mkdir(exist_ok=True)
    stop(folder, where, limit)
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """What each of two ranks said, and where the last checkpoint stands, by where a reward failed on the second."""
    folder = tmp_path_factory.mktemp("stopped")
    (folder / "child.py").write_text(STOPPING)
    ranks.torchrun(2, str(folder / "child.py"), str(folder))
    found = {}
    for where in folder.iterdir():
        if where.is_dir():
            last = where / "checkpoints" / "last.ckpt"
            state = torch.load(last, weights_only=True)["RolloutDataModule"] if last.exists() else None
            found[where.name] = [(where / f"{rank}.txt").read_text() for rank in range(2)], state
    return found


@pytest.mark.parametrize("where", ["training", "validation", "evaluation before training"])
def test_all_ranks_stop_where_a_reward_fails_on_one(stopped, where):
    (first, second), state = stopped[where]
    assert first == "another rank has stopped the run"
    assert second.startswith("reward ")
    assert "OSError: the server is down" in second
    if where != "evaluation before training":
        assert state == {"step": 1}


def test_a_rank_without_problems_waits_for_the_others(stopped):
    assert stopped["nowhere"] == (["", ""], {"step": 3})


MEASURE = """
import sys
import lightning as L
import torch
from torch.distributed.tensor import DTensor
from dclightning import GRPOModule, ParallelStrategy, RolloutDataModule, Sampling, TransformersEngine
from dclightning.calibrate import calibrate, write
from dclightning.callbacks import WeightSync
from dclightning.examination import examine
from dclightning.inspection import find
from tests.helpers import quiet_trainer
from pathlib import Path

for tensor_parallel_size in (1, 2):
    out = Path(sys.argv[1]) / str(tensor_parallel_size)
    out.mkdir(exist_ok=True)
    module = GRPOModule("dclightning/tiny-arithmetic", mini_batches=1)
    data = RolloutDataModule(
        "dclightning/arithmetic-train", TransformersEngine(), prompts_per_step=4, sampling=Sampling(max_tokens=20)
    )
    trainer = quiet_trainer(
        devices=2, strategy=ParallelStrategy(tensor_parallel_size=tensor_parallel_size), callbacks=[WeightSync()],
        use_distributed_sampler=False,
    )
    calibration = calibrate(trainer, module, data, rollouts=1, positions=16, output=out)
    sharded = all(isinstance(p, DTensor) for p in module.model.parameters())
    findings = examine(trainer, module, data)
    if trainer.is_global_zero:
        write(calibration, [], out)
        assert find(out) == out / "responses.jsonl"
    found = {"report": calibration.report(), "sharded": sharded, "findings": [(f.check, f.state) for f in findings]}
    torch.save(found, out / f"{trainer.global_rank}.pt")
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    (folder / "measure.py").write_text(MEASURE)
    ranks.torchrun(2, str(folder / "measure.py"), str(folder))
    return {tp: [torch.load(folder / str(tp) / f"{rank}.pt") for rank in range(2)] for tp in (1, 2)}


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
def test_calibrate_and_doctor_on_two_ranks(measured, tensor_parallel_size):
    first, second = measured[tensor_parallel_size]
    assert first["report"] == second["report"]
    assert first["report"]["responses"] == 32
    assert first["report"]["divergences"]["kl"]["max"] < 1e-6  # both policies compute in FP32
    assert first["report"]["divergences"]["top1_agreement"]["mean"] == 1
    assert first["sharded"] or tensor_parallel_size > 1  # which leaves norms whole
    assert {state for _, state in first["findings"] + second["findings"]} == {"ok"}


IDLE = """
import sys
import torch
from pathlib import Path
from torch.distributed.tensor import DTensor
from dclightning import AdamW, GRPOModule, ParallelStrategy
from tests.helpers import TINY, quiet_trainer, random_rollout
from tests.ranks import Shares, Steps

rewards = [[1.0] * 8, None, [1.0] * 8]
rollouts = [random_rollout([5] * 8, seed=i, version=i, rewards=rewards[i]) for i in range(3)]
module = GRPOModule(TINY, optimizer=AdamW(lr=1e-3, eps=1e-8, max_grad_norm=float("inf")), mini_batches=1)
trainer = quiet_trainer(
    max_epochs=1, devices=2, strategy=ParallelStrategy(), callbacks=[steps := Steps()], use_distributed_sampler=False
)
trainer.fit(module, Shares(rollouts))
sharded = all(isinstance(p, DTensor) for p in module.model.parameters())  # or checkpoints would not find shards
torch.save((steps.rows, sharded), Path(sys.argv[1]) / f"{trainer.global_rank}.pt")
"""


def test_shards_go_on_after_rollouts_that_teach_nothing(tmp_path):
    (tmp_path / "idle.py").write_text(IDLE)
    ranks.torchrun(2, str(tmp_path / "idle.py"), str(tmp_path))
    _, alone = train([random_rollout([5] * 8, seed=1)])
    for rank in range(2):
        rows, sharded = torch.load(tmp_path / f"{rank}.pt")
        assert sharded
        assert [row["train/grad_norm"] for row in rows[::2]] == [0, 0]
        for name in ("train/grad_norm", "train/entropy", "discrepancy/sequence_mean"):
            assert rows[1][name] == pytest.approx(alone.metrics[0][name], rel=1e-5)
