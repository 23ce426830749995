import asyncio
import logging
import re
import threading
import time

import numpy as np
import pytest
import torch

from dclightning import Completion
from dclightning.data.problems import Problem
from dclightning.errors import RunStoppedError
from dclightning.rewards.scoring import Scorer, reward_name

PROBLEMS = [Problem(name, "?", "1") for name in ("a", "a", "b", "b")]
COMPLETIONS = [Completion([1] * n, [0.0] * n, "stop", "x" * n) for n in (1, 2, 3, 4)]


def length(problems, completions):
    return [float(len(c.text)) for c in completions]


def halves(problems, completions):
    return [0.5] * len(completions)


async def slow_length(problems, completions):
    await asyncio.sleep(0.01)
    return [float(len(c.text)) for c in completions]


class Counting:
    """A reward that counts; some cannot be scored."""

    def __init__(self):
        self.timeouts, self.errors, self.closed = 5, 7, False

    def __call__(self, problems, completions):
        self.timeouts += 2
        self.errors += 1
        return [None, 1, 2, 3]

    def close(self):
        self.closed = True


def only_short(problems, completions):
    if any(len(c.text) > 3 for c in completions):
        raise KeyError("long")
    return [1.0] * len(completions)


async def only_short_later(problems, completions):
    return only_short(problems, completions)


def named(rewards):
    return {reward_name(reward): reward for reward in (rewards if isinstance(rewards, list) else [rewards])}


def finish(rewards, **options):
    scorer = Scorer(named(rewards), **options)
    try:
        return scorer.finish(PROBLEMS, COMPLETIONS)
    finally:
        scorer.close()


def test_rewards_are_added_by_weight_and_kept_apart_by_name():
    scores = finish([length, halves, Counting()], weights={"halves": -2.0, "Counting": 0.0})
    assert scores.total.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert list(scores.parts) == ["length", "halves", "Counting"]
    assert scores.parts["length"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert scores.parts["Counting"].isnan().tolist() == [True, False, False, False]
    assert (scores.timeouts, scores.errors) == (2, 1)  # of this call


def test_what_a_reward_with_weight_cannot_score_has_no_total():
    assert finish([length, Counting()]).total.isnan().tolist() == [True, False, False, False]


@pytest.mark.parametrize("kind", [bool, int, float, np.float64, np.bool_, torch.tensor, lambda x: torch.tensor([x])])
def test_any_number_is_a_reward(kind):
    scores = finish(lambda problems, completions: [kind(len(c.text) % 2) for c in completions])
    assert scores.total.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_none_and_nan_are_no_reward():
    scores = finish(lambda problems, completions: (None, float("nan"), 1, 0))
    assert scores.total.isnan().tolist() == [True, True, False, False]
    assert scores.errors == 0


@pytest.mark.parametrize(
    ("rewards", "error"),
    [
        (["1.0", 1, 1, 1], "gave '1.0'; must be a finite number, or None"),
        ([1, float("-inf"), 1, 1], "gave -inf; must be"),
        ([1, 1e39, 1, 1], "gave 1e\\+39; must be"),
        ([1, 1, 1, object()], "gave <object object at .*; must be"),
        ([1, 1, [1, 2], 1], "gave \\[1, 2\\]; must be"),
        ([1, 2, 3], "returned 3 rewards for 4 completions"),
        (None, "returned a NoneType; must be a list of numbers"),
        (2.0, "returned a float; must be a list of numbers"),
        ({0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, "returned a dict; must be"),
        ({1, 2, 3, 4}, "returned a set; must be"),
        ("1111", "returned a str; must be"),
    ],
)
def test_what_is_no_list_of_numbers_stops_the_run_and_names_the_function(rewards, error):
    def mine(problems, completions):
        if not isinstance(rewards, list) or len(rewards) != 4:
            return rewards
        return [rewards[len(completion.text) - 1] for completion in completions]

    with pytest.raises(RunStoppedError, match=f"reward mine: .*{error}.*, on a response to problem '[ab]'"):
        finish(mine, on_error="stop")


@pytest.mark.parametrize("reward", [only_short, only_short_later])
def test_an_exception_costs_only_the_response_that_it_is_about(reward, caplog):
    with caplog.at_level(logging.WARNING, "dclightning"):
        scores = finish([reward, length])
    assert scores.parts[reward.__name__].isnan().tolist() == [False, False, False, True]
    assert scores.total[:3].tolist() == [2.0, 3.0, 4.0]
    assert scores.errors == 1
    place = r"\(test_scoring.py, line \d+\), on a response to problem 'b' \(1 of 4 responses"
    assert re.search(f"reward {reward.__name__}: KeyError: 'long' {place}", caplog.text)
    with pytest.raises(RunStoppedError, match=f"reward {reward.__name__}: KeyError"):
        finish([length, reward], on_error="stop")


def test_a_reward_that_fails_for_all_stops_the_run():
    def broken(problems, completions):
        raise ImportError("nltk is missing")

    with pytest.raises(RunStoppedError, match="reward broken: ImportError: nltk is missing"):
        finish([length, broken])

    def leaves(problems, completions):
        raise SystemExit(3)

    with pytest.raises(RunStoppedError, match="reward leaves: SystemExit: 3"):
        finish(leaves)


def test_a_reward_that_scores_nothing_is_named(caplog):
    assert finish(lambda problems, completions: [None] * 4).total.isnan().all()
    assert "No response was scored: <lambda> gave None for all of them" in caplog.text


def test_async_rewards_score_what_is_finished_while_the_rest_is_sampled():
    started, threads = [], set()

    async def judge(problems, completions):
        started.append([problem.id for problem in problems])
        threads.add(threading.current_thread())
        return await slow_length(problems, completions)

    scorer = Scorer(named([judge, length]))
    scorer.begin(1, PROBLEMS[2], COMPLETIONS[2:])
    end = time.monotonic() + 10
    while not started and time.monotonic() < end:
        time.sleep(0.01)
    assert started == [["b", "b"]]  # nobody has asked for the rewards yet
    scorer.begin(0, PROBLEMS[0], COMPLETIONS[:2])
    scores = scorer.finish(PROBLEMS, COMPLETIONS)
    assert scores.parts["judge"].tolist() == [1.0, 2.0, 3.0, 4.0] == scores.parts["length"].tolist()
    assert threading.main_thread() not in threads
    # What was begun is not found again, and nothing has to be begun.
    assert scorer.finish(PROBLEMS[:1], COMPLETIONS[3:]).total.tolist() == [8.0]
    assert len(started) == 3
    scorer.close()


def test_async_rewards_run_side_by_side_and_from_within_a_loop():
    running = []

    async def meet(problems, completions):  # ends only if both groups are scored at the same time
        running.append(1)
        while len(running) < 2:
            await asyncio.sleep(0.01)
        return [1.0] * len(completions)

    async def notebook():
        scorer = Scorer(named(meet))
        scorer.begin(0, PROBLEMS[0], COMPLETIONS[:2])
        scorer.begin(1, PROBLEMS[2], COMPLETIONS[2:])
        scores = scorer.finish(PROBLEMS, COMPLETIONS)
        scorer.close()
        return scores

    assert asyncio.run(asyncio.wait_for(notebook(), 20)).total.tolist() == [1.0] * 4


def test_closing_ends_async_rewards_that_wait_and_closes_the_others():
    ended = []

    async def endless(problems, completions):
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(True)

    counting = Counting()
    scorer = Scorer(named([endless, counting]))
    scorer.begin(0, PROBLEMS[0], COMPLETIONS[:2])
    time.sleep(0.1)
    scorer.close()
    end = time.monotonic() + 10
    while not ended and time.monotonic() < end:
        time.sleep(0.01)
    assert ended == [True]
    assert counting.closed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (({"a": length}, {"b": 1.0}), "reward_weights: 'b' is not one of a"),
        (({"a": length}, {"a": 0.0}), "reward_weights: at least one must not be 0"),
        (({"a": length}, {"a": float("nan")}), "reward_weights: a=nan: must be finite"),
        (({"errors": length},), "extra_rewards: the name 'errors' is that of a counter"),
        (({"a": length}, None, "ignore"), "reward_errors='ignore': must be one of skip, stop"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Scorer(*arguments)


def test_what_a_reward_keeps_open_belongs_to_one_loop():
    loops = []

    class Server:
        name = "served"

        async def __call__(self, problems, completions):
            loops.append(asyncio.get_running_loop())
            return [1.0] * len(completions)

    server = Server()
    training, validation = Scorer(named(server)), Scorer({"validation": server})
    for scorer in (training, validation, training):
        scorer.begin(0, PROBLEMS[0], COMPLETIONS[:2])
        assert scorer.finish(PROBLEMS[:2], COMPLETIONS[:2]).total.tolist() == [1.0, 1.0]
        scorer.close()
    assert len(loops) == 3
    assert len(set(loops)) == 1
    assert list(training.rewards) == ["served"]


def test_an_async_reward_that_leaves_does_not_hang():
    async def leaves(problems, completions):
        raise SystemExit("no key")

    async def too_few_arguments(problems):
        return []

    for reward, message in ((leaves, "SystemExit: no key"), (too_few_arguments, "TypeError: .* takes 1 positional")):
        scorer = Scorer(named(reward))
        scorer.begin(0, PROBLEMS[0], COMPLETIONS[:2])
        scorer.begin(1, PROBLEMS[2], COMPLETIONS[2:])
        with pytest.raises(RunStoppedError, match=message):
            scorer.finish(PROBLEMS, COMPLETIONS)


def test_responses_to_one_problem_stay_together_when_the_culprit_is_sought():
    calls = []

    def compares(problems, completions):
        calls.append(len(completions))
        if any(len(c.text) == 4 for c in completions):
            raise ValueError("too long")
        return [len(c.text) / max(len(c.text) for c in completions) for c in completions]

    scores = finish(compares)
    assert scores.total[:2].tolist() == [0.5, 1.0]
    assert scores.total.isnan().tolist() == [False, False, False, True]
    assert calls == [4, 2, 2, 1, 1]


def test_one_refused_problem_alone_does_not_stop_a_run():
    scorer = Scorer(named(only_short))
    assert scorer.finish(PROBLEMS[3:], COMPLETIONS[3:]).total.isnan().all()


def test_a_server_that_is_down_is_not_asked_for_every_response():
    calls = []

    def down(problems, completions):
        calls.append(len(completions))
        raise OSError("refused")

    problems = [Problem(str(i // 8), "?", "1") for i in range(200)]
    with pytest.raises(RunStoppedError, match="OSError: refused"):
        Scorer(named(down)).finish(problems, COMPLETIONS * 50)
    assert len(calls) < 30


def test_none_is_no_failure_when_the_culprit_is_sought():
    def often_none(problems, completions):
        if any(problem.id == "24" for problem in problems):
            raise OSError("refused")
        return [None] * len(completions)

    problems = [Problem(str(i // 8), "?", "1") for i in range(200)]
    scores = Scorer(named(often_none)).finish(problems, COMPLETIONS * 50)
    assert scores.total.isnan().all()
    assert scores.errors == 8


def test_what_was_begun_can_be_abandoned():
    scorer = Scorer(named(slow_length))
    scorer.begin(0, PROBLEMS[0], COMPLETIONS[:2])
    scorer.abandon()
    assert scorer.finish(PROBLEMS[2:], COMPLETIONS[2:]).total.tolist() == [3.0, 4.0]
