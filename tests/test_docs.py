"""The code in the documents, as printed."""

import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from dclightning.report import read_scalars
from dclightning.rewards.equality import Conventions
from tests.commands import run
from tests.test_readme import SUBSTITUTES

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "method.md").read_text(), flags=re.DOTALL)


def test_the_metrics_work_by_themselves():
    (block,) = [block for block in BLOCKS if "Mismatch" in block]
    done = subprocess.run([sys.executable, "-c", block], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rollout_corr/kl" in done.stdout
    assert "discrepancy/p99" in done.stdout


@pytest.mark.slow
def test_a_loss_and_a_correction_of_ones_own(tmp_path):
    (block,) = [block for block in BLOCKS if "Reinforce" in block]
    (tmp_path / "mine.py").write_text(block)
    (command,) = re.findall(r"`dclightning (fit .*mine.*)`", (ROOT / "docs" / "method.md").read_text())
    small = "--data.prompts_per_step 4 --data.validation_limit 4 --trainer.limit_train_batches 1"
    words = [str(ROOT / word) if word.startswith("configs/") else word for word in f"{command} {small}".split()]
    done = subprocess.run(
        [sys.executable, "-m", "dclightning", *words], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    config = (tmp_path / "runs" / "quickstart" / "version_0" / "config.yaml").read_text()
    assert "mine.Reinforce" in config
    assert "mine.LikelyOnly" in config


@pytest.mark.slow
def test_a_calibration_from_python_as_printed(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "precision.md").read_text(), flags=re.DOTALL)
    (parts,) = re.findall(r"```python\n(.*?)trainer.fit", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    for printed, smaller in SUBSTITUTES.items():
        parts = parts.replace(printed, smaller)
    code = f"from pathlib import Path\nfrom dclightning import Sampling\n{parts}\n{code}"
    code = code.replace("rollouts=4", "rollouts=1, positions=8")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "'budget': 0.00" in done.stdout
    assert (tmp_path / "calibration" / "budget.yaml").exists()


def rewards_blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "docs" / "rewards.md").read_text(), flags=re.DOTALL)


@pytest.mark.slow
def test_rewards_of_ones_own(tmp_path):
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (code,), (as_config,), commands = (rewards_blocks(language) for language in ("python", "yaml", "bash"))
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "mine.yaml").write_text(as_config)
    (tmp_path / "responses.jsonl").write_text('{"answer": "5", "response": "5"}')
    small = "--data.prompts_per_step 4 --data.validation_limit 4 --trainer.limit_train_batches 1"
    fit, score = (command.strip() for command in commands)
    commands = [f"{fit} {small}", score, f"dclightning fit --config configs/quickstart.yaml --config mine.yaml {small}"]
    for command, (code, output) in zip(commands, run(commands, tmp_path), strict=True):
        assert code == 0, f"{command}\n{output}"
    for version, names in enumerate([("brief", "judged", "format"), ("brief", "judged", "format", "repetition")]):
        scalars = read_scalars(tmp_path / "runs" / "quickstart" / f"version_{version}")
        assert {f"reward/{name}" for name in ("MathReward", *names)} <= set(scalars)


def test_the_table_of_conventions_is_complete():
    rows = re.findall(r"^\| `(\w+)` \| (yes|no) \|", (ROOT / "docs" / "rewards.md").read_text(), flags=re.MULTILINE)
    assert {name: default == "yes" for name, default in rows} == asdict(Conventions())
    verdicts = (ROOT / "tests" / "data" / "math_verdicts.jsonl").read_text().splitlines()
    assert f"holds {len(verdicts)} judged pairs" in (ROOT / "docs" / "rewards.md").read_text()


def test_problems_are_cleaned_as_printed(tmp_path):
    (command,) = [command for command in data_commands() if " prepare " in command]
    for name in ("raw", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"problem": "{name}", "answer": 5}}')
    done = subprocess.run(f"{sys.executable} -m {command}", shell=True, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 of 1 problems are in clean.jsonl" in done.stderr


def data_commands():
    return re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / "data.md").read_text(), flags=re.DOTALL)


@pytest.mark.slow
def test_a_run_is_exported_and_evaluated_as_printed(tmp_path):
    evaluate, export = (command.strip() for command in data_commands() if " prepare " not in command)
    (tmp_path / "held_out.jsonl").write_text('{"problem": "What is 1 + 1?", "answer": 2}\n' * 3)
    small = "--data.prompts_per_step 4 --data.validation_limit 4 --trainer.limit_train_batches 1"
    fit = f"dclightning fit --config {ROOT}/configs/quickstart.yaml {small}"
    exported = evaluate.replace("dclightning/tiny-arithmetic", "exported")
    commands = [fit, export, exported]
    for command, (code, output) in zip(commands, run(commands, tmp_path), strict=True):
        assert code == 0, f"{command}\n{output}"
    assert "exported-plain - exported" in output
    assert "sums: 3 problems, 4 responses to each" in output
