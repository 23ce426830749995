import threading

import pytest

from dclightning import Completion, MathReward
from dclightning.data.problems import Problem
from dclightning.rewards.math import last_boxed


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (r"so \boxed{42}", "42"),
        (r"\boxed{1} no, \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{7} and then \boxed{8", "7"),
        ("42", None),
        ("", None),
        (r"\boxed{", None),
        (r"\boxed{}", ""),
        (r"\boxed{a \boxed{b} c", "b"),
        (r"} \boxed{1 { } and \boxed{2}", "2"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{" * 200_000, None),
    ],
)
def test_the_last_complete_box_counts(response, answer):
    assert last_boxed(response) == answer


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
    assert MathReward().correct(gold, f"The answer is $\\boxed{{{boxed}}}$.") is right


def test_a_thread_gives_the_same_verdict():
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(MathReward().correct(r"\frac{1}{3}", r"\boxed{2/6}")))
    thread.start()
    thread.join()
    assert verdicts == [MathReward().correct(r"\frac{1}{3}", r"\boxed{2/6}")] == [True]


def test_it_scores_a_batch():
    problems = [Problem("a", "1+1?", "2"), Problem("b", "1+2?", "3")]
    completions = [Completion([1], [0.0], "stop", r"\boxed{2}"), Completion([1], [0.0], "length", "3")]
    assert MathReward()(problems, completions) == [1.0, 0.0]
