"""Many runs of the command line from one process that forks: the imports take most of the time."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUNNER = """
import json, os, sys
from dclightning.__main__ import main
import dclightning.calibrate, dclightning.cli, dclightning.evaluate, dclightning.report, dclightning.toy
if sys.argv[1:] == ["engine"]:
    import vllm, vllm.v1.engine.llm_engine
for number, arguments in enumerate(json.load(sys.stdin)):
    if os.fork() == 0:
        output = os.open(f"{number}.out", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1), os.dup2(output, 2)
        sys.argv = ["dclightning", *arguments]
        main()
        sys.stdout.flush()
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def run(commands: list[str | list[str]], cwd: Path, engine: bool = True) -> list[tuple[int, str]]:
    """Exit code and output of each ``dclightning`` command.

    Args:
        commands: What follows the program's name, or lines as they are typed.
        cwd: Where they run, one after another.
        engine: Whether they use vLLM.
    """
    words = [shlex.split(c.removeprefix("dclightning ")) if isinstance(c, str) else c for c in commands]
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, *(["engine"] if engine else [])],
        input=json.dumps(words),
        cwd=cwd,
        capture_output=True,
        text=True,
        # What main would set before torch is imported, and start would before vLLM is.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        },
        timeout=600,
    )
    codes = list(map(int, done.stdout.split()))
    assert len(codes) == len(commands), done.stderr
    return [(code, (cwd / f"{number}.out").read_text()) for number, code in enumerate(codes)]
