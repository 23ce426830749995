import io
import json
import subprocess
import sys

import pytest

from dclightning import MathReward
from dclightning.score import score

ROWS = [
    {"id": "a", "answer": "5", "response": r"\boxed{5}", "model": "mine"},
    {"id": "b", "answer": r"\frac{1}{2}", "response": r"\boxed{0.5} ü"},
    {"id": "c", "answer": 7, "response": r"\boxed{\sum_{k=1}^3 k}"},
    {"id": "d", "answer": 7, "response": "It is 7."},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(json.dumps(row) + "\n\n" for row in ROWS), encoding="utf-8")
    return path


def run(*arguments):
    command = [sys.executable, "-m", "dclightning", "score", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_each_row_is_written_with_its_verdict(file):
    done = run(file)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [{key: row[key] for key in before} for row, before in zip(rows, ROWS, strict=True)] == ROWS
    assert [row["correct"] for row in rows] == [True, True, False, False]
    assert [row["extracted"] for row in rows] == ["5", "0.5", r"\sum_{k=1}^3 k", None]
    assert [row["reason"] for row in rows][::3] == ["same integer", "no answer"]
    assert done.stderr == "2 of 4 responses are right, 50.00%; 1 give no answer, 0 took too long, 0 failed\n"


def test_options_are_those_of_the_reward(file, tmp_path):
    output = tmp_path / "verdicts.jsonl"
    done = run(file, "--output", output, "--unboxed_number", "true", "--conventions.ignore_units", "false")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert [json.loads(line)["correct"] for line in output.read_text(encoding="utf-8").splitlines()].count(True) == 3


def test_more_rows_than_are_held_at_once_keep_their_order(tmp_path, monkeypatch):
    monkeypatch.setattr("dclightning.score._AT_ONCE", 3)
    path, target = tmp_path / "many.jsonl", io.StringIO()
    path.write_text("\n".join(json.dumps({"answer": i % 2, "response": f"\\boxed{{{i}}}"}) for i in range(10)))
    assert score(MathReward(), path, target).startswith("2 of 10 ")
    rows = [json.loads(line) for line in target.getvalue().splitlines()]
    assert [row["extracted"] for row in rows] == [str(i) for i in range(10)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"response": "x"}', "line 2: 'answer' is missing"),
        (b'{"answer": "5"}', "line 2: 'response' is missing"),
        (b'{"answer": "5", "response": null}', "line 2: response must be text"),
        (b'{"answer": true, "response": "5"}', "line 2: answer must be text or a number"),
        (b"[1]", "line 2: must be a JSON object"),
        (b'{"answer": ', "line 2: Expecting value"),
        (b'{"answer": "\xff"}', "line 2: 'utf-8' codec"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_scored(tmp_path, line, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"answer": "5", "response": "x"}\n' + line)
    done = run(path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.jsonl"], "file='nothing.jsonl': no such file"),
        (["FILE", "--output", "FILE"], "is the file to be scored"),
        (["FILE", "--output", "/no/folder"], "/no/folder: cannot be written (No such file or directory)"),
        (["FILE", "--time_limit", "0"], "time_limit=0.0: must be positive"),
        (["FILE", "--conventions.colour", "true"], "colour"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(file, arguments, message):
    done = run(*(file if argument == "FILE" else argument for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_empty_file_is_refused(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("\n")
    assert "the file is empty" in run(path).stderr


def test_it_may_be_cut_short_by_a_pipe(file):
    command = f"{sys.executable} -m dclightning score {file} | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == 1
