"""``dclightning score``: verdicts on responses in a file, whatever sampled them.

FILE has a JSON object with "answer" (the gold one) and "response" on each line. Each is written again with what was
found, under keys that may be there before: "extracted", the answer that the response gives, "correct", and "reason".
"""

import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from jsonargparse import ArgumentError, ArgumentParser

from dclightning.errors import UserError, one_line
from dclightning.rewards.math import MathReward

_AT_ONCE = 1000  # rows, which are all that is in memory


def main(arguments: list[str]) -> None:
    """Score a file and write the verdicts."""
    parser = ArgumentParser(prog="dclightning score", description=__doc__, exit_on_error=False)
    parser.add_argument("file", type=Path, help="JSON lines with the keys answer and response")
    parser.add_argument("--output", type=Path, help="where the verdicts go; the standard output by default")
    parser.add_class_arguments(MathReward, None)
    try:
        options = parser.instantiate_classes(parser.parse_args(arguments[1:])).as_dict()
        source, output = options.pop("file"), options.pop("output")
        reward = MathReward(**options)
    except (ArgumentError, ValueError) as error:
        raise UserError(one_line(error)) from error
    if not source.is_file():
        raise UserError(f"file={str(source)!r}: no such file")
    if output is not None and output.resolve() == source.resolve():
        raise UserError(f"--output={str(output)!r}: is the file to be scored; name another one")
    for _ in read(source):  # what is wrong with a line is said before anything is scored
        pass
    try:
        # Half a surrogate pair, which JSON can hold and UTF-8 cannot, is written as JSON has it.
        with open(output or os.dup(1), "w", encoding="utf-8", errors="backslashreplace") as target:
            print(score(reward, source, target), file=sys.stderr)
    except BrokenPipeError:  # `| head` has seen enough
        pass
    except OSError as error:
        raise UserError(f"{output or 'the standard output'}: cannot be written ({error.strerror})") from error


def score(reward: MathReward, source: Path, target: TextIO) -> str:
    """Write each row of the source with its verdict to the target; returns a summary."""
    rows, count, right, silent = read(source), 0, 0, 0
    try:
        while batch := list(islice(rows, _AT_ONCE)):
            responses = [row["response"] for row in batch]
            verdicts = reward.verdicts([str(row["answer"]) for row in batch], responses)
            for row, response, verdict in zip(batch, responses, verdicts, strict=True):
                found = {"extracted": reward.answer(response), "correct": verdict.equal, "reason": verdict.reason}
                target.write(json.dumps({**row, **found}, ensure_ascii=False) + "\n")
                count, right, silent = count + 1, right + verdict.equal, silent + (found["extracted"] is None)
    finally:
        reward.close()
    return (
        f"{right} of {count} responses are right, {right / count:.2%}; {silent} give no answer, "
        f"{reward.timeouts} took too long, {reward.errors} failed"
    )


def read(source: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file.

    Raises:
        UserError: If a line is no JSON object with an answer and a response, or there is none.
    """
    empty = True
    with source.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = _row(line)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                reason = f"{error} is missing" if isinstance(error, KeyError) else error
                raise UserError(f"file={str(source)!r}, line {number}: {reason}") from error
            empty = False
            yield row
    if empty:
        raise UserError(f"file={str(source)!r}: the file is empty")


def _row(line: bytes) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError("must be a JSON object")
    if not isinstance(row["response"], str):
        raise TypeError("response must be text")
    if isinstance(row["answer"], bool) or not isinstance(row["answer"], str | int | float):
        raise TypeError("answer must be text or a number")
    return row
