"""Problems: what is asked, and the answer that counts as right."""

import json
from dataclasses import dataclass
from pathlib import Path

from dclightning.errors import UserError


@dataclass(frozen=True)
class Problem:
    """One question with its gold answer."""

    id: str
    problem: str
    answer: str


def load_problems(source: str | list[Problem], field: str = "problems") -> list[Problem]:
    """Problems from a JSONL file with the keys ``id``, ``problem`` and ``answer``, or those that ship with the package.

    Args:
        source: A path; ``dclightning/arithmetic-train`` or ``dclightning/arithmetic-test``; or the problems themselves.
        field: The setting that named the source, for messages.

    Raises:
        UserError: If there is no such file, or a line of it is no problem.
    """
    if isinstance(source, list):
        return source
    if source in ("dclightning/arithmetic-train", "dclightning/arithmetic-test"):
        from dclightning.data.arithmetic import arithmetic_problems

        return arithmetic_problems(source.rpartition("-")[2])
    path = Path(source)
    if not path.is_file():
        raise UserError(f"{field}={source!r}: no such file")
    problems = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                problem, answer = row["problem"], row["answer"]
            except (ValueError, KeyError, TypeError) as error:
                message = f"{field}={source!r}, line {number}: must be a JSON object with problem and answer"
                raise UserError(message) from error
            if not isinstance(problem, str) or isinstance(answer, bool) or not isinstance(answer, str | int | float):
                raise UserError(f"{field}={source!r}, line {number}: problem must be text, answer text or a number")
            problems.append(Problem(id=str(row.get("id", number)), problem=problem, answer=str(answer)))
    if not problems:
        raise UserError(f"{field}={source!r}: the file is empty")
    return problems
