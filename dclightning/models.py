"""Training policies: any causal language model of transformers, its token log-probs, its weights."""

from collections.abc import Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dclightning.attention import PACKED, lanes
from dclightning.errors import UserError
from dclightning.hub import hub_answers
from dclightning.packing import Pack
from dclightning.strategies import ParallelStrategy

LOGITS_IN_A_CHUNK = 2**25
"""Most FP32 logits that the log-probs hold at a time: 128 MiB."""


def resolve_model(name: str) -> str:
    """The folder of a model that ships with the package (``dclightning/...``); other names are returned as they are."""
    if name.startswith("dclightning/"):
        folder = Path(str(files("dclightning") / "assets" / name.removeprefix("dclightning/")))
        if folder.is_dir():
            return str(folder)
    return name


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model, by name or folder."""
    return from_pretrained(AutoTokenizer, name)


def longest_context(name: str) -> int:
    """The longest sequence that a model takes, in tokens."""
    config = from_pretrained(AutoConfig, name).get_text_config()
    return int(getattr(config, "max_position_embeddings", 2**31))


def load_policy(name: str, strategy: Strategy | None = None, gradient_checkpointing: bool = False) -> PreTrainedModel:
    """Load a causal language model for training, in FP32, sharded as the strategy says, without dropout.

    Parameters are FP32 whatever the compute precision is: an update of 1e-6 would be rounded away in BF16.

    Without dropout the old log-probs and the first forward pass of the update are the same computation.
    """
    config = from_pretrained(AutoConfig, name)
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for key, value in vars(part).items():
            if isinstance(value, float) and "drop" in key:
                setattr(part, key, 0.0)
    options: dict[str, Any] = {"config": config, "dtype": torch.float32, "attn_implementation": PACKED}
    if isinstance(strategy, ParallelStrategy) and strategy.world_size > 1:
        options["distributed_config"] = _distributed_config(strategy)
    model = from_pretrained(AutoModelForCausalLM, name, **options)
    if isinstance(strategy, ParallelStrategy) and strategy.world_size == 1:
        # The same kind of parameters and checkpoints as on many ranks; without it one rank could not resume.
        fully_shard(model, mesh=strategy.device_mesh["data_parallel"])
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
        model.train()
    model.token_logprobs = MethodType(_token_logprobs, model)
    register_fsdp_forward_method(model, "token_logprobs")
    return model


def token_logprobs(model: Any, batch: Pack, temperature: float, entropy: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probabilities of a pack's response tokens, and their distributions' entropies.

    The head is applied to a chunk of tokens at a time, and again in the backward pass, so that logits never exist for
    the whole batch. Softmax is in FP32.

    Args:
        model: From :func:`load_policy`.
        batch: R response tokens.
        temperature: The sampling temperature; logits are divided by it.
        entropy: Whether to compute the entropies, too.

    Returns:
        Log-probs, (R,) float32, and entropies in nats, (R,) float32, or zeros.
    """
    logprobs, entropies = model.token_logprobs(batch, temperature, entropy)
    return logprobs, entropies


def _token_logprobs(self: Any, batch: Pack, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
    hidden = self.base_model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        lanes=batch.lanes,
        use_cache=False,
    )[0][0]
    hidden = hidden[batch.predictors]
    head = self.get_output_embeddings()
    chunk = max(1, LOGITS_IN_A_CHUNK // self.config.get_text_config().vocab_size)
    run = (
        partial(checkpoint, _head, use_reentrant=False, preserve_rng_state=False) if torch.is_grad_enabled() else _head
    )
    parts = [
        run(head, rows, targets, temperature, entropy)
        for rows, targets in zip(hidden.split(chunk), batch.targets.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _head(head: nn.Module, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool) -> tuple[Tensor, Tensor]:
    logits = head(hidden)
    if isinstance(logits, DTensor):
        logits = logits.full_tensor()
    logits = logits.float() / temperature
    logprobs = -cross_entropy(logits, targets, reduction="none")
    if not entropy:
        return logprobs, torch.zeros_like(logprobs)
    everything = logits.log_softmax(-1)
    return logprobs, -(everything.exp() * everything).sum(-1)


@torch.no_grad()
def check_token_logprobs(model: Any, name: str) -> None:
    """Refuse a model whose packed, chunked log-probs are not those of its plain forward pass, twice the same.

    That is so for models that change their logits after the head (soft-capping, scaling), for those whose layers mix
    the sequences of a row (state-space models), and for those that still drop something at random. Two sequences of
    four tokens are tried.
    """
    device = next(model.parameters()).device
    ids = torch.arange(8, device=device) % model.config.get_text_config().vocab_size
    sequence = torch.tensor([0, 1, 2, 3], device=device)
    both = Pack(
        input_ids=torch.cat([ids[:4], ids[:4].flip(0)])[None],
        position_ids=torch.cat([sequence, sequence])[None],
        lanes=lanes([4, 4], device),
        predictors=torch.arange(8, device=device),
        targets=ids,
        index=torch.arange(8, device=device),
        response_lengths=torch.tensor([4, 4], device=device),
    )
    packed, _ = token_logprobs(model, both, temperature=1.0)
    if not torch.equal(packed, token_logprobs(model, both, temperature=1.0)[0]):
        raise UserError(f"model={name!r}: two passes give different log-probs; is there a dropout that is not off?")
    model.set_attn_implementation("sdpa")
    for half, row in ((slice(0, 4), both.input_ids[:, :4]), (slice(4, 8), both.input_ids[:, 4:])):
        logits = model(input_ids=row, use_cache=False).logits[0]
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        plain = -cross_entropy(logits.float(), ids[half], reduction="none")
        if (gap := (plain - packed[half]).abs().max().item()) > 0.1:
            raise UserError(
                f"model={name!r}: log-probs of packed sequences are off by {gap:.2g}; "
                "models that change their logits after the head, or mix packed sequences, are not supported"
            )
    model.set_attn_implementation(PACKED)
    reshard(model)


def reshard(model: nn.Module) -> None:
    """Let go of what a pass without gradient has gathered.

    FSDP2 keeps the last layers whole until the backward pass. Without one, checkpoints would not find shards, and
    changed weights would not be seen.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All weights by transformers' names, whole, one at a time; every rank must iterate."""
    names = {name for name, _ in model.named_parameters()}  # each tied weight once
    for name, weight in model.state_dict().items():
        if name in names:
            yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight


def from_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """What ``kind.from_pretrained`` gives for a model by name or folder; what is wrong is said in one line."""
    path = resolve_model(name)
    if not Path(path).is_dir() and not _is_cached(path) and not hub_answers():
        raise UserError(f"model={name!r}: no such folder, and the hub cannot be reached")
    try:
        return kind.from_pretrained(path, **options)
    except (OSError, ValueError) as error:
        raise UserError(f"model={name!r}: {' '.join(str(error).split())[:300]}") from error


def _is_cached(name: str) -> bool:
    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def _distributed_config(strategy: ParallelStrategy) -> Any:
    from transformers import DistributedConfig

    return DistributedConfig(
        fsdp_size=strategy.world_size // strategy.tensor_parallel_size,
        tp_size=strategy.tensor_parallel_size,
        ep_size=strategy.expert_parallel_size,
        fsdp_mixed_precision=strategy.mixed_precision,
    )
