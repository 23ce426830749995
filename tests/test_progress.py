"""The bar on a terminal, and the lines where there is none."""

import io

import pytest
from rich.console import Console

from dclightning.callbacks import LagrangianCallback, RolloutProgress
from dclightning.phases import phases
from tests.helpers import random_rollout, train


def watched(terminal):
    progress = RolloutProgress(lines=2)
    progress.console = Console(file=io.StringIO(), force_terminal=terminal, width=160)
    stages = []
    progress._show_stage = lambda phase, show=progress._show_stage: (stages.append(phase), show(phase))
    train([random_rollout([3, 5], seed=i, version=i) for i in range(4)], [progress, LagrangianCallback()])
    return progress.console.file.getvalue(), stages


def test_a_terminal_sees_stage_count_and_values():
    shown, stages = watched(terminal=True)
    assert stages == ["score", "update"] * 4
    for text in ("updating", "4/4", "rollouts", "reward", "δ̄", "λ 0."):
        assert text in shown
    assert phases.listener is None


def test_elsewhere_there_are_lines():
    shown, stages = watched(terminal=False)
    assert [line.split()[1] for line in shown.splitlines()] == ["1/4", "2/4", "4/4"]
    assert "λ 0.1" in shown
    assert not stages


def test_phases_add_up_until_they_are_taken():
    phases.take()
    for _ in range(2):
        with phases("rollout"):
            pass
    with pytest.raises(KeyError), phases("update"):
        raise KeyError
    assert set(phases.take()) == {"rollout", "update"}
    assert phases.take() == {}
