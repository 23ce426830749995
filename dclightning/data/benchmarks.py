"""Benchmarks by name, with the samples to a problem that the paper evaluates on (section 5.1)."""

from dataclasses import dataclass
from pathlib import Path

from dclightning.data.problems import Problem, Source, load_problems
from dclightning.errors import UserError


@dataclass(frozen=True)
class Benchmark:
    """Where a benchmark is on the hub, and k of its avg@k."""

    source: Source
    samples: int


BENCHMARKS = {
    "aime24": Benchmark(Source("HuggingFaceH4/aime_2024"), 32),
    "aime25": Benchmark(Source("math-ai/aime25@test"), 32),
    "amc23": Benchmark(Source("math-ai/amc23@test", problem="question"), 32),
    "math500": Benchmark(Source("HuggingFaceH4/MATH-500@test", id="unique_id"), 4),
    "minerva": Benchmark(Source("math-ai/minervamath@test", problem="question"), 4),
    "olympiadbench": Benchmark(
        Source("Hothan/OlympiadBench:OE_TO_maths_en_COMP", problem="question", answer="final_answer"), 4
    ),
    "gsm8k": Benchmark(Source("openai/gsm8k:main@test", problem="question", answer_after="####"), 4),
}


def load_benchmarks(specs: str | list[str], field: str = "benchmarks") -> dict[str, list[Problem]]:
    """Benchmarks by name: ``aime24``, from the hub; ``aime24=FILE``; or ``FILE`` alone, by the file's name.

    Args:
        specs: A list of these, or a text with commas between them.
        field: The setting that named them, for messages.

    Raises:
        UserError: If there is no such benchmark or file, or a name is there twice.
    """
    loaded: dict[str, list[Problem]] = {}
    for spec in map(str.strip, specs.split(",") if isinstance(specs, str) else specs):
        name, given, path = spec.partition("=")
        if Path(spec).is_file():  # there may be an equals sign in a path
            name, given, path = spec, "", ""
        if not given and name not in BENCHMARKS:
            if not spec or (not Path(spec).exists() and "/" not in spec and "." not in spec):
                raise UserError(f"{field}={spec!r}: there is {', '.join(BENCHMARKS)}, or name a file, as {spec}=FILE")
            name, path = Path(spec).name.partition(".")[0], spec
        if not name or "/" in name:
            raise UserError(f"{field}={spec!r}: there is {', '.join(BENCHMARKS)}, or name a file, as NAME=FILE")
        if name in loaded:
            raise UserError(f"{field}={spec!r}: there are two by the name {name!r}; give one another, as NAME=FILE")
        source: str | Source = path or BENCHMARKS[name].source
        loaded[name] = load_problems(source, f"{field} {name}")
    return loaded
