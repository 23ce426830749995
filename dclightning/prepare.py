"""``dclightning prepare``: problems to train on, without those that had better not be, and a list of what was dropped.

Dropped are questions with conflicting answers, duplicates, benchmarks' own questions, and those that need an image.
Questions are the same if their letters and digits are, and their answers or their signs. Nothing is changed but what
"source.remove" says.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from dclightning.data.benchmarks import load_benchmarks
from dclightning.data.cleaning import faults
from dclightning.data.problems import Source, load_problems
from dclightning.errors import UserError, one_line


def main(arguments: list[str]) -> None:
    """Read problems, and write those that are good."""
    parser = ArgumentParser(prog="dclightning prepare", description=__doc__, exit_on_error=False)
    parser.add_argument("--config", action="config", help="a YAML file with these options")
    parser.add_class_arguments(Source, "source")
    parser.add_argument(
        "--benchmarks", type=list[str] | str, default=[], help="names, files, or NAME=FILE, with commas"
    )
    parser.add_argument(
        "--scripts", type=list[str] | None, default=None, help="keep these only: latin, cjk, cyrillic, …"
    )
    parser.add_argument("--output", type=Path, required=True, help="JSON lines with id, problem and answer")
    parser.add_argument(
        "--dropped", type=Path | None, default=None, help="JSON lines of what is dropped, with the reason"
    )
    try:
        options = parser.instantiate_classes(parser.parse_args(arguments[1:]))
    except (ArgumentError, ValueError) as error:
        raise UserError(one_line(error)) from error
    if options.output.resolve() == Path(options.source.path).resolve():
        raise UserError(f"--output={str(options.output)!r}: is the source; name another file")
    if options.dropped is not None and options.dropped.resolve() == options.output.resolve():
        raise UserError(f"--dropped={str(options.dropped)!r}: is the output; name another file")
    broken: list[str] = []
    problems = load_problems(options.source, "source.path", broken)
    found = faults(problems, load_benchmarks(options.benchmarks), options.scripts)
    kept = [problem for place, problem in enumerate(problems) if place not in found]
    if broken:
        print(f"{len(broken):8,} dropped: no problem ({broken[0]})", file=sys.stderr)
    for reason, count in Counter(found.values()).most_common():
        print(f"{count:8,} dropped: {reason}", file=sys.stderr)
    if not kept:
        raise UserError(f"source.path={options.source.path!r}: no problem is left")
    _write(options.output, map(vars, kept), "output")
    if options.dropped is not None:
        dropped = ({**vars(problems[place]), "reason": reason} for place, reason in found.items())
        _write(options.dropped, dropped, "dropped")
    print(f"{len(kept):8,} of {len(problems) + len(broken):,} problems are in {options.output}", file=sys.stderr)


def _write(path: Path, rows: Iterable[dict[str, Any]], field: str) -> None:
    try:
        with path.open("w", encoding="utf-8", errors="backslashreplace") as lines:
            for row in rows:
                lines.write(json.dumps(row, ensure_ascii=False) + "\n")
    except OSError as error:
        raise UserError(f"--{field}={str(path)!r}: cannot be written ({error.strerror})") from error
