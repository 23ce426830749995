"""``dclightning evaluate``: policies on benchmarks, sampled as they are deployed.

Every engine samples from every model. Finished problems are kept with all their responses: the same command goes on
where it was interrupted. With several policies, the differences to the first are those of each problem.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from jsonargparse import ArgumentError, ArgumentParser
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from dclightning.accuracy import interval
from dclightning.data.benchmarks import BENCHMARKS, load_benchmarks
from dclightning.data.problems import Problem
from dclightning.errors import UserError, one_line
from dclightning.evaluation import Evaluated, evaluated, from_line, measures, to_line
from dclightning.identity import glance
from dclightning.models import load_tokenizer, longest_context, resolve_model
from dclightning.rewards.math import MathReward
from dclightning.rewards.scoring import Scorer
from dclightning.rollout.engine import RolloutEngine
from dclightning.rollout.responses import encode_prompt, respond
from dclightning.rollout.types import Sampling
from dclightning.rollout.vllm import VLLMEngine
from dclightning.seeds import derive_seed

Results = dict[str, list[Evaluated]]
"""By benchmark."""


def main(arguments: list[str]) -> None:
    """Evaluate and print the tables."""
    from dclightning.cli import catch_logs

    parser = ArgumentParser(prog="dclightning evaluate", description=__doc__, exit_on_error=False)
    parser.add_argument("--config", action="config", help="a YAML file with these options")
    parser.add_function_arguments(evaluate)
    classes = {"engine": "dclightning.VLLMEngine", "reward": "dclightning.MathReward"}
    parser.set_defaults({name: {"class_path": path} for name, path in classes.items()})
    catch_logs()
    try:
        options = parser.instantiate_classes(parser.parse_args(arguments[1:])).as_dict()
    except (ArgumentError, ValueError, TypeError) as error:
        raise UserError(one_line(error)) from error
    options.pop("config")
    show(evaluate(**options))
    print(f"All responses are in {options['output']}")


def evaluate(
    model: str,
    benchmarks: str | list[str],
    engine: RolloutEngine = VLLMEngine(),
    other_engines: dict[str, RolloutEngine] | None = None,
    reward: MathReward = MathReward(),
    sampling: Sampling = Sampling(max_tokens=32768, temperature=0.7),
    samples: int | None = None,
    limit: int | None = None,
    system_prompt: str | None = None,
    prompt_template: str = "{problem}",
    chat_template_options: dict[str, Any] | None = None,
    seed: int = 0,
    at_once: int = 512,
    output: Path = Path("evaluations"),
) -> dict[str, Results]:
    """Sample and score responses to benchmarks' problems, or read them where that is done.

    Args:
        model: Names or folders, or NAME=FOLDER, with commas between them.
        benchmarks: Names (aime24, from the hub), files, or NAME=FILE, with commas between them.
        engine: Samples.
        other_engines: More engines by name, that sample from the same models.
        reward: Judges the responses.
        sampling: How responses are drawn.
        samples: Responses to a problem, k of avg@k; by default the paper's for the benchmark, and 1 for others.
        limit: Use only so many problems of each benchmark.
        system_prompt: Goes before each problem as a system message.
        prompt_template: Turns the problem into the user's message; ``{problem}`` stands for it.
        chat_template_options: What the tokenizer's chat template takes besides, such as ``enable_thinking``.
        seed: Decides every sampled token.
        at_once: Responses that are sampled before they are kept; more are faster, and lost at an interruption.
        output: Folder of the results: for each policy and benchmark JSON lines, one for each problem.

    Returns:
        The results of each policy, by its name.

    Raises:
        UserError: If something cannot be loaded, or the folder has results of other settings.
    """
    for name, number in (("samples", samples), ("limit", limit), ("at_once", at_once)):
        if number is not None and number < 1:
            raise UserError(f"{name}={number}: must be at least 1")
    loaded = {name: problems[:limit] for name, problems in load_benchmarks(benchmarks).items()}
    counts = {name: samples or (BENCHMARKS[name].samples if name in BENCHMARKS else 1) for name in loaded}
    for name, count in counts.items():
        if count > 1 and sampling.temperature == 0:
            raise UserError(f"samples={count} ({name}): at temperature 0 all are the same; set samples to 1")
    if "{problem}" not in prompt_template:
        raise UserError(f"prompt_template={prompt_template!r}: must contain {{problem}}")
    policies: dict[str, tuple[str, RolloutEngine]] = {}
    for label, sampler in {"": engine, **(other_engines or {})}.items():
        for spec in model.split(","):
            given, named, path = spec.partition("=")
            path = path if named else spec
            if (Path(path) / "checkpoints").is_dir():
                raise UserError(f"model={path!r}: is a run; dclightning export makes a model of it")
            name = "-".join(part for part in (given if named else Path(path).name, label) if part)
            if name in policies:
                raise UserError(f"model={model!r}: two policies have the name {name!r}; say NAME=FOLDER")
            policies[name] = path, sampler
    prompting = (system_prompt, prompt_template, chat_template_options)
    tokenizers, prompts, longest = {}, {}, {}
    for path in dict.fromkeys(path for path, _ in policies.values()):  # what is wrong is said before all sampling
        tokenizer = tokenizers[path] = load_tokenizer(path)
        prompts[path] = {name: [encode_prompt(tokenizer, p, *prompting) for p in some] for name, some in loaded.items()}
        longest[path] = max(len(ids) for some in prompts[path].values() for ids in some) + sampling.max_tokens
        if longest[path] > (most := longest_context(path)):
            needed = f"the longest prompt and response make {longest[path]} tokens, model={path!r} takes {most}"
            raise UserError(f"sampling.max_tokens={sampling.max_tokens}: {needed}")
    found = {}
    with _progress(len(policies) * sum(counts[name] * len(problems) for name, problems in loaded.items())) as told:
        for name, (path, sampler) in policies.items():
            of_model = (path, tokenizers[path], prompts[path], longest[path])
            found[name] = _evaluate_policy(
                *of_model, sampler, loaded, counts, reward, sampling, seed, at_once, output / name, told
            )
    return found


def _evaluate_policy(
    model: str,
    tokenizer: Any,
    prompts: dict[str, list[list[int]]],
    longest: int,
    engine: RolloutEngine,
    benchmarks: dict[str, list[Problem]],
    samples: dict[str, int],
    reward: MathReward,
    sampling: Sampling,
    seed: int,
    at_once: int,
    folder: Path,
    told: Callable[[int], None],
) -> Results:
    scorer = Scorer({"reward": reward})
    found: Results = {}
    try:
        for name, problems in benchmarks.items():
            k = samples[name]
            # What is sampled together decides what is sampled: it must be the same after an interruption.
            size = max(1, at_once // k)
            settings = {
                "model": _identity(model),
                "engine": _settings(engine),
                "reward": _settings(reward),
                "sampling": asdict(sampling),
                "samples": k,
                "prompts": sha256(repr(prompts[name][0]).encode()).hexdigest(),
                "seed": seed,
                "at_once": at_once,
            }
            with _kept(folder / f"{name}.jsonl", settings, size, problems) as (results, file):
                told(len(results) * k)
                for start in range(len(results), len(problems), size):
                    engine.start(resolve_model(model), longest)  # unless it is running
                    chunk, asked = problems[start : start + size], prompts[name][start : start + size]
                    chunk_seed = derive_seed(seed, "evaluate", name, start)
                    answers = respond(engine, tokenizer, chunk, asked, scorer, sampling, k, chunk_seed, told)
                    fresh = evaluated(chunk, *answers, reward)
                    file.writelines(map(to_line, fresh))
                    file.flush()
                    results += fresh
            found[name] = results
    finally:
        engine.close()
        scorer.close()
    return found


@contextmanager
def _kept(
    file: Path, settings: dict[str, Any], size: int, problems: list[Problem]
) -> Iterator[tuple[list[Evaluated], BinaryIO]]:
    """The results that are kept in a file, as far as they are complete, and the file, open to take more.

    Raises:
        UserError: If they were found with other settings.
    """
    beside = file.with_suffix(".settings.json")
    if beside.exists() and file.exists() and file.stat().st_size:
        before = json.loads(beside.read_text())
        changed = [key for key in settings if before.get(key) != settings[key]]
        if changed:
            was, now = (str(some.get(changed[0])) for some in (before, settings))
            values = f" ({was}, now {now})" if len(was + now) < 60 else ""
            raise UserError(
                f"output: {file} holds results of another {' and '.join(changed)}{values}; name another folder, or "
                "remove it"
            )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        whole = beside.with_suffix(".tmp")
        whole.write_text(json.dumps(settings, indent=2))
        whole.replace(beside)
        file.touch()
    except OSError as error:
        raise UserError(f"output={str(file.parent)!r}: cannot be written ({error.strerror})") from error
    lines = [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    complete = lines[: len(problems)] if len(lines) >= len(problems) else lines[: len(lines) // size * size]
    results = list(map(from_line, complete))
    if [result.problem for result in results] != problems[: len(results)]:
        raise UserError(f"output: {file} holds results of other problems; name another folder, or remove it")
    with file.open("r+b") as opened:
        if len(lines) < len(problems):  # more are left where they are, for a smaller limit loses nothing
            opened.truncate(sum(map(len, complete)))
        opened.seek(0, os.SEEK_END)
        yield results, opened


def _settings(part: object) -> list[Any]:
    """A class and the arguments of an object, as JSON would give them back."""
    public = {key: value for key, value in vars(part).items() if key[0] != "_" and key not in _COUNTERS}
    return json.loads(json.dumps([type(part).__qualname__, public], default=vars))  # type: ignore[no-any-return]


_COUNTERS = ("version", "timeouts", "errors")


def _identity(model: str) -> list[Any]:
    """A model's name; of a folder also what is in it, for that may be another tomorrow."""
    folder = Path(resolve_model(model))
    weights = sorted([*folder.glob("*.safetensors"), *folder.glob("*config.json")]) if folder.is_dir() else []
    return [str(Path(model)), *([file.name, glance(file)] for file in weights)]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int], None]]:
    columns = TextColumn("responses"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("responses", total=total)
        yield lambda count: progress.advance(task, count)


def show(results: dict[str, Results]) -> None:
    """Print what was measured, with 95 % intervals over problems, and how far each policy is from the first."""
    console = Console() if sys.stdout.isatty() else Console(width=200)
    first, *others = results
    for benchmark, some in results[first].items():
        k = len(some[0].responses)
        table = Table(title=f"{benchmark}: {len(some)} problems, {k} responses to each", title_justify="left")
        for column in ("", *results, *(f"{name} - {first}" for name in others)):
            table.add_column(column)
        measured = [measures(found[benchmark], k, majority=True) for found in results.values()]
        for metric in measured[0]:
            cells = [_with_interval(values[metric]) for values in measured]
            gaps = [_with_interval(values[metric] - measured[0][metric], sign="+") for values in measured[1:]]
            table.add_row(metric, *cells, *gaps)
        console.print(table)


def _with_interval(values: Tensor, sign: str = "") -> str:
    mean, (low, high) = float(values.mean()), interval(values)
    style = f"{sign}.1f" if abs(mean) >= 10 else f"{sign}.3f"
    return f"{mean:{style}} ({low:{style}}, {high:{style}})"
