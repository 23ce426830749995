"""How a model is spread over GPUs. Parallelism lives here and in ``models.py``; the algorithm does not know of it."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricModelParallelStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from dclightning.errors import UserError

T = TypeVar("T")

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""What configs of transformers call the number of experts."""


class ParallelStrategy(ModelParallelStrategy):
    """FSDP2 over all ranks, tensor parallelism inside groups of ranks, experts spread over ranks.

    transformers shards the model while it reads the weights, so that no rank ever holds all of it.

    Args:
        tensor_parallel_size: Ranks that share each layer, and the data.
        expert_parallel_size: Ranks that the experts of a mixture are spread over.
        save_distributed_checkpoint: Whether each rank writes its own part of a checkpoint.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
    ) -> None:
        super().__init__(
            tensor_parallel_size=tensor_parallel_size, save_distributed_checkpoint=save_distributed_checkpoint
        )
        self.tensor_parallel_size = tensor_parallel_size
        self.expert_parallel_size = expert_parallel_size

    def setup_environment(self) -> None:
        """Form the device mesh; Lightning's own default would be tensor parallelism over the whole node."""
        self._data_parallel_size = replicas(self.num_nodes * self.num_processes, self.tensor_parallel_size)
        super().setup_environment()


class FabricParallelStrategy(FabricModelParallelStrategy):
    """The same for Fabric; the model comes from ``load_policy(name, fabric.strategy)``, in shards already.

    Args:
        tensor_parallel_size: See :class:`ParallelStrategy`.
        expert_parallel_size: See :class:`ParallelStrategy`.
        save_distributed_checkpoint: See :class:`ParallelStrategy`.
    """

    def __init__(
        self,
        tensor_parallel_size: int = 1,
        expert_parallel_size: int = 1,
        save_distributed_checkpoint: bool = True,
    ) -> None:
        super().__init__(
            parallelize_fn=lambda module, device_mesh: module,
            tensor_parallel_size=tensor_parallel_size,
            save_distributed_checkpoint=save_distributed_checkpoint,
        )
        self.tensor_parallel_size = tensor_parallel_size
        self.expert_parallel_size = expert_parallel_size

    def setup_environment(self) -> None:
        """Form the device mesh."""
        self._data_parallel_size = replicas(self.num_nodes * self.num_processes, self.tensor_parallel_size)
        super().setup_environment()


def replicas(ranks: int, tensor_parallel_size: int) -> int:
    """How many groups of ranks hold different data."""
    if ranks % tensor_parallel_size:
        raise UserError(f"tensor_parallel_size={tensor_parallel_size}: must divide the number of ranks, {ranks}")
    return ranks // tensor_parallel_size


def check_layout(config: Any, ranks: int, tensor_parallel_size: int, expert_parallel_size: int) -> None:
    """Refuse a layout that the model cannot have, before any of its weights is read.

    Args:
        config: The model's, of transformers.
        ranks: All of them.
        tensor_parallel_size: See :class:`ParallelStrategy`.
        expert_parallel_size: See :class:`ParallelStrategy`.

    Raises:
        UserError: With the reason.
    """
    text, tp, ep = config.get_text_config(), tensor_parallel_size, expert_parallel_size
    if tp > 1 and not getattr(text, "base_model_tp_plan", None):
        raise UserError(f"tensor_parallel_size={tp}: transformers cannot split the layers of this model; set it to 1")
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (heads := getattr(text, name, None)) and heads % tp:
            raise UserError(f"tensor_parallel_size={tp}: must divide the model's {name}, {heads}")
    experts = next((n for name in EXPERT_COUNTS if (n := getattr(text, name, None))), 0)
    if ep > 1 and not experts:
        raise UserError(f"expert_parallel_size={ep}: the model has no experts; set it to 1")
    if ep > 1 and "ep_dispatch_experts" not in (getattr(text, "base_model_ep_plan", None) or {}).values():
        raise UserError(f"expert_parallel_size={ep}: transformers cannot spread this model's experts; set it to 1")
    if experts % ep or ranks % ep:
        raise UserError(f"expert_parallel_size={ep}: must divide the {experts} experts and the {ranks} ranks")
    if experts and ep % tp:
        # Experts that are cut by tensor parallelism come back scrambled from checkpoints:
        # https://github.com/huggingface/transformers/issues/48802
        raise UserError(
            f"expert_parallel_size={ep}: must be a multiple of tensor_parallel_size={tp}, or each expert would be cut"
        )


def data_parallel_group(strategy: Strategy | FabricStrategy) -> tuple[int, dist.ProcessGroup | None]:
    """How many ranks hold different data, and their process group (None: all ranks)."""
    if isinstance(strategy, ParallelStrategy | FabricParallelStrategy):
        group = strategy.device_mesh["data_parallel"].get_group()
        return dist.get_world_size(group), group
    return getattr(strategy, "world_size", 1), None


def data_parallel_reduce(
    strategy: Strategy | FabricStrategy, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Tensor:
    """Elementwise sum (or another reduction) over the ranks that hold different data; the same on every rank."""
    size, group = data_parallel_group(strategy)
    if size > 1:
        values = values.clone()
        dist.all_reduce(values, op, group)
    return values


def data_parallel_gather(strategy: Strategy | FabricStrategy, values: Tensor) -> Tensor:
    """The flat tensors of all ranks that hold different data, of any lengths, one after another."""
    size, group = data_parallel_group(strategy)
    if size == 1:
        return values
    lengths = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(values)], device=values.device), group)
    longest = int(torch.cat(lengths).max())
    padded = torch.cat([values, values.new_zeros(longest - len(values))])
    parts = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(parts, padded, group)
    return torch.cat([part[: int(length)] for part, length in zip(parts, lengths, strict=True)])


def tensor_parallel_gather(strategy: Strategy, value: T) -> list[T]:
    """What the ranks that share each layer have, in their order; the same list on all of them."""
    if not isinstance(strategy, ParallelStrategy) or strategy.tensor_parallel_size == 1:
        return [value]
    found: list[Any] = [None] * strategy.tensor_parallel_size
    dist.all_gather_object(found, value, strategy.device_mesh["tensor_parallel"].get_group())
    return found


def whole(tensor: Tensor) -> Tensor:
    """A tensor without shards; every rank must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` that also takes parameters spread over several device meshes.

    Args:
        parameters: Those without a gradient are passed over.
        max_norm: The largest total norm; infinity only measures.

    Returns:
        The total norm before clipping, a scalar; 0 where nothing has a gradient.
    """
    by_mesh: dict[object, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh[parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None].append(parameter)
    if not by_mesh:
        return torch.zeros(())
    norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in by_mesh.values()]
    total: Tensor = torch.linalg.vector_norm(torch.stack([whole(norm) for norm in norms]))
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total
