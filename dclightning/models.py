"""Training policies: any causal language model of transformers, its token log-probs, its weights."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib.resources import files
from pathlib import Path
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dclightning.attention import PACKED, lanes
from dclightning.errors import UserError, one_line
from dclightning.hub import hub_answers
from dclightning.lora import LoRA, PolicyWeights, add_adapters, check_adapters, shard_adapters
from dclightning.packing import Pack
from dclightning.sharding import any_layout, distributed_config, mend_expert_gradients
from dclightning.strategies import EXPERT_COUNTS, FabricParallelStrategy, ParallelStrategy, check_layout, whole

LOGITS_IN_A_CHUNK = 2**25
"""Most FP32 logits that the log-probs hold at a time: 128 MiB, and half of that on a CPU, where it is as fast.

Much smaller chunks would take more memory: up to 32 MiB glibc has a heap, and between them it fills with holes.
"""
LOGITS_AT_ONCE = 2**23
"""Most of them that softmax is computed of at once: 32 MiB, and on a CPU half a MiB, which stays in a core's cache."""

Precision = Literal["float32", "bfloat16", "float16"]


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


def has_experts(config: Any) -> bool:
    """Whether a model is a mixture of experts."""
    text = config.get_text_config()
    return any(getattr(text, name, None) for name in EXPERT_COUNTS)


class TokenScores(NamedTuple):
    """What a policy says of response tokens."""

    logprobs: Tensor
    """(R,) float32"""
    entropy: Tensor
    """Of the distributions that they are from, in nats, or zeros. (R,) float32"""
    ranks: Tensor
    """How many tokens are likelier, and 1; or zeros. (R,) int64"""


def load_policy(
    name: str,
    strategy: Strategy | FabricStrategy | None = None,
    gradient_checkpointing: bool = False,
    precision: Precision = "float32",
    lora: LoRA | None = None,
    seed: int = 0,
) -> PreTrainedModel:
    """Load a causal language model for training, sharded as the strategy says, without dropout.

    Parameters are FP32 whatever the precision of the computation is: an update of 1e-6 would be rounded away in BF16.
    Log-softmax is always in FP32.

    Without dropout the old log-probs and the first forward pass of the update are the same computation.

    Args:
        name: By hub name or folder, or one that ships with the package.
        strategy: Shards it.
        gradient_checkpointing: Whether to recompute activations in the backward pass.
        precision: What :func:`token_logprobs` computes in.
        lora: Adapters that are trained in the place of the model's own weights.
        seed: Decides the adapters' first values.
    """
    config = from_pretrained(AutoConfig, name)
    for part in {id(c): c for c in (config, config.get_text_config())}.values():
        for key, value in vars(part).items():
            if isinstance(value, float) and "drop" in key:
                setattr(part, key, 0.0)
    options: dict[str, Any] = {"config": config, "dtype": torch.float32, "attn_implementation": PACKED}
    parallel = strategy if isinstance(strategy, ParallelStrategy | FabricParallelStrategy) else None
    sharded = parallel is not None and parallel.world_size > 1
    check_adapters(lora, parallel.tensor_parallel_size if parallel is not None else 1)
    if (precision == "float16" or (precision == "bfloat16" and not sharded)) and has_experts(config):
        options["experts_implementation"] = "eager"  # autocast passes the default, grouped products, by
    if parallel is not None and sharded:
        check_layout(config, parallel.world_size, parallel.tensor_parallel_size, parallel.expert_parallel_size)
        layout = distributed_config(parallel, mixed_precision=precision == "bfloat16")
        with any_layout(layout):
            model = from_pretrained(AutoModelForCausalLM, name, distributed_config=layout, **options)
        mend_expert_gradients(model, layout)
    else:
        model = from_pretrained(AutoModelForCausalLM, name, **options)
    model.lora = None
    if lora is not None:
        try:
            add_adapters(model, lora, seed)
        except ValueError as error:
            raise UserError(f"model={name!r}: {one_line(error)}") from error
    if parallel is not None and not sharded:
        # The same kind of parameters and checkpoints as on many ranks; without it one rank could not resume.
        fully_shard(model, mesh=parallel.device_mesh["data_parallel"])
    elif parallel is not None and lora is not None:
        shard_adapters(model, parallel.device_mesh["data_parallel"], precision)
    if gradient_checkpointing:
        # Nothing is random in a pass; and the generators' states are not touched while an engine may draw from them.
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
        model.train()
    add_logprobs(model, precision)
    return model


def add_logprobs(model: Any, precision: Precision, as_on_gpu: bool = False) -> None:
    """Give a model of transformers the methods behind :func:`token_logprobs` and :func:`distributions`.

    Args:
        model: The model.
        precision: What they compute in.
        as_on_gpu: Whether logits are divided as on a GPU even if they are on a CPU.
    """
    model.as_on_gpu = as_on_gpu
    model.compute_dtype = getattr(torch, precision)
    for method in (_token_logprobs, _distributions):
        name = method.__name__.removeprefix("_")
        setattr(model, name, MethodType(method, model))
        register_fsdp_forward_method(model, name)


def token_logprobs(
    model: Any,
    batch: Pack,
    temperature: float,
    entropy: bool = False,
    ranks: bool = False,
    entropy_gradient: bool = True,
) -> TokenScores:
    """Log-probabilities of a pack's response tokens, and more of them if asked for.

    The head is applied to a chunk of tokens at a time, and if there are several, again in the backward pass, so that
    logits never exist for more tokens than a chunk has. Softmax is in FP32.

    Args:
        model: From :func:`load_policy`.
        batch: R response tokens.
        temperature: The sampling temperature; logits are divided by it.
        entropy: Whether to compute the entropies, too.
        ranks: Whether to compute the ranks, too.
        entropy_gradient: Whether the entropies have a gradient, which takes time and memory.
    """
    with _computing_in(model):
        return TokenScores(*model.token_logprobs(batch, temperature, entropy, ranks, entropy_gradient))


@torch.no_grad()
def distributions(model: Any, batch: Pack, temperature: float) -> Tensor:
    """Log-probabilities of the whole vocabulary where a pack's R response tokens stand, (R, vocabulary) float32."""
    with _computing_in(model):
        found: Tensor = model.distributions(batch, temperature)
    return found


def _computing_in(model: Any) -> AbstractContextManager[Any]:
    if model.compute_dtype == torch.float32:
        return nullcontext()
    return torch.autocast(next(model.parameters()).device.type, model.compute_dtype)


def _hidden(self: Any, batch: Pack) -> Tensor:
    hidden = self.base_model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        lanes=batch.lanes,
        use_cache=False,
    )[0][0]
    return hidden[batch.predictors]  # type: ignore[no-any-return]


def _distributions(self: Any, batch: Pack, temperature: float) -> Tensor:
    return _logits(self.get_output_embeddings(), _hidden(self, batch), temperature).log_softmax(-1)


def _token_logprobs(
    self: Any, batch: Pack, temperature: float, entropy: bool, ranks: bool, entropy_gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    hidden = _hidden(self, batch)
    head = self.get_output_embeddings()
    on_cpu = hidden.device.type == "cpu" and not self.as_on_gpu
    vocabulary = self.config.get_text_config().vocab_size
    chunk = max(1, LOGITS_IN_A_CHUNK // (2 if on_cpu else 1) // vocabulary)
    at_once = max(1, LOGITS_AT_ONCE // (64 if on_cpu else 1) // vocabulary)
    run = _head
    if torch.is_grad_enabled() and len(hidden) > chunk:
        run = partial(checkpoint, _head, use_reentrant=False, preserve_rng_state=False)
    parts = [
        run(head, rows, targets, temperature, entropy, ranks, entropy_gradient, at_once)
        for rows, targets in zip(hidden.split(chunk), batch.targets.split(chunk), strict=True)
    ]
    logprobs, entropies, places = (torch.cat(part) for part in zip(*parts, strict=True))
    return logprobs, entropies, places


def _head(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    entropy: bool,
    ranks: bool,
    entropy_gradient: bool,
    at_once: int,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = _logits(head, hidden, temperature)
    differentiable = entropy and entropy_gradient and torch.is_grad_enabled()
    logprobs, entropies, places = _Scores.apply(  # type: ignore[no-untyped-call]
        logits, targets, entropy and not differentiable, ranks, at_once
    )
    if differentiable:
        everything = logits.log_softmax(-1)
        entropies = -(everything.exp() * everything).sum(-1)
    return logprobs, entropies, places


class _Scores(torch.autograd.Function):
    """Log-softmax at the targets, entropies and ranks; only the first has a gradient, for which logits alone are kept.

    Some rows at once: what is between takes little memory, and on a CPU stays in its cache.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, entropy: bool, ranks: bool, at_once: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (R, vocabulary) float32, targets (R,) int64; gives (R,) float32, float32 and int64."""
        logprobs = logits.new_empty(len(logits))
        entropies, places = torch.zeros_like(logprobs), torch.zeros_like(targets)
        for rows in _slices(len(logits), at_once):
            part, at = logits[rows], targets[rows, None]
            everything = part.log_softmax(-1)
            logprobs[rows] = everything.gather(-1, at)[:, 0]
            if ranks:
                places[rows] = (part > part.gather(-1, at)).sum(-1) + 1
            if entropy:  # 0 log 0 is 0
                least = torch.finfo(everything.dtype).min
                entropies[rows] = everything.exp().mul_(everything.clamp_(min=least)).sum(-1).neg_()
        ctx.save_for_backward(logits, targets)
        ctx.at_once = at_once
        ctx.mark_non_differentiable(entropies, places)
        return logprobs, entropies, places

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Of the logits, in their own memory: what the target has less than all."""
        logits, targets = ctx.saved_tensors
        for rows in _slices(len(logits), ctx.at_once):
            part = logits[rows]
            part.copy_(part.softmax(-1)).mul_(-gradient[rows, None])
            part.scatter_add_(1, targets[rows, None], gradient[rows, None])
        return logits, None, None, None, None


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, count, size))


def _logits(head: nn.Module, hidden: Tensor, temperature: float) -> Tensor:
    logits = whole(head(hidden)).float()
    return logits if temperature == 1 else logits / temperature


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
        lanes=lanes(torch.arange(8).split(4), device),
        predictors=torch.arange(8, device=device),
        targets=ids,
        index=torch.arange(8, device=device),
        response_lengths=torch.tensor([4, 4], device=device),
    )
    # What is looked for is structure, and not the rounding of 16 bits.
    computed_in, model.compute_dtype = model.compute_dtype, torch.float32
    packed = token_logprobs(model, both, temperature=1.0).logprobs
    if not torch.equal(packed, token_logprobs(model, both, temperature=1.0).logprobs):
        raise UserError(f"model={name!r}: two passes give different log-probs; is there a dropout that is not off?")
    model.set_attn_implementation("sdpa")
    for half, row in ((slice(0, 4), both.input_ids[:, :4]), (slice(4, 8), both.input_ids[:, 4:])):
        logits = whole(model(input_ids=row, use_cache=False).logits[0])
        plain = -cross_entropy(logits.float(), ids[half], reduction="none")
        if (gap := (plain - packed[half]).abs().max().item()) > 0.1:
            raise UserError(
                f"model={name!r}: log-probs of packed sequences are off by {gap:.2g}; "
                "models that change their logits after the head, or mix packed sequences, are not supported"
            )
    model.set_attn_implementation(PACKED)
    model.compute_dtype = computed_in
    reshard(model)


def reshard(model: nn.Module) -> None:
    """Let go of what a pass without gradient has gathered.

    FSDP2 keeps the last layers whole until the backward pass. Without one, checkpoints would not find shards, and
    changed weights would not be seen.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def named_weights(model: Any) -> PolicyWeights:
    """All weights by transformers' names, whole, one at a time, with adapters merged; every rank must iterate."""
    return PolicyWeights(model)


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
