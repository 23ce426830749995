"""Trainings that take their steps in turns, so that what else the machine does hits all of them alike."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil


def cpu_seconds() -> float:
    """User and system time of this process so far, with all its threads and the children that have ended."""
    return time.process_time() + sum(os.times()[2:4])


def cpu_seconds_of(pid: int) -> float:
    """The same of any process, with what it has started and still runs."""
    process = psutil.Process(pid)
    spent = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            spent += sum(child.cpu_times()[:4])
    return spent


_begun = time.perf_counter()


def wait_for_turn(**told: float) -> None:
    """In a training, between two steps: tell what the last one took, and wait until the next one may begin."""
    global _begun
    told |= {"cpu_s": cpu_seconds(), "wall_s": time.perf_counter() - _begun}
    print("TURN", json.dumps(told), flush=True)
    if not sys.stdin.readline():
        os._exit(0)
    _begun = time.perf_counter()


class Training:
    """A process that calls :func:`wait_for_turn` after each step."""

    def __init__(self, command: list[str], log: Path, environment: dict[str, str]) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
                start_new_session=True,
            )
        self.begun = False
        self.spent = 0.0

    def step(self) -> dict[str, Any]:
        """Let it take a step: what it told, ``cpu_s`` being of this step; of the first one, since the start."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.begun:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        self.begun = True
        for line in self.process.stdout:
            if line.startswith("TURN "):
                told: dict[str, Any] = json.loads(line.removeprefix("TURN "))
                told["cpu_s"], self.spent = told["cpu_s"] - self.spent, told["cpu_s"]
                return told
        raise RuntimeError(f"{self.process.args} ended with {self.process.wait()}: {self.log.read_text()[-2000:]}")

    def end(self) -> None:
        """Stop it, and what it has started."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
