"""How a model is spread over GPUs. Parallelism lives here and in ``models.py``; the algorithm does not know of it."""

from collections import defaultdict
from collections.abc import Iterable

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class ParallelStrategy(ModelParallelStrategy):
    """FSDP2 over all ranks, tensor parallelism inside groups of ranks, experts spread over ranks.

    transformers shards the model while it reads the weights, so that no rank ever holds all of it.

    Args:
        tensor_parallel_size: Ranks that share each layer.
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
        world_size = self.num_nodes * self.num_processes
        if world_size % self.tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size}: must divide the number of ranks, {world_size}"
            )
        self._data_parallel_size = world_size // self.tensor_parallel_size
        super().setup_environment()


def data_parallel_group(strategy: Strategy) -> tuple[int, dist.ProcessGroup | None]:
    """How many ranks hold different data, and their process group (None: all ranks)."""
    if isinstance(strategy, ParallelStrategy):
        group = strategy.device_mesh["data_parallel"].get_group()
        return dist.get_world_size(group), group
    return getattr(strategy, "world_size", 1), None


def data_parallel_reduce(strategy: Strategy, values: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Elementwise sum (or another reduction) over the ranks that hold different data; the same on every rank."""
    size, group = data_parallel_group(strategy)
    if size > 1:
        values = values.clone()
        dist.all_reduce(values, op, group)
    return values


def data_parallel_gather(strategy: Strategy, values: Tensor) -> Tensor:
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


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` that also takes parameters spread over several device meshes.

    Args:
        parameters: Those without a gradient are passed over.
        max_norm: The largest total norm; infinity only measures.

    Returns:
        The total norm before clipping, a scalar.
    """
    by_mesh: dict[object, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if parameter.grad is not None:
            by_mesh[parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None].append(parameter)
    norms = [get_total_norm([p.grad for p in group if p.grad is not None]) for group in by_mesh.values()]
    total: Tensor = torch.linalg.vector_norm(
        torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms])
    )
    for group in by_mesh.values():
        clip_grads_with_norm_(group, max_norm, total)
    return total
