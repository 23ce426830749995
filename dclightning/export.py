"""``dclightning export``: a run's checkpoint to a folder that transformers and vLLM load.

With the weights go the tokenizer, the generation settings and a model card that says how the policy was trained.
"""

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
from dclightning.errors import UserError
from dclightning.models import from_pretrained, load_tokenizer
from dclightning.report import read_scalars

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

_CARD = """---
library_name: transformers
base_model: {model}
---

# {name}

{model}, trained by [dclightning](https://arxiv.org/abs/2606.08779) {version} for {rollouts} rollouts. The weights are
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
        raise UserError(" ".join(str(error).split())) from error
    disable_progress_bar()
    export(**options.as_dict())
    print(f"The model is in {options.output}")


def export(checkpoint: Path, output: Path, model: str | None = None, dtype: str = "bfloat16") -> None:
    """Write a checkpoint's policy as a folder of transformers.

    Args:
        checkpoint: A checkpoint, whole or one part for each rank, or a run's folder, for its last one.
        output: A new folder.
        model: What was trained, by name or folder; by default what the run's config says.
        dtype: Of the weights that are written: float32, as they are trained, bfloat16 or float16.

    Raises:
        UserError: If there is no such checkpoint, or it is of another model, or the output exists.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r}: must be one of {', '.join(DTYPES)}")
    found = checkpoint / "checkpoints" / "last.ckpt" if (checkpoint / "checkpoints").is_dir() else checkpoint
    if not found.exists():
        raise UserError(f"checkpoint={str(checkpoint)!r}: there is no checkpoint")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"output={str(output)!r}: exists already")
    run = found.resolve().parent.parent
    config = run / "config.yaml"
    settings = yaml.safe_load(config.read_text()) if config.exists() else {}
    model = model or settings.get("model", {}).get("model")
    if model is None:
        raise UserError(f"model: there is no {config} to say what was trained; name it")
    state = _load(found)
    policy = from_pretrained(AutoModelForCausalLM, model, dtype=torch.float32)
    weights = {name.removeprefix("model."): weight for name, weight in state["state_dict"].items()}
    try:
        policy.load_state_dict(weights)
    except RuntimeError as error:
        raise UserError(
            f"model={model!r}: is not what {found} is a checkpoint of: {str(error).splitlines()[1]}"
        ) from error
    policy.to(DTYPES[dtype]).save_pretrained(output)
    load_tokenizer(model).save_pretrained(output)
    card = _CARD.format(
        model=model,
        name=output.name,
        version=__version__,
        rollouts=state["loops"]["fit_loop"]["epoch_loop.batch_progress"]["total"]["processed"],
        dtype=dtype,
        evaluations=_evaluations(run),
        config=config.read_text() if config.exists() else "# not there any more\n",
    )
    (output / "README.md").write_text(card)


def _load(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint, put together if each rank wrote a part."""
    if checkpoint.is_file():
        return torch.load(checkpoint, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    with tempfile.TemporaryDirectory(dir=checkpoint.resolve().parent) as folder:
        whole = Path(folder) / "whole.ckpt"
        dcp_to_torch_save(checkpoint, whole)
        state = torch.load(whole, map_location="cpu", weights_only=True)
    meta = torch.load(checkpoint / "meta.pt", map_location="cpu", weights_only=True)
    return {**meta, **state}


def _evaluations(run: Path) -> str:
    """A table of the last evaluation that the run logged."""
    scalars = read_scalars(run)
    rows = [tag.split("/") for tag in scalars if tag.startswith("val/") and tag.count("/") == 3]
    lines = [
        f"| {benchmark} | {policy} | {metric} | {scalars[f'val/{benchmark}/{policy}/{metric}'][-1][1]:.4g} |"
        for _, benchmark, policy, metric in rows
    ]
    return (
        "\n".join(["| benchmark | policy | measure | last value |", "|---|---|---|---|", *lines, ""]) if lines else ""
    )
