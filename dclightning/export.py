"""``dclightning export``: a run's checkpoint to a folder that transformers and vLLM load, or peft.

With the weights go the tokenizer, the generation settings and a model card that says how the policy was trained.
"""

import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import ArgumentError, ArgumentParser
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from dclightning import __version__
from dclightning.errors import UserError, one_line
from dclightning.lora import LoRA, merge_adapters, save_adapters
from dclightning.models import from_pretrained, load_tokenizer, resolve_model
from dclightning.report import measures_of, read_scalars
from dclightning.rollout.transformers import PRECISIONS

_CARD = """---
library_name: {library}
base_model: {model}
---

# {name}

{model}, trained by [dclightning](https://arxiv.org/abs/2606.08779) {version} for {rollouts} rollouts. The {what} are
those of the training policy, in {dtype}; deployed is what an engine makes of them.

{evaluations}
The run's configuration:

```yaml
{config}```
"""


def main(arguments: list[str]) -> None:
    """Export a checkpoint."""
    parser = ArgumentParser(prog="dclightning export", description=__doc__, exit_on_error=False)
    parser.add_function_arguments(export)
    try:
        options = parser.parse_args(arguments[1:])
    except ArgumentError as error:
        raise UserError(one_line(error)) from error
    disable_progress_bar()
    export(**options.as_dict())
    print(f"The model is in {options.output}")


def export(
    checkpoint: Path, output: Path, model: str | None = None, dtype: str = "bfloat16", merge: bool = True
) -> None:
    """Write a checkpoint's policy as a folder of transformers.

    Args:
        checkpoint: A checkpoint, whole or one part for each rank, or a folder of runs, for the newest.
        output: A new folder.
        model: What was trained, by name or folder; by default what the run's config says.
        dtype: Of the weights that are written: float32, as they are trained, bfloat16 or float16.
        merge: Whether adapters are added to the model's own weights; if not, they are written alone, as peft has them.

    Raises:
        UserError: If there is no such checkpoint, or it is of another model, or the output exists.
    """
    if dtype not in PRECISIONS:
        raise UserError(f"dtype={dtype!r}: must be one of {', '.join(PRECISIONS)}")
    newest = sorted(checkpoint.rglob("last.ckpt"), key=lambda path: path.stat().st_mtime)
    found = newest[-1] if newest else checkpoint
    if not (found.is_file() or (found / "meta.pt").exists()):
        raise UserError(f"checkpoint={str(checkpoint)!r}: there is no checkpoint")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"output={str(output)!r}: exists already")
    run = found.resolve().parent.parent
    config = run / "config.yaml"
    text = config.read_text() if config.exists() else ""
    model = model or (yaml.safe_load(text) or {}).get("model", {}).get("model")
    try:
        state = _load(found)
    except (OSError, RuntimeError, pickle.UnpicklingError, KeyError) as error:
        raise UserError(f"checkpoint={str(found)!r}: is no checkpoint") from error
    if model is None:
        raise UserError(f"model: there is no {config} to say what was trained; name it")
    lora = LoRA(**state["lora"]) if "lora" in state else None
    if not merge and lora is None:
        raise UserError(f"merge=False: {found} has no adapters")
    weights = {
        name.removeprefix("model."): weight for name, weight in state["state_dict"].items() if name.startswith("model.")
    }
    if merge or lora is None:
        policy = from_pretrained(AutoModelForCausalLM, model, dtype=torch.float32)
        try:
            policy.load_state_dict(weights) if lora is None else merge_adapters(policy, weights, lora)
        except (RuntimeError, AttributeError) as error:
            reason = str(error).splitlines()[-1].strip()
            raise UserError(f"model={model!r}: is not what {found} is a checkpoint of: {reason}") from error
        policy.to(PRECISIONS[dtype]).save_pretrained(output)
    else:
        output.mkdir(parents=True, exist_ok=True)
        rounded = {name: weight.to(PRECISIONS[dtype]) for name, weight in weights.items()}
        save_adapters(rounded, lora, resolve_model(model), output)
    load_tokenizer(model).save_pretrained(output)
    rollouts = state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"]
    card = _CARD.format(
        library="transformers" if merge else "peft",
        what="weights" if merge else "adapters",
        model=model,
        name=output.name,
        version=__version__,
        rollouts=rollouts,
        dtype=dtype,
        evaluations=_evaluations(run, rollouts),
        config=text or "# not there any more\n",
    )
    (output / "README.md").write_text(card)


def _load(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint, put together if each rank wrote a part."""
    if checkpoint.is_file():
        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)  # type: ignore[no-any-return]
    with tempfile.TemporaryDirectory(dir=checkpoint.resolve().parent) as folder:
        whole = Path(folder) / "whole.ckpt"
        dcp_to_torch_save(checkpoint, whole)
        state = torch.load(whole, map_location="cpu", weights_only=True, mmap=True)
    meta = torch.load(checkpoint / "meta.pt", map_location="cpu", weights_only=True)
    return {**meta, **state}


def _evaluations(run: Path, rollouts: int) -> str:
    """A table of the last evaluation that the run logged before the checkpoint."""
    lines = []
    scalars = read_scalars(run) if run.is_dir() else {}
    for tag, benchmark, policy, metric in measures_of(scalars):
        before = [(step, value) for step, value in scalars[tag] if step <= rollouts]
        if before:
            lines.append(f"| {benchmark} | {policy} | {metric} | {before[-1][1]:.4g} | {before[-1][0]} |")
    head = ["| benchmark | policy | measure | value | after rollout |", "|---|---|---|---|---|"]
    return "\n".join([*head, *lines, ""]) if lines else ""
