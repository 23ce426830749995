"""The benchmarks run; what they measure is not asserted."""

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
