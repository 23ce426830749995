"""``dclightning inspect``: a page of responses whose tokens are coloured by the discrepancy.

SOURCE is a file of responses as JSON lines, a run's folder, which has one for some of its rollouts, or a calibration's.
The page is one file that any browser shows; it fetches nothing.
"""

import json
import math
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentError, ArgumentParser

from dclightning.discrepancy import DiscrepancyKind, discrepancy
from dclightning.errors import UserError, one_line
from dclightning.records import Record, read_records

_OF_TOKENS = ("token_ids", "train_logprobs", "rollout_logprobs", "train_ranks", "rollout_ranks", "entropy")


def main(arguments: list[str]) -> None:
    """Write the page."""
    parser = ArgumentParser(prog="dclightning inspect", description=__doc__, exit_on_error=False)
    parser.add_function_arguments(inspect, as_positional=True)
    try:
        options = parser.parse_args(arguments[1:])
    except ArgumentError as error:
        raise UserError(one_line(error)) from error
    inspect(**options.as_dict())


def inspect(
    source: Path,
    output: Path = Path("inspection.html"),
    rollout: int | None = None,
    kind: DiscrepancyKind = "probability",
    limit: int = 200,
) -> None:
    """Write a page of responses.

    Args:
        source: A file of responses, or the folder of a run or of a calibration.
        output: Where the page goes.
        rollout: Which rollout of a run; by default the newest that there is.
        kind: Which discrepancy: probability, ratio or log.
        limit: How many responses are shown at most: those with the largest discrepancy of a token.

    Raises:
        UserError: If there are no responses, or the page cannot be written.
    """
    if limit < 1:
        raise UserError(f"limit={limit}: must be at least 1")
    file = find(source, rollout)
    if output.resolve() == file.resolve():
        raise UserError(f"output={str(output)!r}: is the file of responses; name another one")
    try:
        records = read_records(file)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"source={str(file)!r}: cannot be read ({error})") from error
    if not records:
        raise UserError(f"source={str(file)!r}: has no responses")
    html = page(records, kind, limit, title=str(file))
    try:
        output.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UserError(f"output={str(output)!r}: cannot be written ({error.strerror})") from error
    print(f"{min(limit, len(records))} of {len(records)} responses of {file} are in {output}")


def find(source: Path, rollout: int | None = None) -> Path:
    """The file of responses that a source stands for.

    Args:
        source: The file, or the folder of a run or of a calibration.
        rollout: Which rollout of a run; by default the newest that there is.

    Raises:
        UserError: If there is none.
    """
    if (source / "rollouts").is_dir():
        found = {path.stem: path for path in sorted((source / "rollouts").glob("*.jsonl"))}
        if not found:
            raise UserError(f"source={str(source)!r}: the run has kept no responses")
        name = max(found) if rollout is None else f"{rollout:06d}"
        if name not in found:
            raise UserError(f"rollout={rollout}: is none of those that were kept: {', '.join(found)}")
        return found[name]
    if rollout is not None:
        raise UserError(f"rollout={rollout}: there are several in a run's folder only, and {str(source)!r} is none")
    if source.is_file():
        return source
    if (source / "responses.jsonl").is_file():
        return source / "responses.jsonl"
    if source.is_dir():
        raise UserError(
            f"source={str(source)!r}: has neither a run's folder rollouts nor a calibration's responses.jsonl"
        )
    raise UserError(f"source={str(source)!r}: there is no such file or folder")


def page(
    records: list[Record], kind: DiscrepancyKind = "probability", limit: int = 200, title: str = "responses"
) -> str:
    """The page, as HTML.

    Args:
        records: The responses.
        kind: Which discrepancy.
        limit: How many are shown at most: those with the largest discrepancy of a token.
        title: What they are.

    Raises:
        UserError: If a response's lists do not fit its tokens, or a number is not finite.
    """
    responses = [_response(record, kind, number) for number, record in enumerate(records, start=1)]
    worst = sorted(range(len(responses)), key=lambda i: -max(responses[i]["discrepancy"], default=0.0))[:limit]
    responses = [responses[i] for i in sorted(worst)]
    data = json.dumps({"title": title, "kind": kind, "count": len(records), "responses": responses}, allow_nan=False)
    template = (files("dclightning") / "assets" / "inspection.html").read_text(encoding="utf-8")
    # The browser reads the data up to the first "</script>", and "<!--" would have it read on: JSON can do without "<".
    return template.replace("{{ data }}", data.replace("<", r"\u003c"))


def _response(record: Record, kind: DiscrepancyKind, number: int) -> dict[str, Any]:
    for name in _OF_TOKENS:
        values = getattr(record, name)
        if len(values) != len(record.tokens) and (values or name != "rollout_ranks"):
            raise UserError(f"response {number}: {name} has {len(values)} entries for {len(record.tokens)} tokens")
        if not all(map(math.isfinite, values)):
            raise UserError(f"response {number}: {name} holds a number that is not finite")
    if record.reward is not None and not math.isfinite(record.reward):
        raise UserError(f"response {number}: reward={record.reward} is not finite; what has none has null")
    deltas = discrepancy(torch.tensor(record.train_logprobs), torch.tensor(record.rollout_logprobs), kind)
    return {**asdict(record), "discrepancy": [float(f"{delta:.7g}") for delta in deltas.tolist()]}
