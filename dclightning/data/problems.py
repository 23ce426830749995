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


def load_problems(source: str | list[Problem]) -> list[Problem]:
    """Problems from a JSONL file with the keys ``id``, ``problem`` and ``answer``, or those that ship with the package.

    Args:
        source: A path; ``dclightning/arithmetic-train`` or ``dclightning/arithmetic-test``; or the problems themselves.

    Raises:
        UserError: If there is no such file, or a line of it is no problem.
    """
    if isinstance(source, list):
        return source
    if source.startswith("dclightning/arithmetic-"):
        from dclightning.data.arithmetic import arithmetic_problems

        return arithmetic_problems(source.rpartition("-")[2])
    path = Path(source)
    if not path.is_file():
        raise UserError(f"problems={source!r}: no such file")
    problems = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            problems.append(Problem(id=str(row.get("id", number)), problem=row["problem"], answer=str(row["answer"])))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"problems={source!r}, line {number}: must be a JSON object with problem and answer ({error!r})"
            ) from error
    if not problems:
        raise UserError(f"problems={source!r}: the file is empty")
    return problems
