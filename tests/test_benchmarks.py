"""The benchmarks run; what they measure is not asserted."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
def test_update_cost_compares_both_methods():
    command = [sys.executable, "benchmarks/update_cost.py", "--rounds", "1", "--responses", "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for text in ("TIS ", "DC-GRPO", "TIS again", "% of a step"):
        assert text in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("part", ["update", "logprobs", "rewards"])
def test_parts_are_timed_beside_the_least_they_could_take(part):
    model = str(ROOT / "dclightning" / "assets" / "tiny-arithmetic")
    command = [sys.executable, "benchmarks/parts.py", part, model, "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rounds = json.loads(done.stdout.split("ROUNDS ")[1])
    assert all(len(seconds) == 2 and min(seconds) > 0 for seconds in rounds.values())
    assert ("beside" in rounds) == (part != "rewards")


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    return importlib.import_module("bench")


def test_a_comparison_is_the_median_of_its_rounds_ratios(bench):
    assert bench.Row("", "", "<= 0.5", [1, 1, 9], [4, 2, 10]).value == 0.5
    assert bench.Row("", "", ">= 0.97", [1, 1, 10], [4, 2, 9], faster=True).value == 2
    assert bench.Row("", "", "<= 15", [14, 30, 15]).reached
    assert not bench.Row("", "", ">= 0.97", [1], [0.9], faster=True).reached


def test_what_is_not_among_the_quick_measures_is_refused(bench, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bench.py", "--quick", "--only", "sync"])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    assert ended.value.code == 2
    assert "sync is not among what --quick measures: step, start, parts, memory" in capsys.readouterr().err


def test_a_measure_that_fails_leaves_the_others_in_the_report(bench, tmp_path):
    def fails(_):
        raise RuntimeError("no memory")

    some = bench.Bench(tmp_path, tmp_path / "report")
    some.measure("first", lambda b: b.add("a step", "another", "<= 1", [1.0], [2.0]))
    some.measure("second", fails)
    text = (tmp_path / "report.md").read_text()
    assert "Failed: second." in text
    assert "| a step | another | 1 CPU s | 2 | 0.5 × the cost | <= 1 | reached |" in text
    told = json.loads((tmp_path / "report.json").read_text())
    assert (told["failed"], told["rows"][0]["value"]) == (["second"], 0.5)


def test_math_verdicts_lists_what_is_wrong(tmp_path):
    rows = [{"id": "a", "problem": "", "answer": r"\frac{1}{2}"}, {"id": "b", "problem": "", "answer": "0.5"}]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, "benchmarks/math_verdicts.py", "--data", str(tmp_path), "--pairs", "5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 of      2 equal to their own boxed form" in done.stdout
    assert "equal: '" in done.stdout


def test_hostile_responses_are_survived():
    command = [
        sys.executable,
        "benchmarks/hostile_responses.py",
        "--count",
        "72",
        "--endless",
        "2",
        "--time-limit",
        "1",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for text in ("72 hostile responses", "0 called right", "of 100 right responses after them 100", "2 of them killed"):
        assert text in done.stdout


@pytest.mark.slow
def test_what_is_for_gpus_runs_as_far_as_a_cpu_goes():
    command = [sys.executable, "benchmarks/gpu_check.py", "quickstart, one step off"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert re.search(r"- mean discrepancy: [1-9]\.\d+e-0[34]", done.stdout)
    assert "- time/sync_s: 0." in done.stdout
