"""What is done inside vLLM: checksums of weights, what a change of them needs, and what is slow on CPUs mended."""

import logging
import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger(__name__)


def _is_news(record: logging.LogRecord) -> bool:
    """Not that rotary embeddings and tied heads, which have no weights of their own, "failed to load" them."""
    layer = str(record.args[0]) if isinstance(record.args, tuple) and record.args else ""
    ownless = layer.endswith(("RotaryEmbedding", "ParallelLMHead"))
    return not (ownless and "Failed to load weights" in str(record.msg))


logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(_is_news)


def checksums(model: nn.Module, dtype: torch.dtype) -> tuple[dict[str, int], dict[str, list[str]]]:
    """Of each weight that is as it was loaded, and which modules are several of the checkpoint's in one."""
    from dclightning.rollout.simulated import SimulatedExperts, SimulatedLinear

    held = {}
    for path, module in model.named_modules():
        if not isinstance(getattr(module, "quant_method", None), SimulatedLinear | SimulatedExperts):
            for name, weight in module.named_parameters(recurse=False):
                if weight.numel() and weight.dtype in (torch.float32, torch.bfloat16, torch.float16):
                    held[f"{path}.{name}"] = checksum(weight.to(dtype))  # some stay FP32 in an engine of 16 bits
        for kind in ("A", "B"):
            if isinstance(parts := getattr(module, f"lora_{kind.lower()}_stacked", None), tuple):
                held[f"{path}.lora_{kind}"] = sum(checksum(part) for part in parts)
    return held, getattr(model, "packed_modules_mapping", {})


def adapter_checksums(adapters: dict[str, Tensor], scale: float, dtype: torch.dtype) -> dict[str, int]:
    """Of adapters as vLLM holds them, with the scale in B."""
    sent = {}
    for name, weight in adapters.items():
        layer, kind = name.rsplit(".", 3)[:2]
        sent[f"{layer}.{kind}"] = checksum(weight.to(dtype) * (scale if kind == "lora_B" else 1))
    return sent


def checksum(weight: Tensor) -> int:
    """The sum of the numbers' bits: neither order nor zeros beside them matter, so that parts add up to a whole."""
    bits = torch.int32 if weight.element_size() == 4 else torch.int16
    return int(weight.detach().contiguous().view(bits).sum(dtype=torch.int64))


def differing(held: dict[str, int], fused: dict[str, list[str]], sent: dict[str, int]) -> list[str]:
    """The names of vLLM's weights that are not the sent ones, by what :func:`checksums` says and theirs."""
    found, compared = [], 0
    for name, total in held.items():
        module = name.split(".")[-2]
        parts = [name.replace(f".{module}.", f".{part}.") for part in fused.get(module, [module])]
        if name.endswith((".lora_A", ".lora_B")) or all(part in sent for part in parts):
            compared += 1
            found += [name] if total != sum(sent.get(part, 0) for part in parts) else []  # where no adapter is: zeros
    log.log(logging.DEBUG if compared else logging.WARNING, "%d of vLLM's weights can be compared", compared)
    return found


def count_ranks_eagerly() -> None:
    """Let vLLM not compile the one small function that ranks sampled tokens: on a CPU it takes seconds for nothing.

    It is ``batched_count_greater_than`` of ``vllm.v1.sample.ops.logprobs``, compiled even if all else is eager.
    """
    from vllm.v1.sample import sampler

    compiled = sampler.batched_count_greater_than
    sampler.batched_count_greater_than = getattr(compiled, "_torchdynamo_orig_callable", compiled)


def multiply_fp8_in_fp32(model: nn.Module) -> None:
    """Take FP8 products away from oneDNN: on CPUs with AMX, but without its FP8, that is 500 times slower.

    The FP8 numbers of now are kept in FP32 beside the weights, so new weights need another call.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "fp8_linear", None)
        if kernel is not None:
            kernel.apply_scaled_mm = partial(_fp8_product, module.get_parameter("weight").float())


def _fp8_product(weight: Tensor, **given: Any) -> Tensor:
    """FP8 numbers multiplied in FP32, where their products are exact, with a scale for each row and column."""
    shape, bias = given["output_shape"], given["bias"]
    tokens = math.prod(shape[:-1])
    output = given["A"][:tokens].float() @ weight * given["As"][:tokens] * given["Bs"].t()
    return (output if bias is None else output + bias).to(given["out_dtype"]).view(shape)  # type: ignore[no-any-return]


def repack_for_cpu(model: nn.Module) -> None:
    """Rebuild what vLLM's CPU kernels keep beside the weights and its reload leaves stale, silently."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    multiply_fp8_in_fp32(model)
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):  # a head tied to the embedding
            module.quant_method.process_weights_after_loading(module)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and isinstance(module.quant_method, UnquantizedFusedMoEMethod):
            kernel.fused_experts.process_weights_after_loading(module)
