"""The vLLM engine, in the trainer's own process: one class for CPU and GPU."""

import math
import os
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dclightning.errors import UserError
from dclightning.rollout.engine import Finished
from dclightning.rollout.types import Completion, Sampling

CPU_QUANTIZATIONS = ("fp8_per_channel",)
"""The online quantisations whose kernels vLLM has for a CPU."""


class VLLMEngine:
    """Samples with vLLM, and takes new weights without a restart.

    Args:
        quantization: One of vLLM's online quantisations, such as ``fp8`` (GPU) or ``fp8_per_channel`` (also CPU): every
            sync quantises the trainer's weights anew. None leaves them in ``dtype``.
        dtype: Of weights and activations: ``auto`` (as the model says), ``float32``, ``bfloat16`` or ``float16``.
        kv_cache_gib: Memory of the KV cache. By default 1 GiB on a CPU, and what ``gpu_memory_utilization`` leaves on a
            GPU.
        gpu_memory_utilization: Share of the GPU that vLLM may use, weights included.
        tensor_parallel_size: GPUs that one engine spans. Only 1 can run at present.
        enforce_eager: Whether to run without CUDA graphs and torch.compile; by default so on a CPU only.
        options: More arguments of ``vllm.LLM``.
    """

    def __init__(
        self,
        quantization: str | None = None,
        dtype: str = "auto",
        kv_cache_gib: float | None = None,
        gpu_memory_utilization: float = 0.5,
        tensor_parallel_size: int = 1,
        enforce_eager: bool | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.quantization = quantization
        self.dtype = dtype
        self.kv_cache_gib = kv_cache_gib
        self.gpu_memory_utilization = gpu_memory_utilization
        self.tensor_parallel_size = tensor_parallel_size
        self.enforce_eager = enforce_eager
        self.options = options or {}
        self.version = 0
        self._llm: Any = None
        self._owns_process_group = False

    def start(self, model: str, max_length: int) -> None:
        """Load the model unless that is done; see :class:`~dclightning.rollout.engine.RolloutEngine`."""
        if self._llm is not None:
            return
        arguments = self._arguments(model, max_length)
        self._owns_process_group = not torch.distributed.is_initialized()
        # In this process: half a minute faster to start, and weights are handed over by reference.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        with _random_state_kept():  # vLLM reseeds the global generators
            try:
                self._llm = LLM(**arguments)
            except ValueError as error:
                reason = " ".join(str(error).split())
                raise UserError(f"vLLM cannot serve model={model!r} with {self._described()}: {reason}") from error
        self.version = 0

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        group_size: int,
        seed: int,
        finished: Finished | None = None,
    ) -> list[Completion]:
        """Draw ``group_size`` responses to each prompt, those of a prompt side by side."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        parameters = SamplingParams(
            n=group_size,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        # Nothing of an earlier call may matter: not the cache, not the random state. vLLM draws in this process from
        # torch's global generator.
        self._llm.reset_prefix_cache()
        groups: list[list[Completion]] = [[] for _ in prompts]
        with _random_state_kept():
            torch.manual_seed(seed)
            engine = self._llm.llm_engine
            for place, ids in enumerate(prompts):
                engine.add_request(str(place), tokens_input(ids), parameters)
            try:
                while engine.has_unfinished_requests():
                    for request in engine.step():
                        place = int(request.request_id)
                        groups[place] = [_completion(output, f"{place}.{output.index}") for output in request.outputs]
                        if finished is not None:
                            finished(place, groups[place])
            except BaseException:  # or the next call would be given what is left of this one
                engine.abort_request([str(place) for place in range(len(prompts))])
                raise
        return [completion for group in groups for completion in group]

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; quantised ones are quantised anew, exactly as when they are loaded from a file."""
        dtype = self._llm.llm_engine.model_config.dtype
        rounded = ((name, weight.to(dtype)) for name, weight in weights)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": rounded})
        self._llm.apply_model(_repack_for_cpu)
        self.version = version

    def close(self) -> None:
        """Shut vLLM down and free its memory."""
        if self._llm is None:
            return
        self._llm.llm_engine.engine_core.shutdown()
        self._llm = None
        if self._owns_process_group:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()

    def _arguments(self, model: str, max_length: int) -> dict[str, Any]:
        from vllm.platforms import current_platform

        cpu = current_platform.is_cpu()
        if self.tensor_parallel_size > 1:
            raise UserError(
                f"engine tensor_parallel_size={self.tensor_parallel_size}: only 1 can run in this version, "
                "one engine beside each rank"
            )
        if cpu and self.quantization is not None and self.quantization not in CPU_QUANTIZATIONS:
            raise UserError(
                f"engine quantization={self.quantization!r}: vLLM has no CPU kernel for it; "
                f"on a CPU use {' or '.join(CPU_QUANTIZATIONS)}, or none"
            )
        kv_cache_dtype = self.options.get("kv_cache_dtype", "auto")
        if cpu and self.dtype == "float32" and kv_cache_dtype not in ("auto", "float32"):
            raise UserError(f"engine kv_cache_dtype={kv_cache_dtype!r}: vLLM computes garbage with dtype='float32'")
        memory = self.kv_cache_gib if self.kv_cache_gib is not None else 1.0 if cpu else None
        return {
            "model": model,
            "quantization": self.quantization,
            "dtype": self.dtype,
            "max_model_len": max_length,
            "enforce_eager": cpu if self.enforce_eager is None else self.enforce_eager,
            "logprobs_mode": "processed_logprobs",  # the default ignores the temperature
            "disable_log_stats": True,
            "use_tqdm_on_load": False,
            **({} if cpu else {"gpu_memory_utilization": self.gpu_memory_utilization, **_beside_ranks()}),
            **({} if memory is None else {"kv_cache_memory_bytes": int(memory * 2**30)}),
            **self.options,
        }

    def _described(self) -> str:
        return f"quantization={self.quantization!r}, dtype={self.dtype!r}, kv_cache_gib={self.kv_cache_gib}"


def _beside_ranks() -> dict[str, Any]:
    """On several GPUs each rank has an engine on its own; vLLM finds the device from the launcher's environment."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return {}
    os.environ.setdefault("RANK", str(torch.distributed.get_rank()))
    os.environ.setdefault("LOCAL_RANK", str(torch.cuda.current_device()))
    return {"distributed_executor_backend": "external_launcher"}


def _random_state_kept() -> Any:
    # By default torch would open a context on every GPU in sight.
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])


def _completion(output: Any, sample: str) -> Completion:
    token_ids, logprobs = list(output.token_ids), list(output.logprobs.logprobs)
    if len(logprobs) != len(token_ids):
        raise RuntimeError(f"sample {sample}: vLLM gave {len(logprobs)} log-probs for {len(token_ids)} tokens")
    for position, logprob in enumerate(logprobs):
        if not -math.inf < logprob <= 1e-4:
            raise RuntimeError(f"sample {sample}: log-prob of token {position} is {logprob}; must be finite, at most 0")
    return Completion(token_ids, logprobs, "length" if output.finish_reason == "length" else "stop")


def _repack_for_cpu(model: nn.Module) -> None:
    """Rebuild what vLLM's CPU kernels keep beside the weights and its reload leaves stale, silently."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and hasattr(module, "cpu_linear"):  # a head tied to the embedding
            module.quant_method.process_weights_after_loading(module)
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and type(module.quant_method).__name__ == "UnquantizedFusedMoEMethod":
            kernel.fused_experts.process_weights_after_loading(module)
