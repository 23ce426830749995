"""LoRA: a small product beside each linear layer is trained, and the model stays as its files have it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from dclightning.errors import UserError
from dclightning.seeds import derive_seed
from dclightning.strategies import whole

_A, _B = ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass(frozen=True)
class LoRA:
    """Adapters: a layer computes W x + (alpha / rank) B A x, and only A and B are trained.

    At first B is zero. There is no dropout, so that old log-probs and the update are the same computation.
    """

    rank: int = 16
    """Rows of A, and columns of B."""
    alpha: float = 32.0
    """The adapters count alpha / rank."""
    target_modules: list[str] | Literal["all-linear"] = "all-linear"
    """Which linear layers have adapters: all but the head, or those of some names, such as ``[q_proj, v_proj]``. The
    experts of a mixture are no linear layers, and have none."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank}: must be at least 1")
        if not self.alpha > 0:
            raise ValueError(f"lora.alpha={self.alpha}: must be positive")
        if self.target_modules != "all-linear" and not isinstance(self.target_modules, list):
            raise ValueError(f"lora.target_modules={self.target_modules!r}: must be all-linear, or a list of names")

    @property
    def scale(self) -> float:
        """What B A counts."""
        return self.alpha / self.rank


def check_adapters(lora: LoRA | None, tensor_parallel_size: int) -> None:
    """Refuse adapters beside layers that are cut."""
    if lora is not None and tensor_parallel_size > 1:
        raise UserError(f"tensor_parallel_size={tensor_parallel_size}: must be 1 with model.lora")


def add_adapters(model: Any, lora: LoRA, seed: int) -> None:
    """Put adapters beside a model's linear layers, in place, and freeze the rest.

    Args:
        model: A causal language model of transformers.
        lora: The settings.
        seed: Decides A's first values.

    Raises:
        ValueError: If there is no layer of a name.
    """
    from peft import LoraConfig, inject_adapter_in_model

    head = model.get_output_embeddings()
    paths = [path for path, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    names = {path.rpartition(".")[2] for path in paths}
    chosen = names if lora.target_modules == "all-linear" else set(lora.target_modules)
    if not chosen or chosen - names:
        raise ValueError(f"lora.target_modules={lora.target_modules!r}: linear layers are {', '.join(sorted(names))}")
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=[f"0.{path}" for path in paths if path.rpartition(".")[2] in chosen],
    )
    with torch.random.fork_rng([]), torch.device("cpu"):  # the same values wherever they are used
        torch.default_generator.manual_seed(derive_seed(seed, "lora"))
        # In a list, peft does not know the model for one whose experts and routers it would choose layers of, too.
        inject_adapter_in_model(config, nn.ModuleList([model]))
    model.lora = lora


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """What is computed in this context is computed by the model as its files have it."""
    from peft.tuners.lora import LoraLayer

    layers = [layer for layer in model.modules() if isinstance(layer, LoraLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def shard_adapters(model: nn.Module, mesh: DeviceMesh, precision: str) -> None:
    """Shard adapters, those of a layer together, for FSDP2 leaves alone what a layer is given after it was sharded.

    Args:
        model: Sharded by FSDP2, with adapters.
        mesh: Of the ranks with different data.
        precision: What the model computes in, ``float32`` or ``bfloat16``.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if precision == "bfloat16" else MixedPrecisionPolicy()
    for layer in [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]:
        own = [module for path, module in layer.named_modules() if is_adapter(f".{path}.weight")]
        if own:
            fully_shard(own, mesh=mesh, mp_policy=policy)


def is_adapter(name: str) -> bool:
    """Whether a weight, by its name in a state dict, is an adapter's."""
    return name.endswith((_A, _B))


class PolicyWeights:
    """A policy's weights as an engine takes them; every rank must ask for the same.

    Iterating gives all weights by transformers' names, whole, one at a time. With adapters these are the merged ones,
    summed in FP32, while the model's own do not change: however often they are merged, nothing drifts.

    Args:
        model: From :func:`dclightning.models.load_policy`.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.lora: LoRA | None = model.lora

    @torch.no_grad()
    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        names = {name for name, _ in self.model.named_parameters()}  # each tied weight once
        state = self.model.state_dict()
        for name in [name for name in state if name in names and not is_adapter(name)]:
            weight, layer = whole(state[name]), name.removesuffix(".base_layer.weight")
            if layer != name:
                weight = weight + whole(state[layer + _B]) @ whole(state[layer + _A]) * self.model.lora.scale
            yield name.replace(".base_layer.", "."), weight

    @torch.no_grad()
    def adapters(self) -> dict[str, Tensor]:
        """The adapters alone, by the names of the state dict, whole."""
        return {name: whole(weight) for name, weight in self.model.state_dict().items() if is_adapter(name)}


@torch.no_grad()
def merge_adapters(model: nn.Module, adapters: dict[str, Tensor], lora: LoRA) -> None:
    """Add adapters to the weights of a model without any, in place.

    Args:
        model: What they were trained beside.
        adapters: By the names of the state dict.
        lora: The settings.

    Raises:
        AttributeError: If the model lacks a layer.
        RuntimeError: If a layer has another shape.
    """
    for layer in [name.removesuffix(_A) for name in adapters if name.endswith(_A)]:
        model.get_parameter(f"{layer}.weight").add_(adapters[layer + _B] @ adapters[layer + _A] * lora.scale)


def save_adapters(adapters: dict[str, Tensor], lora: LoRA, base: str, folder: Path) -> None:
    """Write adapters as peft and vLLM read them.

    Args:
        adapters: By the names of the state dict.
        lora: The settings.
        base: The model that they belong to, by hub name or folder.
        folder: Is there already.
    """
    weights = {
        f"base_model.model.{name.replace('.default.', '.')}": weight.contiguous() for name, weight in adapters.items()
    }
    save_file(weights, folder / "adapter_model.safetensors", {"format": "pt"})
    layers = sorted({name.removesuffix(_A).removesuffix(_B) for name in adapters})
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": layers,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2))
