import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dclightning.corrections import TokenMIS, corrected
from dclightning.metrics import Discrepancy, ImportanceWeights, Means, Mismatch, discrepancy_statistics
from tests import plain

NAMES = ("train/reward", "train/loss", "train/entropy")
MISMATCH = [
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/chi2_token",
    "rollout_corr/raw_eff_sample_size",
    "training/rollout_probs_diff_mean",
    "training/rollout_probs_diff_max",
    "training/rollout_probs_diff_std",
]
WEIGHTS = [
    "rollout_corr/rollout_is_eff_sample_size",
    "rollout_corr/rollout_is_mean",
    "rollout_corr/rollout_is_max",
    "rollout_corr/kept_fraction",
]
deltas = plain.grid(0, 1) | st.sampled_from([0.0, 1.0, 200.0])


def result(metric, *updates):
    for update in updates:
        metric.update(*update)
    computed = metric.compute()
    assert all(value.dtype == torch.float64 and value.shape == () for value in computed.values())
    return {name: value.item() for name, value in computed.items()}


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name] == pytest.approx(value, rel=1e-9, abs=1e-7), name


def integers(values):
    return torch.tensor(values, dtype=torch.int64)


# Discrepancy

responses = st.lists(st.integers(0, 40), max_size=4)


@st.composite
def rollouts(draw):
    """Discrepancies of responses that are long enough to have a middle, and their lengths."""
    lengths = draw(responses)
    some = draw(st.lists(deltas, min_size=1, max_size=8))
    order = np.random.default_rng(draw(st.integers(0, 99)))
    return [some[i] for i in order.integers(0, len(some), sum(lengths))], lengths


@plain.few
@given(rollout=rollouts())
def test_discrepancy_equals_a_plain_loop(rollout):
    delta, lengths = rollout
    got = result(Discrepancy(), (torch.tensor(delta), integers(lengths)))
    assert_same(got, plain.discrepancy_statistics(delta, lengths))


@plain.few
@given(rollout=rollouts(), cut=st.integers(0, 4))
def test_discrepancy_does_not_depend_on_how_responses_are_cut_into_updates(rollout, cut):
    delta, lengths = torch.tensor(rollout[0]), integers(rollout[1])
    tokens = int(lengths[:cut].sum())
    first, second = (delta[:tokens], lengths[:cut]), (delta[tokens:], lengths[cut:])
    want = result(Discrepancy(), (delta, lengths))
    assert result(Discrepancy(), first, second) == want
    assert_same(result(Discrepancy(), second, (delta[:0], lengths[:0]), first), want)


@pytest.mark.parametrize("length", [0, 1, 16, 17, 32, 33, 40])
def test_each_token_is_in_the_beginning_or_else_the_end_or_else_the_middle(length):
    delta = torch.arange(length) / 64
    got = {name: value.item() for name, value in discrepancy_statistics(delta, torch.tensor([length])).items()}
    parts = {
        "first_16": range(min(length, 16)),
        "middle": range(16, length - 16),
        "last_16": range(max(16, length - 16), length),
    }
    for name, places in parts.items():
        if places:
            assert got[f"discrepancy/{name}"] == sum(places) / len(places) / 64
        else:
            assert f"discrepancy/{name}" not in got


def test_percentiles_and_maximum_of_a_known_tail():
    got = result(Discrepancy(), (torch.arange(1, 101).flip(0) / 128, torch.tensor([60, 40])))
    tail = {name: got[f"discrepancy/{name}"] * 128 for name in ("p50", "p90", "p99", "max")}
    assert tail == {"p50": 50, "p90": 90, "p99": 99, "max": 100}


def test_the_names_of_the_discrepancy():
    names = ["sequence_mean", "token_mean", "p50", "p90", "p99", "max", "first_16", "middle", "last_16"]
    assert list(result(Discrepancy(), (torch.ones(40), torch.tensor([40])))) == [f"discrepancy/{n}" for n in names]


# Mismatch


@plain.few
@given(batch=plain.batches())
def test_mismatch_equals_a_plain_loop(batch):
    got = result(Mismatch(), (torch.tensor(batch.old), torch.tensor(batch.rollout)))
    assert_same(got, plain.mismatch(batch.old, batch.rollout))


@plain.few
@given(batch=plain.batches(), cut=st.integers(0, 30))
def test_mismatch_does_not_depend_on_how_tokens_are_cut_into_updates(batch, cut):
    old, rollout = torch.tensor(batch.old), torch.tensor(batch.rollout)
    got = result(Mismatch(), (old[cut:], rollout[cut:]), (old[:cut], rollout[:cut]))
    assert_same(got, result(Mismatch(), (old, rollout)))


def test_mismatch_on_a_hand_case():
    got = result(Mismatch(), (torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.25]).log()))
    gap = math.log(2)
    want = [-gap / 2, (2 - gap - 1) / 2, (4 + 1) / 2 - 1, 9 / 10, 0.125, 0.25, 0.125]
    assert_same(got, dict(zip(MISMATCH, want, strict=True)))
    assert list(got) == MISMATCH


# Importance weights


@plain.few
@given(batch=plain.batches())
def test_importance_weights_equal_a_plain_loop(batch):
    weights = [math.exp(min(new - old, 5)) for new, old in zip(batch.new, batch.old, strict=True)]
    given_weights, keep = torch.tensor(weights, dtype=torch.float64), torch.tensor(batch.keep, dtype=torch.bool)
    assert_same(result(ImportanceWeights(), (given_weights, keep)), plain.importance_weights(weights, batch.keep))


@plain.few
@given(batch=plain.batches(), cut=st.integers(0, 30))
def test_importance_weights_do_not_depend_on_how_tokens_are_cut_into_updates(batch, cut):
    gaps = torch.tensor(batch.old) - torch.tensor(batch.rollout)
    weights, keep = corrected([TokenMIS()], gaps, integers(batch.lengths))
    got = result(ImportanceWeights(), (weights[cut:], keep[cut:]), (weights[:cut], keep[:cut]))
    assert_same(got, result(ImportanceWeights(), (weights, keep)))


@pytest.mark.parametrize(
    ("weights", "keep", "size"),
    [
        ([1.0, 1.0, 1.0, 1.0], [True] * 4, 1.0),
        ([0.5, 0.5], [True] * 2, 1.0),  # only how unequal the weights are counts
        ([1.0, 0.0, 0.0, 0.0], [True] * 4, 0.25),
        ([1.0, 3.0], [True] * 2, 16 / 20),
        ([1.0, 1.0, 9.0, 9.0], [True, True, False, False], 0.5),
        ([0.0, 0.0], [True] * 2, 0.0),
        ([1.0, 1.0], [False] * 2, 0.0),
    ],
)
def test_effective_sample_size_on_hand_cases(weights, keep, size):
    got = result(ImportanceWeights(), (torch.tensor(weights), torch.tensor(keep)))
    assert got["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(size)
    assert list(got) == WEIGHTS


# Means

updates = st.lists(st.tuples(st.sampled_from(NAMES), st.lists(plain.grid(-5, 5), max_size=4)), min_size=1, max_size=6)


@given(updates=updates)
def test_means_equal_a_plain_loop_over_all_updates(updates):
    got = result(Means(*NAMES), *[({name: torch.tensor(numbers)},) for name, numbers in updates])
    numbers = {name: [x for other, xs in updates for x in xs if other == name] for name in NAMES}
    want = {name: plain.mean(xs) for name, xs in numbers.items() if xs}
    assert list(got) == list(want)  # in the order of the names
    assert_same(got, want)


def test_means_take_masks_counts_and_scalars():
    update = {"train/reward": torch.tensor([True, False]), "train/loss": torch.tensor(3), NAMES[2]: torch.ones(2, 2)}
    assert result(Means(*NAMES), (update,)) == {"train/reward": 0.5, "train/loss": 3.0, "train/entropy": 1.0}


# All of them


def create():
    return [Means(*NAMES), Discrepancy(), Mismatch(), ImportanceWeights()]


def update(metrics, lengths, seed):
    """One update of each of them with some responses."""
    generator = torch.Generator().manual_seed(seed)
    old, rollout = -3 * torch.rand(2, sum(lengths), generator=generator)
    means, of_discrepancy, of_mismatch, of_weights = metrics
    means.update({"train/reward": integers(lengths), "train/entropy": old} if sum(lengths) else {"train/loss": old})
    of_discrepancy.update((old.exp() - rollout.exp()).abs(), integers(lengths))
    of_mismatch.update(old, rollout)
    of_weights.update(*corrected([TokenMIS()], old - rollout, integers(lengths)))


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_without_a_token_nothing_is_reported(lengths):
    metrics = create()
    update(metrics, lengths, seed=0)
    assert [metric.compute() for metric in metrics] == [{}] * 4


def test_a_reset_forgets_the_step():
    metrics, fresh = create(), create()
    update(metrics, [40, 3], seed=0)
    assert all(metric.compute() for metric in metrics)
    for metric in metrics:
        metric.reset()
    update(metrics, [2, 0, 20], seed=1)
    update(fresh, [2, 0, 20], seed=1)
    assert [result(metric) for metric in metrics] == [result(metric) for metric in fresh]


# The responses of each update of each of two ranks, in three steps.
STEPS = [
    [[[40, 3, 0], [17]], [[0, 0]]],  # one rank has no token
    [[[5]], [[1, 36, 2], [0, 9]]],  # neither has as many updates as the other
    [[[0]], [[0, 0]]],  # no rank has a token
]


def measure(steps):
    """What is reported in each step, for the updates of each step."""
    metrics, reports = create(), []
    for step in steps:
        for lengths, seed in step:
            update(metrics, lengths, seed)
        reports.append([result(metric) for metric in metrics])
        for metric in metrics:
            metric.reset()
    return reports


def seeded_updates(step, rank):
    return [(lengths, 10 * rank + i) for i, lengths in enumerate(step[rank])]


def measure_on_a_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.save(measure([seeded_updates(step, rank) for step in STEPS]), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_report_what_one_process_with_all_tokens_does(tmp_path):
    torch.multiprocessing.spawn(measure_on_a_rank, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert first == second
    alone = measure([[*seeded_updates(step, 0), *seeded_updates(step, 1)] for step in STEPS])
    assert alone[-1] == [{}] * 4
    for got, want in zip(first, alone, strict=True):
        for of_ranks, of_one in zip(got, want, strict=True):
            assert list(of_ranks) == list(of_one)
            assert of_ranks == pytest.approx(of_one, rel=1e-12)
