import json
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from dclightning.data.arithmetic import arithmetic_problems
from dclightning.data.cleaning import faults, needs_an_image, normalized, script
from dclightning.data.problems import Problem, load_problems

RECIPE = Path(__file__).parent.parent / "configs" / "data" / "dapo-math-17k.yaml"


def problems(*rows):
    return [Problem(str(i), question, answer) for i, (question, answer) in enumerate(rows)]


def test_printings_of_one_question_are_the_same():
    printings = ["Find the ﬁrst $x_1$, y!", "find the first x1 , Y", "FIND THE FIRST \\(x_{1}\\), y."]
    assert len({normalized(text) for text in printings}) == 1
    assert normalized("x1") != normalized("x2")


def test_signs_tell_questions_with_other_answers_apart():
    some = problems(
        ("x^8 + 98x", "4"), ("$x^8 - 98x$", "20"), ("x^8 −98 x?", "20"), ("x^8+98x", "5"), ("2+2", "4"), ("2-2", "0")
    )
    assert faults(some, {}) == {0: "conflicting answers", 2: "duplicate", 3: "conflicting answers"}
    assert set(faults(arithmetic_problems("train"), {}).values()) == {"duplicate"}  # of 2 + 2 and 2 * 2, say


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[asy] draw(A--B); [/asy]", True),
        ("See ![](https://x.y/1.png)", True),
        ("1988-1.png", True),
        (r"\includegraphics{a}", True),
        ("<img src=a>", True),
        ("Draw a picture of 3.5 images!", False),
    ],
)
def test_images(text, found):
    assert needs_an_image(text) is found


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Find $\\alpha$, α, ñ and ℝ, 𝑥, ℵ, ʹ!", "latin"),
        ("求 x", "cjk"),
        ("Найдите x", "cyrillic"),
        ("xを求めよ", "hiragana"),
    ],
)
def test_scripts(text, name):
    assert script(text) == name


def test_answers_that_are_equal_do_not_contradict_each_other():
    assert faults(problems(("a b", "1/2"), ("A b", "0.5"), ("c", "2"), ("c", "2.0")), {}) == {
        1: "duplicate",
        3: "duplicate",
    }


def test_each_fault_is_found_and_the_gravest_is_named():
    some = problems(
        ("good", "1"),
        ("a b", "1"),
        ("A, b!", "1"),
        ("c", "1"),
        ("C", "2"),
        ("bench mark", "1"),
        ("x.png", "1"),
        ("求", "1"),
    )
    benchmarks = {"held-out": problems(("Benchmark", "9"))}
    found = {2: "duplicate", 3: "conflicting answers", 4: "conflicting answers", 5: "in held-out", 6: "image"}
    assert faults(some, benchmarks) == found
    assert faults(some, benchmarks, ["latin"]) == {**found, 7: "cjk"}
    assert faults(some, {}, ["latin", "cjk"]) == {key: value for key, value in found.items() if key != 5}


def run(*arguments):
    command = [sys.executable, "-m", "dclightning", "prepare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_prepare_writes_what_is_good_and_says_what_is_not(tmp_path):
    rows = [{"question": "a b", "answer": 1}, {"question": "A B", "answer": 1}, {"question": "x.png", "answer": 2}]
    (tmp_path / "raw.json").write_text(json.dumps([*rows, {"question": "in mine", "answer": 3}]))
    (tmp_path / "mine.jsonl").write_text(json.dumps({"problem": "In mine?", "answer": 3}))
    (tmp_path / "recipe.yaml").write_text(
        f"source: {{path: {tmp_path / 'raw.json'}, problem: question}}\nbenchmarks: [{tmp_path / 'mine.jsonl'}]\n"
    )
    kept, dropped = tmp_path / "kept.jsonl", tmp_path / "dropped.jsonl"
    done = run("--config", tmp_path / "recipe.yaml", "--output", kept, "--dropped", dropped)
    assert done.returncode == 0, done.stderr
    assert load_problems(str(kept)) == [Problem("1", "a b", "1")]
    assert [(row["id"], row["reason"]) for row in map(json.loads, dropped.read_text().splitlines())] == [
        ("2", "duplicate"),
        ("3", "image"),
        ("4", "in mine"),
    ]
    assert "1 of 4 problems are in" in done.stderr
    assert "1 dropped: in mine" in done.stderr
    (tmp_path / "raw.jsonl").write_text('{"problem": "a", "answer": 1}\n{\n{"problem": " ", "answer": 1}\n')
    benchmark = f"--benchmarks=mine={tmp_path / 'mine.jsonl'}"
    done = run("--source.path", tmp_path / "raw.jsonl", "--output", kept, benchmark)
    assert done.returncode == 0, done.stderr
    assert "2 dropped: no problem (line 2: Expecting" in done.stderr
    assert "1 of 3 problems are in" in done.stderr
    nothing = run("--source.path", tmp_path / "raw.jsonl", "--output", kept, "--scripts=[cjk]")
    assert nothing.returncode == 2
    assert "1 dropped: latin" in nothing.stderr
    assert "no problem is left" in nothing.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "x"], "source.path"),
        (["--source.path", "nope.jsonl", "--output", "x"], "source.path='nope.jsonl': no such file"),
        (["--source.path", "GOOD"], "output"),
        (["--source.path", "GOOD", "--output", "/no/folder"], "--output='/no/folder': cannot be written"),
        (["--source.path", "GOOD", "--output", "x", "--benchmarks+=aime26"], "benchmarks='aime26'"),
        (["--source.path", "GOOD", "--output", "x", "--source.problem=q"], "no problems in it: line 1: has no field q"),
        (["--source.path", "GOOD", "--output", "x", "--dropped", "x"], "--dropped='x': is the output"),
        (["--source.path", "GOOD", "--output", "GOOD"], "is the source; name another file"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(tmp_path, arguments, message):
    (tmp_path / "good.jsonl").write_text(json.dumps({"problem": "a", "answer": 1}))
    done = run(*(tmp_path / "good.jsonl" if word == "GOOD" else word for word in arguments))
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_recipe_for_dapo_reads_the_rows_as_they_are_published(tmp_path):
    before = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    )
    before += "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
    after = '\n\nRemember to put your answer on its own line after "Answer:".'
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"{before}{question}{after}", "role": "user"}],
            "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
            "extra_info": {"index": f"id-{question[:4]}"},
        }
        for question in ("What is 17 + 17?", "What is 17 + 17?", "求 17 + 17")
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "raw.parquet")
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"problem": "other", "answer": 3}))
    own = ["--source.path", tmp_path / "raw.parquet", f"--benchmarks=[{tmp_path / 'held_out.jsonl'}]"]
    done = run("--config", RECIPE, *own, "--output", tmp_path / "clean.jsonl")
    assert done.returncode == 0, done.stderr
    assert load_problems(str(tmp_path / "clean.jsonl")) == [Problem("id-What", "What is 17 + 17?", "34")]
    assert "1 dropped: duplicate" in done.stderr
    assert "1 dropped: cjk" in done.stderr
