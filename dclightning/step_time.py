"""How long a training step takes, from the number of operations and bytes in it: a roofline, not a measurement.

Left out: rewards, prompts, the optimizer's step, communication of tensor and expert parallelism, and whatever does not
overlap that could.
"""

from dataclasses import dataclass
from typing import Any, Literal

from dclightning.memory import Layout, Part, active, engine_weights, experts_used, total
from dclightning.rehearsal import head_dim

GPUName = Literal["A100-80GB", "H100", "H200", "B200", "L40S"]


@dataclass(frozen=True)
class GPU:
    """A device as its vendor's data sheet has it; operations are dense ones."""

    memory: float
    """Bytes, from decimal GB. CUDA shows up to 7 % more, which is left to contexts, NCCL and fragmentation."""
    bandwidth: float
    """Of that memory, bytes a second."""
    link: float
    """To other GPUs in one direction, bytes a second. Between nodes as much is assumed."""
    float32: float
    """Operations a second, without tensor cores."""
    bfloat16: float
    """And in FP16."""
    fp8: float
    """As BF16, where there are no products in FP8."""


GPUS: dict[GPUName, GPU] = {
    "A100-80GB": GPU(80e9, 2.039e12, 300e9, 19.5e12, 312e12, 312e12),
    "H100": GPU(80e9, 3.35e12, 450e9, 67e12, 989e12, 1979e12),
    "H200": GPU(141e9, 4.8e12, 450e9, 67e12, 989e12, 1979e12),
    "B200": GPU(180e9, 7.7e12, 900e9, 75e12, 2250e12, 4500e12),
    "L40S": GPU(48e9, 0.864e12, 32e9, 91.6e12, 362e12, 733e12),
}
"""From NVIDIA's data sheets: A100, H100 and H200 as SXM, B200 as one of the eight of an HGX board. Operations of tensor
cores are given there with sparsity, too, which is twice as many."""


@dataclass(frozen=True)
class Phase:
    """A part of the step."""

    name: str
    seconds: float
    how: str


@dataclass(frozen=True)
class Work:
    """What a step has to do, and how well."""

    responses: int
    """Of all ranks."""
    length: int
    """Their mean, in tokens."""
    longest: int
    """Somebody's, in tokens."""
    micro_batch_tokens: int
    mfu: float
    """Share of the GPU's operations a second that is reached."""
    bandwidth_utilization: float
    """Share of its bytes a second that is reached, of memory and links."""


def scoring_and_update(
    config: Any, of: list[Part], layout: Layout, work: Work, gpu: GPU, precision: str, checkpointing: bool, passes: int
) -> list[Phase]:
    """The old log-probs and the update: operations, or what moves between GPUs, if that takes longer.

    Args:
        config: The model's, of transformers.
        of: All parameters.
        layout: How they are spread.
        work: The step's.
        gpu: What is computed with.
        precision: ``model.precision``.
        checkpointing: ``model.gradient_checkpointing``.
        passes: Forward passes without gradient: one, and one for a reference policy.
    """
    tokens = work.responses * work.length
    peak = work.mfu * (gpu.float32 if precision == "float32" else gpu.bfloat16)
    forward = tokens * operations(config, active(of, config), work.length / 2) / layout.ranks / peak
    batches = max(1.0, tokens / layout.replicas / work.micro_batch_tokens)
    size = 2 if layout.sharded and precision == "bfloat16" else 4
    gathered, reduced = (batches * size * total(of, "used"), batches * 4 * total(of, "used"))
    link = work.bandwidth_utilization * gpu.link
    if layout.ranks == layout.tensor_parallel_size:
        gathered = reduced = 0.0
    factor = 4 if checkpointing else 3
    if layout.sharded:
        score, update = passes * gathered / link, (2 * gathered + reduced) / link
    else:
        score, update = 0.0, 2 * reduced / link
    return [
        _slower("score", passes * forward, "operations of the forward pass", score, "moving weights"),
        _slower(
            "update",
            factor * forward,
            f"operations of {factor} forward passes",
            update,
            "moving weights and gradients",
        ),
    ]


def operations(config: Any, numbers: float, context: float) -> float:
    """Floating-point operations of a token's forward pass.

    Args:
        config: The model's.
        numbers: That the token is multiplied with, from :func:`~dclightning.memory.active`.
        context: Tokens that it attends to.
    """
    text = config.get_text_config()
    return float(2 * numbers + 4.0 * text.num_hidden_layers * text.num_attention_heads * head_dim(config) * context)


def rollout(
    config: Any, of: list[Part], layout: Layout, work: Work, gpu: GPU, engine: Any, cache_tokens: float, kv_bytes: float
) -> Phase:
    """Sampling: each engine step reads the weights and the running responses' keys and values, or computes for longer.

    Responses run side by side as far as the cache has room for whole ones, and until the longest has ended.

    Args:
        config: The model's, of transformers.
        of: All parameters.
        layout: How they are spread.
        work: The step's.
        gpu: What is computed with.
        engine: A :class:`~dclightning.rollout.vllm.VLLMEngine`.
        cache_tokens: Tokens that the KV cache has room for.
        kv_bytes: A token's, on each GPU.
    """
    engines = layout.ranks // engine.tensor_parallel_size
    tokens = work.responses * work.length / engines
    at_once = min(work.responses / engines, cache_tokens / work.length)
    steps = max(work.longest, tokens / at_once)
    running = tokens / steps
    weights = engine_weights(of, engine)
    experts = weights * total([part for part in of if part.is_expert]) / total(of)
    read = weights - experts * (1 - experts_used(config, running)) + running * kv_bytes * work.length / 2
    quantized = engine.quantization != "none" and engine.simulate is not True
    peak = gpu.fp8 if quantized and "fp8" in engine.quantization else gpu.bfloat16
    computed = operations(config, active(of, config), work.length / 2) / engine.tensor_parallel_size
    return _slower(
        "rollout",
        steps * running * computed / (work.mfu * peak),
        "operations",
        steps * read / (work.bandwidth_utilization * gpu.bandwidth),
        f"memory: {steps:,.0f} engine steps, {running:,.0f} of {work.responses / engines:,.0f} responses at a time",
    )


def synchronisation(of: list[Part], layout: Layout, work: Work, gpu: GPU, engine: Any) -> Phase:
    """Each rank gathers all weights in FP32, and writes them to its engine."""
    gathering = 4 * total(of) / gpu.link if layout.sharded and layout.ranks > 1 else 0.0
    writing = (4 * total(of) + engine_weights(of, engine)) / gpu.bandwidth
    return Phase("sync", (gathering + writing) / work.bandwidth_utilization, "gathering in FP32, writing to the engine")


def _slower(name: str, computing: float, operations: str, moving: float, bytes_: str) -> Phase:
    return Phase(name, max(computing, moving), operations if computing >= moving else bytes_)
