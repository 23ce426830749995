"""How much memory a forward and backward pass takes, counted without computing it.

The policy's own code runs on tensors that have a shape and a type and no numbers (``FakeTensorMode``). Each storage
that an operation makes is counted until it is freed, so that what checkpointing keeps, a layer's recomputation, the
head's chunks of logits and every copy that a layer makes are in the peak without a formula for any of them.
"""

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from dclightning.attention import PACKED, Lanes, lanes
from dclightning.models import Precision, add_logprobs, has_experts, token_logprobs
from dclightning.packing import Pack
from dclightning.strategies import EXPERT_COUNTS


@dataclass(frozen=True)
class Pass:
    """Memory of one micro-batch, in bytes; without parameters and their gradients."""

    kept: int
    """What is there between the forward and the backward pass."""
    peak: int
    """The most that is there at any time."""


class LiveMemory(TorchDispatchMode):
    """Counts the storages that operations make while they live."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._alive = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in self._alive:
                self._alive.add(storage._cdata)
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        return out

    def _freed(self, key: int, count: int) -> None:
        self._alive.discard(key)
        self.bytes -= count


def rehearse(
    config: Any,
    lengths: list[int],
    precision: Precision = "float32",
    gradient_checkpointing: bool = False,
    entropy: bool = False,
    sharded: bool = False,
) -> Pass:
    """Count the memory of one micro-batch's forward and backward pass.

    Mixtures of experts in FP32 or under autocast are counted in BF16, and twice: an upper bound.

    Args:
        config: The model's, of transformers; see :func:`of_one_rank`.
        lengths: Tokens of the micro-batch's sequences, all of which are predicted.
        precision: See :func:`~dclightning.models.load_policy`.
        gradient_checkpointing: See there.
        entropy: Whether the loss has an entropy in it.
        sharded: Whether FSDP2 gathers parameters in ``precision``, if that is BF16. Otherwise they are FP32, and
            16 bits are autocast's, copies of weights included.
    """
    gathers = sharded and precision == "bfloat16"
    doubled = has_experts(config) and not gathers
    if doubled:
        precision, gathers = "bfloat16", True
    mode = FakeTensorMode()
    batch = _fake(mode, _responses(lengths))
    with mode:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=PACKED, dtype=torch.bfloat16 if gathers else torch.float32
        )
        model.train(gradient_checkpointing)
        if gradient_checkpointing:
            model.gradient_checkpointing_enable()
        add_logprobs(model, precision, as_on_gpu=True)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_forget_gradient)
        with LiveMemory([*model.parameters(), *model.buffers()]) as memory:
            scores = token_logprobs(model, batch, 1.0, entropy=entropy)
            kept = memory.bytes
            (scores.logprobs + scores.entropy).sum().backward()
    factor = 2 if doubled else 1
    return Pass(factor * kept, factor * memory.peak)


def of_one_rank(config: Any, tensor_parallel_size: int, expert_parallel_size: int) -> Any:
    """The config of a model whose layers are as wide as one rank's share of them; the residual stream stays whole.

    Experts come out as with balanced routing; buffers for tokens that move between ranks are left out.
    """
    config = copy.deepcopy(config)
    text = config.get_text_config()
    if tensor_parallel_size > 1:
        text.head_dim = head_dim(config)
        for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if getattr(text, name, None):
                setattr(text, name, getattr(text, name) // tensor_parallel_size)
    if expert_parallel_size > 1:
        text.num_experts_per_tok = -(-text.num_experts_per_tok // tensor_parallel_size)
        for name in EXPERT_COUNTS:
            if count := getattr(text, name, None):
                setattr(text, name, max(count // expert_parallel_size, text.num_experts_per_tok))
    return config


def head_dim(config: Any) -> int:
    """Numbers of each attention head's keys."""
    text = config.get_text_config()
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _forget_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _responses(lengths: list[int]) -> Pack:
    total = sum(lengths)
    tokens = torch.zeros(total, dtype=torch.int64)
    return Pack(
        input_ids=tokens[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        lanes=lanes(torch.arange(total).split(lengths), torch.device("cpu")),
        predictors=torch.arange(total),
        targets=tokens,
        index=torch.arange(total),
        response_lengths=torch.tensor(lengths),
    )


def _fake(mode: FakeTensorMode, batch: Pack) -> Pack:
    tensors = {f.name: mode.from_tensor(v) for f in fields(Pack) if isinstance(v := getattr(batch, f.name), Tensor)}
    of_lanes = [Lanes(mode.from_tensor(group.lay), mode.from_tensor(group.pick)) for group in batch.lanes]
    return replace(batch, lanes=of_lanes, **tensors)
