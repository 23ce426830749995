"""Evaluations on the real engine and on transformers, killed and resumed."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch

from dclightning import Sampling, TransformersEngine, VLLMEngine
from dclightning.accuracy import interval
from dclightning.data.arithmetic import arithmetic_problems
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
    # Once more: nothing is left to do, and no engine starts.
    done = subprocess.run(command(benchmark, tmp_path / "cut"), capture_output=True, text=True, timeout=300)
    assert done.stdout == again.stdout
    other = command(benchmark, tmp_path / "cut", "--sampling.temperature", "0.9", "--seed", "1")
    refused = subprocess.run(other, capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2
    assert "holds results of another sampling, seed; name another folder" in refused.stderr
