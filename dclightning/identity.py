"""Whether two machines, or two days, have the same model."""

import json
from hashlib import sha256
from pathlib import Path

from transformers import AutoConfig

from dclightning.models import from_pretrained, resolve_model


def architecture(name: str) -> str:
    """A hash of what a model's config says of its computation: the same on machines with different folders."""
    config = from_pretrained(AutoConfig, name).to_dict()
    for key in ("_name_or_path", "transformers_version", "dtype"):
        config.pop(key, None)
    return sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()


def fingerprint(name: str) -> str:
    """A hash of a model's weight files, if it is a folder, or else its name."""
    folder = Path(resolve_model(name))
    if not folder.is_dir():
        return name
    return sha256("".join(map(glance, sorted(folder.glob("*.safetensors")))).encode()).hexdigest()


def glance(file: Path) -> str:
    """A hash of a file's size and of 1 KiB of each MiB of it, or of as many places if it is smaller than 4 GiB."""
    size = file.stat().st_size
    found, stride = sha256(repr(size).encode()), min(2**20, max(2**10, size // 2**12))
    with file.open("rb") as opened:
        for place in range(0, size, stride):
            opened.seek(place)
            found.update(opened.read(2**10))
    return found.hexdigest()
