import pytest

from dclightning import Completion, MathReward
from dclightning.data.problems import Problem
from dclightning.evaluation import evaluated, measures
from dclightning.rewards.scoring import Scorer


def responses(*texts):
    return [
        Completion([1] * (3 + i), [0.0], "length" if "cut" in text else "stop", text) for i, text in enumerate(texts)
    ]


@pytest.fixture(scope="module")
def hand_made():
    """Two problems with four responses each."""
    problems = [Problem("a", "?", "1/2"), Problem("b", "?", "7")]
    completions = responses(
        *(r"\boxed{0.5}", r"\boxed{\frac24}", r"\boxed{1}", "cut"),
        *(r"\boxed{8}", r"\boxed{7}", r"\boxed{8.0}", r"\boxed{9} cut"),
    )
    reward = MathReward()
    scorer = Scorer({"math": reward})
    scores = scorer.finish([problem for problem in problems for _ in range(4)], completions)
    yield evaluated(problems, completions, scores, reward)
    scorer.close()


def test_measures_equal_hand_values(hand_made):
    values = {name: value.tolist() for name, value in measures(hand_made, 4, majority=True).items()}
    assert values == {
        "avg@4": [0.5, 0.25],
        "pass@4": [1.0, 1.0],
        "maj@4": [1.0, 0.0],  # twice 1/2 and once 1; twice 8, once 7, once 9
        "response_length": [4.5, 8.5],
        "truncated_fraction": [0.25, 0.25],
    }


def test_equal_answers_are_in_one_class(hand_made):
    classes = [[response.answer_class for response in result.responses] for result in hand_made]
    assert classes[0][0] == classes[0][1] != classes[0][2]
    assert classes[0][3] == -1
    assert classes[1][0] == classes[1][2]
    assert len({*classes[1]}) == 3
    assert [response.answer for response in hand_made[0].responses] == ["0.5", r"\frac24", "1", None]


def test_no_problem_has_no_values():
    values = measures([], 4, majority=True)
    assert list(values) == ["avg@4", "pass@4", "maj@4", "response_length", "truncated_fraction"]
    assert all(len(value) == 0 for value in values.values())


def test_a_reward_that_compares_no_answers_has_no_majority():
    problems, completions = [Problem("a", "?", "1")], responses("x", "y")
    scorer = Scorer({"length": lambda problems, completions: [len(c.token_ids) / 4 for c in completions]})
    results = evaluated(problems, completions, scorer.finish(problems * 2, completions), scorer.rewards["length"])
    values = measures(results, 2, majority=False)
    assert values["avg@2"].tolist() == [0.875]
    assert values["pass@2"].tolist() == [1.0]
    assert "maj@2" not in values
