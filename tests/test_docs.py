"""The code in the documents, as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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
