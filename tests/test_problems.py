import json
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from dclightning.data.arithmetic import _exercises, arithmetic_problems, work
from dclightning.data.benchmarks import load_benchmarks
from dclightning.data.problems import Problem, Source, load_problems
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


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", '{"problem": "x"}', "3", '{"problem": null, "answer": "1"}', '{"problem": " ", "answer": "1"}'),
        *(
            '{"problem": "x", "answer": []}',
            '{"problem": "x", "answer": NaN}',
            '{"problem": "x", "answer": [{"a": 1}]}',
        ),
        *('{"problem": "x", "answer": ""}', '{"problem": "x", "answer": true}'),
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"problem": "x", "answer": "y"}\n' + line + "\n")
    with pytest.raises(UserError, match="line 2"):
        load_problems(str(path))


def test_a_missing_or_empty_file_is_named(tmp_path):
    for name in ("nowhere.jsonl", "dclightning/arithmetic-tset", "nowhere", "./a/b", "/a/b.parquet"):
        with pytest.raises(UserError, match=f"problems='{name}': no such file"):
            load_problems(name)
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match="there are no problems in it"):
        load_problems(str(tmp_path / "empty.jsonl"))
    (tmp_path / "table.csv").write_text("problem,answer")
    with pytest.raises(UserError, match=r"must be a file of the type \.jsonl, \.json, \.parquet, \.arrow"):
        load_problems(str(tmp_path / "table.csv"))


def test_without_a_network_the_hub_is_given_up_in_one_line(monkeypatch):
    monkeypatch.setattr("dclightning.data.problems.hub_answers", lambda: False)
    for name in ("math500", "aime24"):
        with pytest.raises(
            UserError, match=f"benchmarks {name}=.*the hub cannot be reached.*pass a file, such as problems.jsonl"
        ):
            load_benchmarks([name])


ROWS = [{"id": "a", "problem": "1+1?", "answer": "2"}, {"id": "b", "problem": "½?", "answer": "0.5"}]
PROBLEMS = [Problem("a", "1+1?", "2"), Problem("b", "½?", "0.5")]


def test_all_formats_hold_the_same_problems(tmp_path):
    table = pyarrow.Table.from_pylist(ROWS)
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "p.json").write_text(json.dumps(ROWS))
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    with (
        pyarrow.OSFile(str(tmp_path / "stream.arrow"), "wb") as file,
        pyarrow.ipc.new_stream(file, table.schema) as out,
    ):
        out.write_table(table)
    with pyarrow.OSFile(str(tmp_path / "file.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table)
    for name in ("p.jsonl", "p.json", "p.parquet", "stream.arrow", "file.arrow"):
        assert load_problems(str(tmp_path / name)) == PROBLEMS, name


@pytest.mark.parametrize("name", ["p.json", "p.parquet", "p.arrow"])
def test_a_broken_file_is_named(tmp_path, name):
    (tmp_path / name).write_text('{"problem": 1')
    with pytest.raises(UserError, match=f"{name}': cannot be read"):
        load_problems(str(tmp_path / name))


def test_fields_may_have_other_names_and_be_nested(tmp_path):
    row = {
        "prompt": [{"role": "user", "content": "Solve it.\n\n1+1? "}],
        "reward_model": {"ground_truth": "long work\n#### 2"},
        "extra": {"index": 7},
    }
    (tmp_path / "p.json").write_text(json.dumps([row]))
    source = Source(
        str(tmp_path / "p.json"),
        problem="prompt.0.content",
        answer="reward_model.ground_truth",
        id="extra.index",
        answer_after="####",
        remove=("Solve it.\n\n",),
    )
    assert load_problems(source) == [Problem("7", "1+1?", "2")]
    for changed, message in [
        ({"problem": "prompt.1.content"}, "row 1: has no field prompt.1.content"),
        ({"answer": "reward_model"}, "row 1: reward_model must be text or a number"),
        ({"answer_after": "Answer:"}, "must contain 'Answer:'"),
    ]:
        with pytest.raises(UserError, match=message):
            load_problems(replace(source, **changed))


def test_a_list_of_answers_is_one_answer(tmp_path):
    (tmp_path / "p.json").write_text(json.dumps([{"problem": "x", "answer": ["$1$", "$2$"]}]))
    assert load_problems(str(tmp_path / "p.json"))[0].answer == "$1$, $2$"


def test_benchmarks_go_by_name_or_file(tmp_path):
    (tmp_path / "mine.v2.jsonl").write_text(json.dumps(ROWS[0]))
    path = str(tmp_path / "mine.v2.jsonl")
    assert load_benchmarks([path, f"aime24={path}"]) == {"mine": PROBLEMS[:1], "aime24": PROBLEMS[:1]}
    with pytest.raises(UserError, match="there are two by the name 'mine'"):
        load_benchmarks([path, f"mine={path}"])
    for wrong in ("aime26", "", "../x=f", "=f"):
        with pytest.raises(UserError, match=f"benchmarks='{wrong}': there is aime24, aime25"):
            load_benchmarks([wrong])
    (tmp_path / "lr=1").mkdir()
    (tmp_path / "lr=1" / "b.jsonl").write_text(json.dumps(ROWS[0]))
    assert list(load_benchmarks(f"{path}, {tmp_path}/lr=1/b.jsonl")) == ["mine", "b"]


def test_bundled_problems_go_by_name():
    assert load_problems("dclightning/arithmetic-test")[0].answer.isdigit()
