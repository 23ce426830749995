import json

import pytest

from dclightning.data.arithmetic import _exercises, arithmetic_problems, work
from dclightning.data.problems import Problem, load_problems
from dclightning.errors import UserError


def test_training_and_held_out_problems_share_no_pair_of_operands():
    def pairs(split):
        found = set()
        for problem in arithmetic_problems(split):
            left, operator, right = problem.problem.removeprefix("What is ").removesuffix("?").split()
            found.add((operator, *sorted([int(left), int(right)])))
        return found

    train, test = pairs("train"), pairs("test")
    assert not train & test
    assert len(train) > 10_000
    assert len(test) > 3_000


def test_the_worked_answer_is_right_for_every_exercise():
    for a, operator, b in _exercises():
        answer, working = work(a, operator, b)
        assert answer == {"+": a + b, "-": a - b, "*": a * b}[operator]
        assert working.endswith(f"\\boxed{{{answer}}}")


def test_problems_are_distinct_and_their_order_follows_the_seed():
    first, again, other = (arithmetic_problems("train", 500, seed) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert len({p.id for p in first}) == 500


def test_too_many_problems_are_refused():
    with pytest.raises(ValueError, match="count=1000000: there are"):
        arithmetic_problems("test", 1_000_000)
    with pytest.raises(ValueError, match="split='tset'"):
        arithmetic_problems("tset")


def test_problems_from_a_file(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": "a", "problem": "1+1?", "answer": 2}) + "\n\n")
    assert load_problems(str(path)) == [Problem("a", "1+1?", "2")]


def test_only_line_feeds_end_a_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"problem": "a\u2028b", "answer": 1.5}\n', encoding="utf-8")
    assert load_problems(str(path)) == [Problem("1", "a\u2028b", "1.5")]


@pytest.mark.parametrize("line", ["{", "[]", '{"problem": "x"}', "3", '{"problem": null, "answer": "1"}'])
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"problem": "x", "answer": "y"}\n' + line + "\n")
    with pytest.raises(UserError, match="line 2"):
        load_problems(str(path))


def test_a_missing_or_empty_file_is_named(tmp_path):
    for name in ("nowhere.jsonl", "dclightning/arithmetic-tset"):
        with pytest.raises(UserError, match=f"problems='{name}': no such file"):
            load_problems(name)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="empty"):
        load_problems(str(tmp_path / "empty.jsonl"))


def test_bundled_problems_go_by_name():
    assert load_problems("dclightning/arithmetic-test")[0].answer.isdigit()
