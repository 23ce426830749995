"""What a run keeps on each GPU, from the model's config and the layout alone: no weight is read.

Numbers of parameters are exact: they are those of a model without storage, cut as transformers cuts it
(``transformers.distributed``). What a pass takes on top is counted in ``rehearsal.py``.
"""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from dclightning.lora import LoRA, add_adapters
from dclightning.rehearsal import head_dim
from dclightning.strategies import EXPERT_COUNTS

CUT_BY_TENSOR_PARALLELISM = ("colwise", "rowwise", "packed_", "embedding_rowwise")
"""How the names of transformers' tensor parallel styles begin that cut a layer's weight."""
BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0}
QUANTIZED_BYTES = {
    "fp8": 1.0,
    "fp8_per_channel": 1.0,
    "fp8_per_block": 1.0 + 4 / 128**2,
    "mxfp8": 1.0 + 1 / 32,
    "mxfp4": 0.5 + 1 / 32,
}
"""Bytes of a quantised number, scales included, in the formats that vLLM computes with on GPUs. The others are
simulated: rounded, and held as they were. The scales of a tensor or of a channel are too few to count."""


@dataclass(frozen=True)
class Layout:
    """How a model is spread over ranks."""

    ranks: int
    sharded: bool
    """Whether by :class:`~dclightning.strategies.ParallelStrategy`; otherwise each rank has all of it."""
    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1

    @property
    def replicas(self) -> int:
        """How many groups of ranks hold different data."""
        return self.ranks // self.tensor_parallel_size


@dataclass(frozen=True)
class Part:
    """A parameter as one rank has it; all counts are of numbers, not bytes."""

    name: str
    whole: int
    used: int
    """What the rank computes with: its cut of the layer, gathered."""
    held: int
    """What it keeps: its shard. On ranks whose shard would be smaller, FSDP2 pads."""
    unit: str
    """What is gathered together: a layer, the embeddings, or the head with the last norm."""
    is_embedding: bool
    """Whether it is looked up, and nothing else."""
    is_expert: bool
    is_matrix: bool


def skeleton(config: Any) -> nn.Module:
    """The model without storage, on the meta device."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def adapter_count(config: Any, lora: LoRA) -> int:
    """Numbers of the adapters beside a model's linear layers."""
    model = skeleton(config)
    add_adapters(model, lora, seed=0)
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def parts(model: Any, layout: Layout) -> list[Part]:
    """All parameters of a model, tied ones once.

    Args:
        model: From :func:`skeleton`.
        layout: How it is spread.
    """
    looked_up, head = model.get_input_embeddings(), model.get_output_embeddings()
    found = []
    for name, parameter in model.named_parameters():
        is_head = parameter is head.weight
        is_expert = ".experts." in name
        cut, cuts_rows = _cut(model, name, parameter, layout)
        shards = layout.ranks // cut if is_expert and cut > 1 else layout.replicas
        found.append(
            Part(
                name=name,
                whole=parameter.numel(),
                used=parameter.numel() // cut,
                held=_held(parameter.shape, cut, cuts_rows, shards if layout.sharded else 1),
                unit="head" if is_head else _unit(model, name),
                is_embedding=parameter is looked_up.weight and not is_head,
                is_expert=is_expert,
                is_matrix=parameter.dim() > 1,
            )
        )
    return found


def total(of: list[Part], count: Literal["whole", "used", "held"] = "whole") -> int:
    """The sum of one of the counts."""
    return sum(getattr(part, count) for part in of)


def active(of: list[Part], config: Any) -> float:
    """Numbers that a token is multiplied with: matrices, of experts those that it is sent to; no looked-up table."""
    matrices = [part for part in of if part.is_matrix and not part.is_embedding]
    share = experts_used(config, 1)
    return sum(part.whole * (share if part.is_expert else 1.0) for part in matrices)


def experts_used(config: Any, tokens: float) -> float:
    """The share of experts that some of so many tokens are sent to, if routing is even; 1 without experts."""
    text = config.get_text_config()
    if not getattr(text, "num_experts_per_tok", None):
        return 1.0
    return float(1 - (1 - text.num_experts_per_tok / expert_count(config)) ** tokens)


def expert_count(config: Any) -> int:
    """Experts of each layer, or 0."""
    text = config.get_text_config()
    return next((int(n) for name in EXPERT_COUNTS if (n := getattr(text, name, None))), 0)


def communication_buffers(of: list[Part], layout: Layout, gathered_bytes: float) -> float:
    """Memory of what FSDP2 gathers and reduces, or of DDP's buckets, in bytes; an upper bound.

    FSDP2 holds the layer that is computed with and the next, the head from the forward to the backward pass, and the
    FP32 gradients of one unit that are being reduced. With one rank the model is one unit.

    Args:
        of: All parameters.
        layout: How they are spread.
        gathered_bytes: Of a gathered number.
    """
    if not layout.sharded:
        return 4.0 * total(of) if layout.ranks > 1 else 0.0
    if layout.ranks == 1:
        return (gathered_bytes + 4.0) * total(of)
    units: dict[str, int] = defaultdict(int)
    for part in of:
        units[part.unit] += part.used
    head = units.pop("head", 0)
    return gathered_bytes * (head + 2 * max(units.values())) + 4.0 * max(head, *units.values())


def engine_weights(of: list[Part], engine: Any) -> float:
    """Memory of vLLM's weights on each of the GPUs that it spans, in bytes.

    Matrices of layers are quantised; embeddings, head and norms are not.

    Args:
        of: All parameters.
        engine: A :class:`~dclightning.rollout.vllm.VLLMEngine`.
    """
    plain = _engine_bytes(engine)
    quantized = plain if engine.simulate is True else QUANTIZED_BYTES.get(engine.quantization, plain)
    in_layers = [part for part in of if part.is_matrix and not part.is_embedding and part.unit != "head"]
    count = total(in_layers)
    return (quantized * count + plain * (total(of) - count)) / int(engine.tensor_parallel_size)


def kv_bytes_per_token(config: Any, engine: Any) -> float:
    """Memory of a token's keys and values in all layers, on each of the GPUs that the engine spans, in bytes.

    Every layer counts as one of full attention.
    """
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    heads = max(1, heads // engine.tensor_parallel_size)
    size = 1.0 if engine.kv_cache_dtype.startswith("fp8") else _engine_bytes(engine)
    return float(text.num_hidden_layers * heads * head_dim(config) * 2 * size)


def engine_workspace(config: Any, tokens: int, sequences: int) -> float:
    """Memory of vLLM's own activations and logits, in bytes.

    Args:
        config: The model's.
        tokens: Most tokens of an engine step, of which each holds two rows of the residual stream and two of the
            layer's widest product, in 16 bits.
        sequences: Most sequences of an engine step, each of which holds its logits and their log-softmax in FP32.
    """
    text = config.get_text_config()
    wide = (getattr(text, "moe_intermediate_size", None) or 0) * (getattr(text, "num_experts_per_tok", None) or 0)
    wide = wide or getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return float(2 * tokens * (2 * text.hidden_size + 2 * wide) + 8 * sequences * text.vocab_size)


def _engine_bytes(engine: Any) -> float:
    return BYTES.get(engine.dtype, 2.0)  # auto is 16 bits


def _cut(model: Any, name: str, parameter: nn.Parameter, layout: Layout) -> tuple[int, bool]:
    """Into how many parts tensor or expert parallelism cuts a parameter; whether through dimension 0, as FSDP2 does."""
    if layout.expert_parallel_size > 1 and _style(model.ep_plan, name) == "grouped_gemm":
        return layout.expert_parallel_size, True
    style = _style(model.tp_plan, name) or ""
    if not style.startswith(CUT_BY_TENSOR_PARALLELISM) or (style.startswith("rowwise") and parameter.dim() == 1):
        return 1, True
    return layout.tensor_parallel_size, not style.startswith("rowwise")


def _held(shape: torch.Size, cut: int, cuts_rows: bool, shards: int) -> int:
    rows, rest = shape[0], shape[1:].numel()
    rows, rest = (-(-rows // cut), rest) if cuts_rows else (rows, -(-rest // cut))
    return -(-rows // shards) * rest


def _style(plan: dict[str, str], name: str) -> str | None:
    """The entry of a plan of transformers for a parameter, or for the module that it is of."""
    name = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    return plan.get(name) or plan.get(name.rpartition(".")[0])


def _unit(model: Any, name: str) -> str:
    """What of transformers' plan for FSDP2 a parameter belongs to."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        unit = ".".join(words[:count])
        if (kind := model.fsdp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", unit))) is not None:
            return "head" if kind == "keep_full_weight" else unit
    return "the rest"
