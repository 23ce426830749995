"""Policies that transformers spreads over ranks while it reads their weights: no rank ever holds a whole one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import DistributedConfig
from transformers.distributed.mixin import DistributedMixin
from transformers.distributed.tensor_parallel import ReplicatedWithGradAllReduce
from transformers.distributed.utils import initialize_distributed_mesh

from dclightning.strategies import FabricParallelStrategy, ParallelStrategy


def distributed_config(strategy: ParallelStrategy | FabricParallelStrategy, mixed_precision: bool) -> DistributedConfig:
    """The layout as transformers calls it.

    Args:
        strategy: With more than one rank.
        mixed_precision: Whether parameters are gathered, and computed with, in BF16; gradients are reduced in FP32.
    """
    return DistributedConfig(
        fsdp_size=strategy.world_size // strategy.tensor_parallel_size,
        tp_size=strategy.tensor_parallel_size,
        ep_size=strategy.expert_parallel_size,
        fsdp_mixed_precision=mixed_precision,
    )


@contextmanager
def any_layout(layout: DistributedConfig) -> Iterator[None]:
    """Let transformers 5.19 load layouts that it refuses, or computes wrong gradients for."""
    prepare = DistributedMixin.__dict__["prepare_distribute_model"]
    install = ReplicatedWithGradAllReduce.install_forward
    DistributedMixin.prepare_distribute_model = classmethod(_prepare_distribute_model)
    if layout.fsdp_size == 1:
        ReplicatedWithGradAllReduce.install_forward = _install_forward
    try:
        yield
    finally:
        DistributedMixin.prepare_distribute_model = prepare
        ReplicatedWithGradAllReduce.install_forward = install


def _prepare_distribute_model(cls: Any, layout: DistributedConfig, device_map: Any = None) -> tuple[Any, Any, Any]:
    """Spread experts over other ranks than those of tensor parallelism, too: each token is sent to its experts.

    transformers has the plans for it, and then refuses: https://github.com/huggingface/transformers/pull/48865
    """
    return layout, *initialize_distributed_mesh(layout)


def _install_forward(self: Any, module: nn.Module, mesh: Any) -> nn.Module:
    """Sum the gradient of norms over the heads of all ranks when it is added to ``grad``.

    transformers sums what has been added up so far at each backward pass, and so that of earlier micro-batches again.
    (With FSDP, too, nothing is added up at that point.)
    """

    def summed(gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total, group=mesh.get_group())
        return total

    def watch(module: nn.Module, inputs: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad:
                parameter.register_hook(summed)
        once.remove()

    once = module.register_forward_pre_hook(watch)  # while it is loaded parameters are replaced
    return module


def mend_expert_gradients(model: nn.Module, layout: DistributedConfig) -> None:
    """Where each expert is on one rank only, gloo would divide its gradient by the number of ranks twice."""
    if layout.ep_size > 1 and layout.efsdp_size == 1 and dist.get_backend() != "nccl":
        for name, module in model.named_modules():
            if name.endswith(".experts") and isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(False)
