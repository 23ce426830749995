"""What calibrate measures, against plain loops; and that its budget is one that a run can keep."""

import json
import math

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from dclightning import AdamW, GRPOModule, Overlong, ReferenceKL, RolloutDataModule, Sampling, VLLMEngine
from dclightning.calibrate import calibrate, contexts, overlay, write
from dclightning.calibration import Tokens, describe, propose
from dclightning.callbacks import LagrangianCallback, WeightSync
from dclightning.discrepancy import divergences
from dclightning.errors import UserError
from dclightning.records import read_records
from tests.helpers import TINY, quiet_trainer, random_rollout

few = settings(max_examples=25, deadline=None)
lengths = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)


def tokens(lengths, seed=0, scale=0.1):
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    rollout_logprobs = -torch.rand(count, generator=generator) * 4 - 0.01
    return Tokens(
        (rollout_logprobs + scale * torch.randn(count, generator=generator)).clamp(max=0),
        rollout_logprobs,
        torch.rand(count, generator=generator) * 3,
        torch.tensor(lengths),
        torch.arange(len(lengths)) // 2,
    )


@few
@given(lengths, st.integers(0, 99))
def test_numbers_are_those_of_plain_loops(lengths, seed):
    given = tokens(lengths, seed)
    found = describe(given)
    delta = (given.logprobs.exp() - given.rollout_logprobs.exp()).abs().tolist()
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    responses = [delta[start : start + n] for start, n in zip(starts, lengths, strict=True) if n]
    mine = found["discrepancy"]["probability"]
    assert mine["token_mean"] == pytest.approx(sum(delta) / len(delta))
    assert mine["sequence_mean"] == pytest.approx(sum(sum(r) / len(r) for r in responses) / len(responses))
    assert mine["max"] == pytest.approx(max(delta))
    assert mine["p90"] == pytest.approx(sorted(delta)[math.ceil(0.9 * len(delta) - 1e-9) - 1])
    for row in found["by_position"]:
        there = [x for r in responses for place, x in enumerate(r) if row["from"] <= place < row["to"]]
        assert row["count"] == len(there)
        assert row["probability"] == pytest.approx(sum(there) / len(there))
    for key in ("by_position", "by_probability", "by_entropy"):
        assert sum(row["count"] for row in found[key]) == len(delta)
    assert sum(row["count"] for row in found["by_length"]) == len(responses)
    gaps = (given.logprobs - given.rollout_logprobs).tolist()
    for row in found["by_prefix"]:
        n = row["tokens"]
        sums = [sum(gaps[s : s + n]) for s, length in zip(starts, lengths, strict=True) if length >= n]
        assert row["log_weight"] == pytest.approx(math.sqrt(sum(x * x for x in sums) / len(sums)), rel=1e-4)


def test_growth_tells_independent_gaps_from_those_that_point_one_way():
    count = 400
    noise = torch.randn(count * 256, generator=torch.Generator().manual_seed(0)) * 1e-3
    alike = noise[:count].repeat_interleave(256)
    for gaps, slope in ((noise, 0.5), (alike, 1.0)):
        base = torch.full_like(gaps, -1.0)
        given = Tokens(base + gaps, base, torch.ones_like(base), torch.full((count,), 256), torch.arange(count))
        assert describe(given)["growth"] == pytest.approx(slope, abs=0.05)


@few
@given(lengths, st.floats(0, 1))
def test_the_budget_is_the_floor_and_the_slack_to_three_digits(lengths, slack):
    given = tokens(lengths)
    for aggregation in ("sequence", "token"):
        found = propose(given, "probability", aggregation, slack)
        assert found["floor"] == pytest.approx(describe(given)["discrepancy"]["probability"][f"{aggregation}_mean"])
        assert found["budget"] == pytest.approx(found["floor"] * (1 + slack), rel=0.005)


def test_responses_to_one_prompt_are_no_independent_draws():
    """Eight copies of each response say no more than one, and the interval must not be narrower."""
    one = tokens([5, 9, 3, 7, 8, 4, 6, 2])
    delta = [
        part.repeat(8)
        for response in zip(
            *(c.split(one.lengths.tolist()) for c in (one.logprobs, one.rollout_logprobs, one.entropy)), strict=True
        )
        for part in response
    ]
    copies = Tokens(
        *(torch.cat(delta[i::3]) for i in range(3)),
        one.lengths.repeat_interleave(8),
        torch.arange(8).repeat_interleave(8),
    )
    alone = Tokens(one.logprobs, one.rollout_logprobs, one.entropy, one.lengths, torch.arange(8))
    few, many = (propose(some, "probability", "sequence", 0.2) for some in (alone, copies))
    assert many == pytest.approx(few)


def test_divergences_are_torchs_own_and_nothing_for_equal_distributions():
    p, q = torch.randn(2, 50, 30, dtype=torch.float64).log_softmax(-1)
    found = divergences(p, q, top=3)
    distributions = [torch.distributions.Categorical(logits=logits) for logits in (p, q)]
    kl = torch.distributions.kl_divergence
    torch.testing.assert_close(found["kl"], kl(distributions[1], distributions[0]))
    torch.testing.assert_close(found["reverse_kl"], kl(*distributions))
    best = [set(row.topk(3).indices.tolist()) for row in (p[0], q[0])]
    assert float(found["top3_agreement"][0]) == pytest.approx(len(best[0] & best[1]) / 3)
    torch.testing.assert_close(found["top1_agreement"], (p.argmax(-1) == q.argmax(-1)).double())
    assert (found["total_variation"] <= (found["kl"] / 2).sqrt() + 1e-12).all()  # Pinsker
    same = divergences(p, p)
    assert all(float(same[name].abs().max()) < 1e-12 for name in ("kl", "reverse_kl", "total_variation"))
    assert same["top1_agreement"].min() == same["top10_agreement"].min() == 1


def test_what_stands_before_a_token_is_its_context():
    rollout = random_rollout([3, 0, 2, 4])
    chosen = torch.tensor([0, 2, 3, 4, 8])
    sequences = rollout.sequences()
    owners = [(0, 0), (0, 2), (2, 0), (2, 1), (3, 3)]
    want = [[*sequences[i][0].tolist(), *sequences[i][1][:n].tolist()] for i, n in owners]
    assert contexts(rollout, chosen) == want


def test_an_overlay_keeps_what_the_config_says_besides():
    multiplier = {"class_path": "dclightning.callbacks.LagrangianCallback", "init_args": {"initial": 0.3, "budget": 1}}
    other = {"class_path": "mine.Callback"}
    proposal = {"floor": 0.001234, "low": 0.001, "high": 0.0015, "slack": 0.2, "budget": 0.0015}
    found = callbacks(overlay([multiplier, other], proposal))
    assert found[0]["init_args"] == {"initial": 0.3, "budget": 0.0015}
    assert found[1] == other
    assert found[2] == {"class_path": "dclightning.callbacks.StaleWeights", "init_args": {"floor": 0.00123}}
    assert multiplier["init_args"]["budget"] == 1


def callbacks(text):
    return yaml.safe_load(text)["trainer"]["callbacks"]


def test_an_overlay_is_one_that_fit_takes():
    proposal = {"floor": 0.001, "low": 0.001, "high": 0.001, "slack": 0.2, "budget": 0.0012}

    def names(given, **changes):
        return [c["class_path"].rpartition(".")[2] for c in callbacks(overlay(given, proposal | changes))]

    guard = {"class_path": "dclightning.callbacks.CollapseGuard"}
    fixed = {"class_path": "dclightning.callbacks.FixedPenalty", "init_args": {"multiplier": 0.1}}
    assert names(None) == names([]) == ["LagrangianCallback", "StaleWeights"]
    assert names(guard) == names([guard]) == ["LagrangianCallback", "CollapseGuard", "StaleWeights"]
    assert names([fixed]) == ["FixedPenalty", "StaleWeights"]
    assert "init_args" not in callbacks(overlay([fixed], proposal | {"floor": 0.0}))[1]


def parts(engine, others=(), lr=0.0, rollouts=3, max_tokens=48, **options):
    module = GRPOModule(TINY, optimizer=AdamW(lr=lr), mini_batches=1, **options)
    data = RolloutDataModule(
        "dclightning/arithmetic-train", engine, prompts_per_step=8, sampling=Sampling(max_tokens=max_tokens)
    )
    trainer = quiet_trainer(
        max_epochs=1,
        limit_train_batches=rollouts,
        callbacks=[WeightSync(), *others],
    )
    return trainer, module, data


@pytest.fixture(scope="module")
def engine():
    engine = VLLMEngine("fp8_per_channel", dtype="bfloat16", kv_cache_gib=0.0625)
    close, engine.close = engine.close, lambda: None
    yield engine
    close()


@pytest.mark.slow
def test_a_calibrated_run_keeps_its_multiplier_and_one_below_the_floor_does_not(engine, tmp_path):
    calibration = calibrate(*parts(engine), rollouts=2, slack=0.25, positions=32, output=tmp_path)
    report = write(calibration, [], tmp_path)
    assert json.loads((tmp_path / "calibration.json").read_text()) == report
    assert (tmp_path / "calibration.png").stat().st_size > 20_000
    assert len(read_records(tmp_path / "responses.jsonl")) == report["responses"] == 2 * 8 * 8
    assert set(report["divergences"]) == {"kl", "reverse_kl", "total_variation", "top1_agreement", "top10_agreement"}
    kl = report["divergences"]["kl"]["mean"]
    assert 0 < kl < 0.01
    again = calibrate(*parts(engine), rollouts=2, slack=0.25, positions=32)
    assert again.report() == report  # measured with fixed weights and one seed

    budget = callbacks((tmp_path / "budget.yaml").read_text())[0]["init_args"]["budget"]
    for c, low, high in ((budget, 0.48, 0.505), (budget / 5, 0.515, 1.0)):
        multiplier = LagrangianCallback(initial=0.5, lr=10.0, budget=c)
        trainer, module, data = parts(engine, [multiplier])
        trainer.fit(module, data)
        assert low < multiplier.multiplier < high


@pytest.mark.slow
def test_nothing_to_measure_is_said(engine):
    with pytest.raises(UserError, match="rollouts=0: must be at least 1"):
        calibrate(*parts(engine), rollouts=0)


@pytest.mark.slow
def test_what_the_run_leaves_out_is_left_out_and_nothing_is_left_changed(engine):
    trainer, module, data = parts(engine, max_tokens=36, overlong=Overlong(mask=True), reference_kl=ReferenceKL(0.1))
    calibration = calibrate(trainer, module, data, rollouts=1, positions=4)
    assert 0 < len(calibration.tokens.lengths) < 64
    assert int(calibration.tokens.lengths.max()) < 36
    assert (data.step, trainer.limit_predict_batches) == (0, 1.0)
    trainer.fit(module, data)  # with the reference, which measuring does without
    assert data.step == 3


@pytest.mark.slow
def test_the_token_mean_is_measured_for_a_multiplier_that_looks_at_it(engine):
    calibration = calibrate(*parts(engine, [LagrangianCallback(aggregation="token")]), rollouts=1, positions=4)
    report = calibration.report()
    assert report["proposal"]["floor"] == pytest.approx(report["discrepancy"]["probability"]["token_mean"])
