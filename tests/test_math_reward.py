import threading

import pytest

from dclightning import Completion, MathReward
from dclightning.data.problems import Problem
from dclightning.rewards import math as math_reward


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
def test_verdicts(gold, boxed, right):
    assert MathReward().verdict(gold, f"The answer is $\\boxed{{{boxed}}}$.").equal is right


def test_a_thread_gives_the_same_verdict():
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(MathReward().verdict(r"\frac{1}{3}", r"\boxed{2/6}")))
    thread.start()
    thread.join()
    assert verdicts == [MathReward().verdict(r"\frac{1}{3}", r"\boxed{2/6}")]
    assert verdicts[0].equal


def test_it_scores_a_batch():
    problems = [Problem("a", "1+1?", "2"), Problem("b", "1+2?", "3")]
    completions = [Completion([1], [0.0], "stop", r"\boxed{2}"), Completion([1], [0.0], "length", "3")]
    assert MathReward()(problems, completions) == [1.0, 0.0]


def test_an_unboxed_number_counts_where_it_is_allowed():
    assert not MathReward().verdict("42", "It is 42.").equal
    assert MathReward().verdict("42", "It is 42.").reason == "no answer"
    assert MathReward(unboxed_number=True).verdict("42", "It is 42.").equal
    assert not MathReward(unboxed_number=True).verdict("42", r"42, no, \boxed{41}").equal  # a box comes first


def test_a_verdict_ends_in_time(monkeypatch):
    def endless(gold, answer, conventions):
        while True:
            pass

    monkeypatch.setattr(math_reward, "judge", endless)
    verdict = MathReward(time_limit=0.05).verdict("1", r"\boxed{2}")
    assert (verdict.equal, verdict.reason) == (False, "took too long")
    monkeypatch.undo()
    assert MathReward(time_limit=0.05).verdict("1", r"\boxed{1}").equal
