"""Evaluations on the real engine and on transformers, killed and resumed."""

import json
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

from dclightning import Sampling, TransformersEngine, VLLMEngine
from dclightning.accuracy import interval
from dclightning.data.arithmetic import arithmetic_problems
from dclightning.errors import UserError
from dclightning.evaluate import evaluate
from dclightning.evaluation import measures
from tests.helpers import TINY

pytestmark = pytest.mark.slow
SHORT = Sampling(max_tokens=64, temperature=0.7)


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(json.dumps(vars(problem)) + "\n" for problem in arithmetic_problems("test", 60)))
    return path


class Rounded(TransformersEngine):
    """Weights to so few bits that it must show."""

    def start(self, model, max_length):
        super().start(model, max_length)
        with torch.no_grad():
            for weight in self._model.parameters():
                mantissa, exponent = torch.frexp(weight)
                weight.copy_(torch.ldexp((mantissa * 4).round() / 4, exponent))


def test_engines_agree_on_the_same_weights_and_rounding_shows(benchmark, tmp_path):
    engines = {"transformers": TransformersEngine(), "rounded": Rounded()}
    vllm = VLLMEngine(dtype="float32", kv_cache_gib=0.0625)
    found = evaluate(TINY, str(benchmark), vllm, engines, sampling=SHORT, samples=8, output=tmp_path)
    values = {name: measures(results["sums"], 8, majority=True)["avg@8"] for name, results in found.items()}
    deployed = values["tiny-arithmetic"]
    low, high = interval(values["tiny-arithmetic-transformers"] - deployed)
    assert low <= 0 <= high
    low, high = interval(values["tiny-arithmetic-rounded"] - deployed)
    assert high < 0


def command(benchmark, output, *options):
    return [
        *(sys.executable, "-m", "dclightning", "evaluate", "--model", TINY, "--benchmarks", str(benchmark)),
        *("--engine.quantization", "fp8_per_channel", "--engine.dtype", "bfloat16", "--engine.kv_cache_gib", "0.0625"),
        *("--sampling.max_tokens", "64", "--samples", "2", "--at_once", "20", "--output", str(output), *options),
    ]


def test_a_killed_evaluation_resumes_and_gives_the_same_table(benchmark, tmp_path):
    whole = subprocess.run(command(benchmark, tmp_path / "whole"), capture_output=True, text=True, timeout=300)
    assert whole.returncode == 0, whole.stderr
    rows = tmp_path / "cut" / "tiny-arithmetic" / "sums.jsonl"
    killed = subprocess.Popen(command(benchmark, tmp_path / "cut"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    end = time.monotonic() + 200
    while not (rows.exists() and rows.read_bytes().count(b"\n") >= 20) and time.monotonic() < end:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    kept = rows.read_bytes()
    assert 20 <= kept.count(b"\n") < 60
    rows.write_bytes(kept + b'{"problem": {"id": "half a li')  # as if it was killed while it wrote
    again = subprocess.run(command(benchmark, tmp_path / "cut"), capture_output=True, text=True, timeout=300)
    assert again.returncode == 0, again.stderr
    assert again.stdout.replace("cut", "whole") == whole.stdout
    assert rows.read_bytes() == (tmp_path / "whole" / "tiny-arithmetic" / "sums.jsonl").read_bytes()


def test_more_problems_are_added_to_those_that_are_kept(benchmark, tmp_path):
    engine = TransformersEngine()

    def run(limit, **options):
        options = {"sampling": SHORT, "samples": 2, "at_once": 4, "output": tmp_path, **options}
        return evaluate(f"mine={TINY}", str(benchmark), engine, limit=limit, **options)["mine"]["sums"]

    few = run(4)
    more = run(8)
    assert more[:4] == few
    assert run(4) == few
    assert run(8) == more
    for changed, message in (
        ({"seed": 1}, "another seed"),
        ({"system_prompt": "Be brief."}, "another prompts"),
        ({"samples": 3}, r"another samples \(2, now 3\)"),
    ):
        with pytest.raises(UserError, match=message):
            run(8, **changed)
    first, *others = benchmark.read_text().splitlines()
    benchmark.write_text("\n".join([first, *others[::-1]]))
    with pytest.raises(UserError, match="results of other problems"):
        run(8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"benchmarks": "nope"}, "benchmarks='nope': there is aime24"),
        ({"engine": VLLMEngine("fp8", simulate=False)}, "quantization='fp8'"),
        ({"prompt_template": "x"}, "prompt_template='x': must contain {problem}"),
        ({"model": "a=x,a=y"}, "two policies have the name 'a'"),
        ({"model": "nowhere"}, "model='nowhere': no such folder"),
        ({"samples": 0}, "samples=0: must be at least 1"),
        ({"sampling": Sampling(max_tokens=9999)}, "sampling.max_tokens=9999: the longest prompt"),
        ({"sampling": Sampling(max_tokens=8, temperature=0.0), "samples": 2}, "at temperature 0 all are the same"),
    ],
)
def test_what_cannot_work_is_said_and_keeps_nothing(tmp_path, options, message):
    (tmp_path / "b.jsonl").write_text('{"problem": "What is 1 + 1?", "answer": 2}')
    usual = {"model": TINY, "benchmarks": str(tmp_path / "b.jsonl"), "sampling": Sampling(max_tokens=8)}
    with pytest.raises(UserError, match=re.escape(message)):
        evaluate(**{**usual, **options}, output=tmp_path / "out")
    assert not any(file.stat().st_size for file in tmp_path.glob("out/*/*.jsonl"))


def test_transformers_may_be_the_engine(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"problem": "What is 1 + 1?", "answer": 2}')
    options = ["--engine", "dclightning.TransformersEngine", "--sampling.max_tokens", "8", "--model", TINY]
    command = [sys.executable, "-m", "dclightning", "evaluate", "--benchmarks", "b.jsonl", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "b: 1 problems, 1 responses to each" in done.stdout
    wrong = subprocess.run([*command, "--samples", "0"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    assert "samples=0: must be at least 1" in wrong.stderr
