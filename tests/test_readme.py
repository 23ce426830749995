"""The README's commands and its code, as printed, but shorter."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SMALLER = "--data.prompts_per_step 4 --data.group_size 4 --data.validation_limit 2 --trainer.limit_train_batches 2"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_two_scripts_are_what_ci_runs():
    scripts = [line for block in blocks("bash") for line in block.splitlines() if line.startswith("bin/")]
    assert scripts == ["bin/quickstart", "bin/test"]
    ci = (ROOT / ".ci" / "run").read_text()
    for script in scripts:
        assert os.access(ROOT / script, os.X_OK)
        assert script in ci


def test_every_file_that_is_named_exists():
    for path in re.findall(r"`((?:configs|dclightning|callbacks|docs|bin|examples)/[\w./-]*)", README):
        assert (ROOT / path).exists(), path


@pytest.mark.slow
def test_every_command_runs(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "mine.py").write_text(
        "import lightning as L\n"
        "class Callback(L.Callback):\n    pass\n"
        "def reward(problems, completions):\n    return [len(c.text) for c in completions]\n"
    )
    (tmp_path / "responses.jsonl").write_text('{"answer": "5", "response": "5"}')
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("dclightning")]
    assert len(commands) == 14
    for i, command in enumerate(commands):
        if "--config" in command:
            commands[i] += f" {SMALLER}" + (" --rollouts 1 --positions 8" if " calibrate " in command else "")
    for command, (code, output) in zip(commands, run(commands, tmp_path), strict=True):
        assert code == 0, f"{command}\n{output}"
    (board,) = [line for line in lines if line.startswith("tensorboard")]
    board = f"{Path(sys.executable).parent}/{board} --inspect"  # the same, without the server
    done = subprocess.run(board, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "lagrangian/multiplier" in done.stdout


SUBSTITUTES = {
    '"Qwen/Qwen3-8B"': '"dclightning/tiny-arithmetic", mini_batches=2',
    '"dapo_math_17k.jsonl"': '"dclightning/arithmetic-train", prompts_per_step=4, sampling=Sampling(max_tokens=40)',
    'quantization="fp8"': 'quantization="fp8_per_channel", dtype="bfloat16", kv_cache_gib=0.0625',
    "max_epochs=1,": "max_epochs=1, limit_train_batches=2, accelerator='cpu', devices=1, logger=False,"
    "enable_checkpointing=False,",
}


@pytest.mark.slow
def test_the_code_composes_as_printed(tmp_path):
    (code,) = blocks("python")
    for printed, smaller in SUBSTITUTES.items():
        assert code.count(printed) == 1
        code = code.replace(printed, smaller)
    code = f"from dclightning import Sampling\n{code}\nc = trainer.callbacks[1]\nprint(*c.history, c.multiplier)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    history = [float(word) for word in done.stdout.split()[-3:]]
    assert history[0] == 0.1
    assert len(set(history)) == 3
