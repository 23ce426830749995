import multiprocessing
import pickle
import random
import resource
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from dclightning import Completion, MathReward
from dclightning.data.problems import Problem
from tests import calls


@pytest.fixture(scope="module")
def reward():
    reward = MathReward()
    yield reward
    reward.close()


@pytest.mark.parametrize(
    ("gold", "boxed", "right"),
    [
        ("42", "42", True),
        ("42", "042", True),
        ("42", "43", False),
        ("-7", "-7", True),
        (r"\frac{1}{2}", "0.5", True),
        (r"\frac{1}{2}", r"\frac{2}{4}", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("(1,2)", "(2,1)", False),
        ("1,000", "1000", True),
        (r"\frac{\pi}{2}", "1.5708", False),
        ("5", "", False),
    ],
)
def test_verdicts(reward, gold, boxed, right):
    assert reward.verdict(gold, f"The answer is $\\boxed{{{boxed}}}$.").equal is right


SOME = [
    (r"\frac{1}{3}", r"\boxed{2/6}"),
    ("14", r"\boxed{\sum_{k=1}^3 k^2}"),
    (r"\{1, 2\}", r"\boxed{2, 1}"),
    ("7", r"\boxed{\sqrt{50}}"),
    ("x^2-1", r"\boxed{(x-1)(x+1)}"),
    ("12", "no box"),
    ("3", r"\boxed{7^{7^{7^7}}}"),
]


def test_the_verdict_is_the_same_from_a_thread_and_from_a_process(reward):
    here = [reward.verdict(*pair) for pair in SOME]
    assert [verdict.equal for verdict in here] == [True, True, True, False, True, False, False]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda pair: reward.verdict(*pair), SOME)) == here
    for method in ("spawn", "fork"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            there = pool.starmap(calls.verdict_in_this_process, [(reward, *pair) for pair in SOME])
            assert there == here
    assert reward.verdicts(*zip(*SOME, strict=True)) == here


def test_processes_that_used_a_reward_end():
    assert calls.verdict_of_the_shared_reward(*SOME[0])
    for method in ("spawn", "fork"):
        context = multiprocessing.get_context(method)
        process = context.Process(target=calls.verdict_of_the_shared_reward, args=SOME[0])
        process.start()
        process.join(timeout=60)
        assert process.exitcode == 0
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            assert list(pool.map(calls.verdict_of_the_shared_reward, *zip(*SOME[:4], strict=True))) == [True] * 3 + [
                False
            ]
    calls.shared.close()


def test_it_scores_a_batch_in_order(reward):
    numbers = random.Random(0).choices(range(5), k=300)
    problems = [Problem(str(i), "?", f"{number}/7") for i, number in enumerate(numbers)]
    completions = [Completion([1], [0.0], "stop", f"\\boxed{{{2 * (i % 5)}/14}}") for i in range(300)]
    assert reward(problems, completions) == [float(number == i % 5) for i, number in enumerate(numbers)]


def test_an_unboxed_number_counts_where_it_is_allowed(reward):
    assert not reward.verdict("42", "It is 42.").equal
    assert reward.verdict("42", "It is 42.").reason == "no answer"
    assert MathReward(unboxed_number=True).verdict("42", "It is 42.").equal
    assert not MathReward(unboxed_number=True).verdict("42", r"42, no, \boxed{41}").equal  # a box comes first


def test_whole_numbers_need_no_process():
    reward = MathReward()
    reward.verdicts(["1", "2", "3"], [r"\boxed{1}", r"\boxed{3}", "3"])
    assert reward._workers._pool is None


@pytest.mark.parametrize(
    ("fault", "reason", "counts"),
    [
        (calls.forever, "took more than 0.3 s", (1, 0)),
        (calls.crash, "raised ProcessExpired", (0, 1)),
        (calls.fail, "raised ZeroDivisionError", (0, 1)),
    ],
)
def test_what_hangs_or_fails_is_wrong_and_counted(monkeypatch, fault, reason, counts):
    reward = MathReward(time_limit=0.3)
    monkeypatch.setattr("dclightning.rewards.math.judge", fault)
    verdict = reward.verdict("1/2", r"\boxed{0.5}")
    assert (verdict.equal, verdict.reason) == (False, reason)
    assert (reward.timeouts, reward.errors) == counts
    monkeypatch.undo()
    assert reward.verdict("1/2", r"\boxed{0.5}").equal
    assert (reward.timeouts, reward.errors) == counts
    reward.close()


def test_a_copy_gives_the_same_verdicts(reward):
    copy = pickle.loads(pickle.dumps(reward))
    assert copy.verdict(*SOME[0]) == reward.verdict(*SOME[0])
    copy.close()


def test_hostile_responses_end_in_time_and_leave_nothing_behind():
    from benchmarks.hostile_responses import hostile

    golds, responses = hostile(80, seed=0)
    reward = MathReward(time_limit=1.0)
    reward.verdict("1/2", r"\boxed{0.5}")
    memory, start = resident(), time.monotonic()
    verdicts = reward.verdicts(golds, responses)
    # Takes half a second alone: a guard against what is quadratic.
    assert time.monotonic() - start < 20
    assert not any(verdict.equal for verdict in verdicts)
    assert reward.verdict("1/2", r"\boxed{0.5}").equal
    reward.close()
    assert resident() - memory < 50 * 2**20


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
