"""Routing replay: a mixture of experts is trained on the experts that the engine chose.

The engine and the trainer round differently, so that their routers choose different experts for some tokens, which
moves log-probs far more than rounding by itself. Under replay the trainer's routers take the engine's choices, and
weight them by their own logits, so that gradients still reach them (R3, rollout routing replay, arXiv 2510.11370).
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dclightning.attention import lanes
from dclightning.errors import UserError
from dclightning.models import reshard

SUPPORTED = "Qwen2-MoE, Qwen3-MoE, OLMoE, Mixtral, DeepSeek-V3, GLM-4-MoE and others with routers like theirs"
SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)


def routers(model: nn.Module) -> dict[int, nn.Module]:
    """The routers of a model by the number of their layer; dense layers have none.

    Raises:
        UserError: The model has no router of a known kind.
    """
    found = {}
    for name, module in model.named_modules():
        layer = re.search(r"\blayers\.(\d+)\.", name)
        if layer and _is_router(module):
            found[int(layer[1])] = module
    if not found:
        raise _unsupported(model)
    return found


@torch.no_grad()
def check_replay(model: Any) -> None:
    """Refuse a model whose routers weight experts in a way that replay does not know.

    Four tokens are tried. Every rank must call it.

    Args:
        model: From ``load_policy``.

    Raises:
        UserError: The model has no routers, or they compute something else.
    """
    known: list[bool] = []

    def compare(router: nn.Module, args: Any, output: Any) -> None:
        known.append(_is_known(router, output))

    handles = [router.register_forward_hook(compare) for router in routers(model).values()]
    positions = torch.arange(4, device=next(model.parameters()).device)
    try:
        model(
            input_ids=(positions % model.config.get_text_config().vocab_size)[None],
            position_ids=positions[None],
            lanes=lanes([torch.arange(4)], positions.device),
            use_cache=False,
        )
    finally:
        for handle in handles:
            handle.remove()
    reshard(model)
    if not known or not all(known):
        raise _unsupported(model)


@contextmanager
def replayed(model: Any, experts: Tensor | None) -> Iterator[None]:
    """Let the routers use given experts in the forward passes of the block, which are over one row of N tokens.

    A backward pass may come later: what gradient checkpointing computes again uses the experts of its forward pass.

    Args:
        model: See :func:`check_replay`.
        experts: The experts of each token of the row, in the row's order, in each layer, dense layers included, whose
            values are ignored. Where any of the k is -1 the router chooses for itself. (N, layers, k) int64 or a
            narrower signed type. None replays nothing.

    Raises:
        ValueError: The experts are not the model's, or not as many as the row's tokens.
    """
    if experts is None:
        yield
        return
    found = _hooked(model)
    _check(model, found, experts)
    given = {router: experts[:, layer] for layer, router in found.items()}
    with _Attribute("replay", given), _Attribute("_gradient_checkpointing_func", _checkpoints(model, given)):
        yield


@contextmanager
def recorded(model: Any, tokens: int) -> Iterator[Tensor]:
    """Record the routers' own choices in a forward pass; under replay, what they would have chosen.

    Args:
        model: See :func:`check_replay`.
        tokens: N, of the row.

    Yields:
        Filled by the pass, (N, layers, k) int64, with -1 in dense layers.
    """
    found = _hooked(model)
    k = next(iter(found.values())).top_k
    own = torch.full((tokens, _layers(model), k), -1, device=next(model.parameters()).device)
    with _Attribute("record", {router: own[:, layer] for layer, router in found.items()}):
        yield own


def agreement(own: Tensor, experts: Tensor) -> Tensor:
    """Which of the given experts the routers would also have chosen themselves; the order of the k is of no matter.

    Args:
        own: From :func:`recorded`, (N, layers, k).
        experts: See :func:`replayed`.

    Returns:
        (M, k) bool, one row for each token and layer for which both are known.
    """
    known = ((own >= 0) & (experts >= 0)).all(-1)
    return (experts[known][:, :, None] == own[known][:, None, :]).any(-1)


def _hooked(model: nn.Module) -> dict[int, Any]:
    """The routers, each with a hook that obeys its attributes ``record`` and ``replay``.

    The hook stays and obeys what it finds: one more hook for what is computed again would find the first still there
    if the backward pass is inside the block, and then compute other tensors than the forward pass did.
    """
    found: dict[int, Any] = routers(model)
    for router in found.values():
        if not hasattr(router, "replay"):
            router.record = router.replay = None
            router.register_forward_hook(_route)
    return found


def _route(router: Any, args: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor] | None:
    """What a router gives instead of its output, as a forward hook."""
    logits, weights, own = output
    for rows in (router.record, router.replay):
        if rows is not None and len(rows) != len(own):
            raise ValueError(f"experts: are for {len(rows)} tokens, but the row has {len(own)}")
    if router.record is not None:
        router.record.copy_(own)
    if router.replay is None:
        return None
    unknown = (router.replay < 0).any(-1, keepdim=True)
    experts = torch.where(unknown, own, router.replay)
    return logits, _weights(router, logits, experts).to(weights.dtype), experts


def _weights(router: Any, logits: Tensor, experts: Tensor) -> Tensor:
    """The routers' own formula, in the order of their operations, for experts that are given. (N, k)"""
    sigmoid = hasattr(router, "e_score_correction_bias")  # as in DeepSeek-V3; the bias is for the choice only
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1, dtype=torch.float32)
    weights = scores.gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):  # Mixtral always does, and has no such attribute
        weights /= weights.sum(-1, keepdim=True) + 1e-20
    return weights * getattr(router, "routed_scaling_factor", 1.0)


def _is_router(module: nn.Module) -> bool:
    weight, experts = getattr(module, "weight", None), getattr(module, "num_experts", None)
    return hasattr(module, "top_k") and isinstance(weight, Tensor) and weight.dim() == 2 and len(weight) == experts


def _is_known(router: nn.Module, output: Any) -> bool:
    """Whether a router gives logits, weights and experts, and the weights are those of the formula."""
    if not isinstance(output, tuple) or len(output) != 3:
        return False
    logits, weights, own = output
    if own.dtype != torch.int64 or own.shape != weights.shape or own.shape[:-1] != logits.shape[:-1]:
        return False
    return torch.allclose(_weights(router, logits, own).to(weights.dtype), weights)


def _check(model: Any, found: dict[int, nn.Module], experts: Tensor) -> None:
    router: Any = next(iter(found.values()))
    layers = _layers(model)
    if experts.shape[1:] != (layers, router.top_k) or experts.dtype not in SIGNED:
        raise ValueError(
            f"experts: {experts.dtype} of shape {tuple(experts.shape)}; must be signed integers of shape "
            f"(tokens, {layers}, {router.top_k})"
        )
    lowest, highest = experts[:, list(found)].aminmax()
    if lowest < -1 or highest >= router.num_experts:
        raise ValueError(f"experts: must be from 0 to {router.num_experts - 1}, or -1")


def _layers(model: Any) -> int:
    return int(model.config.get_text_config().num_hidden_layers)


def _checkpoints(model: Any, given: dict[nn.Module, Tensor]) -> dict[nn.Module, Callable[..., Any]]:
    """For each module that computes itself again in the backward pass, how it does so with the given experts."""

    def contexts() -> tuple[Any, Any]:
        return nullcontext(), _Attribute("replay", given)

    return {
        module: partial(module._gradient_checkpointing_func, context_fn=contexts)
        for module in model.modules()
        if getattr(module, "gradient_checkpointing", False)
    }


def _unsupported(model: nn.Module) -> UserError:
    return UserError(f"model: routing replay does not know the routers of {type(model).__name__}; it knows {SUPPORTED}")


class _Attribute:
    """Gives modules an attribute within a block. It may be entered again later."""

    def __init__(self, name: str, values: dict[nn.Module, Any]) -> None:
        self.name = name
        self.values = values

    def __enter__(self) -> None:
        self.before = {module: getattr(module, self.name) for module in self.values}
        self._set(self.values)

    def __exit__(self, *_: object) -> None:
        self._set(self.before)

    def _set(self, values: dict[nn.Module, Any]) -> None:
        for module, value in values.items():
            setattr(module, self.name, value)
