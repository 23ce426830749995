"""Problems: what is asked, and the answer that counts as right; from files, the hub, and the package."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from dclightning.errors import UserError
from dclightning.hub import hub_answers

_FORMATS = (".jsonl", ".json", ".parquet", ".arrow")


@dataclass(frozen=True)
class Problem:
    """One question with its gold answer."""

    id: str
    problem: str
    answer: str


@dataclass(frozen=True)
class Source:
    """Where problems are, and what their fields are called there.

    Attributes:
        path: A ``.jsonl``, ``.json``, ``.parquet`` or ``.arrow`` file; a dataset of the hub as ``owner/name``, with
            ``:subset`` and ``@split`` behind it where they are not the default and ``train``; or the name of problems
            that ship with the package.
        problem: The field with the question. Dots lead into nested ones: ``prompt.0.content``.
        answer: The field with the gold answer: text, a number, or a list of them.
        id: The field with the identifier; rows that have none are numbered from 1.
        answer_after: The answer is what follows the last occurrence of this: ``####`` in GSM8K.
        remove: Texts that are cut out of every question, such as instructions.
    """

    path: str
    problem: str = "problem"
    answer: str = "answer"
    id: str = "id"
    answer_after: str = ""
    remove: tuple[str, ...] = ()


def load_problems(
    source: str | Source | list[Problem], field: str = "problems", broken: list[str] | None = None
) -> list[Problem]:
    """Problems from a file, the hub or the package.

    Args:
        source: Where they are; a path alone if its fields have the usual names; or the problems themselves.
        field: The setting that named the source, for messages.
        broken: Takes what is wrong with rows that are no problems, which are left out then.

    Raises:
        UserError: If there are none, or a row is no problem.
    """
    if isinstance(source, list):
        return source
    source = Source(source) if isinstance(source, str) else source
    if source.path in ("dclightning/arithmetic-train", "dclightning/arithmetic-test"):
        from dclightning.data.arithmetic import arithmetic_problems

        return arithmetic_problems(source.path.rpartition("-")[2])
    problems = []
    for place, number, row in _rows(source.path, field):
        try:
            problems.append(_problem(row, number, source))
        except (LookupError, TypeError, ValueError) as error:
            if broken is None:
                raise UserError(f"{field}={source.path!r}, {place} {number}: {error}") from error
            broken.append(f"{place} {number}: {error}")
    if not problems:
        first = f": {broken[0]}" if broken else ""
        raise UserError(f"{field}={source.path!r}: there are no problems in it{first}")
    return problems


def _problem(row: Any, number: int, source: Source) -> Problem:
    if isinstance(row, ValueError):
        raise row
    if not isinstance(row, dict):
        raise TypeError("must be an object with a problem and an answer")
    problem, answer = _at(row, source.problem), _at(row, source.answer)
    if not isinstance(problem, str):
        raise TypeError(f"{source.problem} must be text")
    answers = answer if isinstance(answer, list) else [answer]
    for some in answers:
        if isinstance(some, bool) or not isinstance(some, str | int | float | Decimal) or some != some:
            raise TypeError(f"{source.answer} must be text or a number")
    answer = ", ".join(map(str, answers))
    if source.answer_after:
        _, found, answer = answer.rpartition(source.answer_after)
        if not found:
            raise ValueError(f"{source.answer} must contain {source.answer_after!r}")
        answer = answer.strip()
    for text in source.remove:
        problem = problem.replace(text, "")
    for name, text in ((source.problem, problem), (source.answer, answer)):
        if not text.strip():
            raise ValueError(f"{name} is empty")
    try:
        identifier = _at(row, source.id)
    except LookupError:
        identifier = None
    return Problem(
        str(number if identifier is None else identifier), problem.strip() if source.remove else problem, answer
    )


def _at(row: Any, path: str) -> Any:
    """What is in a field, or in a nested one."""
    if isinstance(row, dict) and path in row:
        return row[path]
    for key in path.split("."):
        try:
            row = row[int(key) if isinstance(row, list) else key]
        except (LookupError, TypeError, ValueError):
            raise LookupError(f"has no field {path}") from None
    return row


def _rows(path: str, field: str) -> Iterator[tuple[str, int, Any]]:
    """What a row is called there, its number, and the row."""
    file = Path(path)
    if file.suffix in _FORMATS or file.exists():
        if not file.is_file():
            raise UserError(f"{field}={path!r}: no such file")
        if file.suffix == ".jsonl":
            yield from _json_lines(file)
            return
        rows = _READERS.get(file.suffix)
        if rows is None:
            raise UserError(f"{field}={path!r}: must be a file of the type {', '.join(_FORMATS)}")
        try:
            yield from (("row", number, row) for number, row in enumerate(rows(file), start=1))
        except (ValueError, OSError) as error:
            raise UserError(f"{field}={path!r}: cannot be read: {' '.join(str(error).split())[:200]}") from error
    elif path.count("/") == 1 and not path.startswith((".", "/")):
        yield from (("row", number, row) for number, row in enumerate(_hub_rows(path, field), start=1))
    else:
        raise UserError(f"{field}={path!r}: no such file")


def _json_lines(file: Path) -> Iterator[tuple[str, int, Any]]:
    with file.open("rb") as lines:  # only line feeds end a line
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    row = error
                yield "line", number, row


def _json(file: Path) -> list[Any]:
    rows = json.loads(file.read_bytes())
    if not isinstance(rows, list):
        raise ValueError("must be a list of objects")
    return rows


def _parquet(file: Path) -> Iterator[Any]:
    from pyarrow.parquet import ParquetFile

    for batch in ParquetFile(file).iter_batches():
        yield from batch.to_pylist()


def _arrow(file: Path) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(file)) as stored:
        try:
            table = pyarrow.ipc.open_stream(stored).read_all()
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_file(stored).read_all()
        yield from table.to_pylist()


_READERS = {".json": _json, ".parquet": _parquet, ".arrow": _arrow}


def _hub_rows(path: str, field: str) -> Iterator[Any]:
    import datasets

    name, _, split = path.partition("@")
    name, _, subset = name.partition(":")
    online, before = hub_answers(), datasets.config.HF_HUB_OFFLINE
    if not online:  # what was downloaded before can be had; to try anything else would take a while
        datasets.config.HF_HUB_OFFLINE = True
    try:
        rows = datasets.load_dataset(name, subset or None, split=split or "train")
    except Exception as error:  # of a dozen kinds
        reason = " ".join(str(error).split())[:200] if online else "the hub cannot be reached"
        raise UserError(
            f"{field}={path!r}: no such file, and no dataset of the hub ({reason}); "
            "without a network pass a file, such as problems.jsonl"
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before
    yield from rows
