"""The vLLM engine, in the trainer's own process: one class for CPU and GPU."""

import gc
import logging
import math
import os
import tempfile
from collections import deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig

from dclightning.errors import RunStoppedError, UserError, check_choice
from dclightning.lora import PolicyWeights, save_adapters
from dclightning.models import from_pretrained, has_experts
from dclightning.rollout.engine import Finished
from dclightning.rollout.types import Completion, Sampling
from dclightning.rollout.vllm_weights import (
    adapter_checksums,
    checksum,
    checksums,
    count_ranks_eagerly,
    differing,
    multiply_fp8_in_fp32,
    repack_for_cpu,
)

Quantization = Literal["none", "fp8", "fp8_per_channel", "fp8_per_block", "mxfp8", "int8", "int4", "mxfp4", "nvfp4"]
ONLINE = ("fp8", "fp8_per_channel", "fp8_per_block", "mxfp8", "mxfp4")
"""What vLLM quantises linear layers to while it loads them, given a GPU that can compute with it."""
ONLINE_ON_CPU = ("fp8_per_channel",)
"""And what of these on a CPU, but for experts."""
SETTINGS = ("quantization", "quantization_config", "kv_cache_dtype", "dtype", "hf_overrides")
"""What is no free option of vLLM here: some of it would be ignored, or computed wrongly, without a word."""

log = logging.getLogger(__name__)
_running: "WeakSet[VLLMEngine]" = WeakSet()
"""The engines of this process, which share vLLM's groups of processes."""


class VLLMEngine:
    """Samples with vLLM, and takes new weights without a restart.

    Args:
        quantization: What weights, and with most formats activations, of linear layers and experts are rounded to at
            each sync: ``fp8`` (one scale a tensor), ``fp8_per_channel``, ``fp8_per_block`` (128 x 128), ``mxfp8``,
            ``int8`` (per channel), ``int4`` (groups of 128, weights only), ``mxfp4`` (weights only) or ``nvfp4``.
        simulate: Whether to compute in ``dtype`` with rounded numbers, instead of with the format's own kernels:
            ``auto`` does so where vLLM has none for the device and the model.
        simulate_activations: Whether a simulation also rounds activations, if the format does.
        dtype: Of all that is not quantised: ``float32``, ``bfloat16``, ``float16``, or ``auto``: as the model says, and
            16 bits if it says ``float32``.
        kv_cache_dtype: Of keys and values: ``auto`` (as ``dtype``), or on a GPU what vLLM has, such as ``fp8``.
        kv_cache_gib: Memory of the KV cache. By default 1 GiB on a CPU, and what ``gpu_memory_utilization`` leaves on a
            GPU.
        gpu_memory_utilization: Share of the GPU that vLLM may use, weights included.
        tensor_parallel_size: Ranks that one engine spans; they draw the same responses. By default each rank has an
            engine of its own.
        sleep: Whether the engine gives its GPU memory to the trainer while the update runs.
        lora_rank: Largest rank of adapters that are taken as they are, in ``dtype``, beside the weights that the model
            was loaded with; 0 takes merged weights.
        routing_replay: Whether the engine tells which experts of a mixture it chose, so that training uses the same
            (R3). GPU only.
        enforce_eager: Whether to run without CUDA graphs and torch.compile; by default so on a CPU only.
        options: More arguments of ``vllm.LLM``.
    """

    def __init__(
        self,
        quantization: Quantization = "none",
        simulate: bool | Literal["auto"] = "auto",
        simulate_activations: bool = True,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        kv_cache_gib: float | None = None,
        gpu_memory_utilization: float = 0.5,
        tensor_parallel_size: int = 1,
        sleep: bool = False,
        lora_rank: int = 0,
        routing_replay: bool = False,
        enforce_eager: bool | None = None,
        options: dict[str, Any] | None = None,
    ) -> None:
        check_choice("quantization", quantization, Quantization)
        if simulate not in (True, False, "auto"):
            raise ValueError(f"simulate={simulate!r}: must be auto, true or false")
        if quantization == "none" and simulate is True:
            raise ValueError("simulate: there is nothing to simulate with quantization='none'")
        if settings := [name for name in SETTINGS if name in (options or {})]:
            raise ValueError(f"options: {settings[0]} is a setting of the engine itself, or follows from quantization")
        if not 0 <= lora_rank <= 512:
            raise ValueError(f"lora_rank={lora_rank}: must be from 0 to 512")
        if lora_rank and sleep:
            raise ValueError("sleep: must be false with lora_rank, for syncs bring adapters alone")
        self.quantization: Quantization = quantization
        self.simulate = simulate
        self.simulate_activations = simulate_activations
        self.dtype = dtype
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_cache_gib = kv_cache_gib
        self.gpu_memory_utilization = gpu_memory_utilization
        self.tensor_parallel_size = tensor_parallel_size
        self.sleep = sleep
        self.lora_rank = lora_rank
        self.routing_replay = routing_replay
        self.enforce_eager = enforce_eager
        self.options = options or {}
        self.version = 0
        self._llm: Any = None
        self._owns_process_group = False
        self._takes_weights = True
        self._asleep: set[str] = set()
        self._interrupted = False
        self._adapters: Any = None

    def start(self, model: str, max_length: int) -> None:
        """Load the model unless that is done; see :class:`~dclightning.rollout.engine.RolloutEngine`."""
        if self._llm is not None:
            return
        arguments = self.arguments(model, max_length)
        self._owns_process_group = not torch.distributed.is_initialized() or any(
            engine._owns_process_group for engine in _running
        )
        # In this process: half a minute faster to start, and weights are handed over by reference.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        from vllm import LLM

        torch.cpu._init_amx()  # vLLM's kernels use AMX where there is one, and the system wants to be asked first
        with _random_state_kept():  # vLLM reseeds the global generators
            try:
                self._llm = LLM(**arguments)
            except ValueError as error:
                reason = " ".join(str(error).split())
                raise UserError(f"vLLM cannot serve model={model!r} with {self._described()}: {reason}") from error
        _running.add(self)
        if self._llm.llm_engine.vllm_config.device_config.device_type == "cpu":
            self._llm.apply_model(multiply_fp8_in_fp32)
            count_ranks_eagerly()
        self.version = 0
        self._adapters = None
        self._asleep = set()

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
        self._wake("kv_cache")
        # Nothing of an earlier call may matter: not the cache, not the random state. vLLM draws in this process from
        # torch's global generator.
        self._llm.reset_prefix_cache()
        groups: list[list[Completion]] = [[] for _ in prompts]
        self._interrupted = False
        with _random_state_kept():
            torch.manual_seed(seed)
            engine = self._llm.llm_engine
            for place, ids in enumerate(prompts):
                engine.add_request(str(place), tokens_input(ids), parameters, lora_request=self._adapters)
            try:
                while engine.has_unfinished_requests():
                    if self._interrupted:
                        raise RunStoppedError("sampling was interrupted")
                    for request in engine.step():
                        place = int(request.request_id)
                        groups[place] = [completion(output, f"{place}.{output.index}") for output in request.outputs]
                        if finished is not None:
                            finished(place, groups[place])
            except BaseException:  # or the next call would be given what is left of this one
                engine.abort_request([str(place) for place in range(len(prompts))])
                raise
        return [completion for group in groups for completion in group]

    def distributions(self, contexts: list[list[int]], temperature: float) -> Tensor:
        """The next token's log-probabilities after each context, (contexts, vocabulary) float32."""
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        parameters = SamplingParams(
            max_tokens=1, temperature=temperature, logprobs=-1, flat_logprobs=True, detokenize=False, seed=0
        )
        self._wake("kv_cache")
        self._llm.reset_prefix_cache()
        vocabulary = self._llm.llm_engine.model_config.get_vocab_size()
        found = torch.full((len(contexts), vocabulary), -math.inf)
        with _random_state_kept():
            for start in range(0, len(contexts), 8):  # vLLM gives Python lists
                asked = [tokens_input(ids) for ids in contexts[start : start + 8]]
                requests = self._llm.generate(asked, parameters, use_tqdm=False, lora_request=self._adapters)
                for row, request in enumerate(requests, start):
                    logprobs = request.outputs[0].logprobs
                    found[row, torch.tensor(logprobs.token_ids)] = torch.tensor(logprobs.logprobs)
        return found

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; quantised ones are quantised anew, exactly as when they are loaded from a file.

        With ``lora_rank`` only the adapters are replaced.
        """
        if self.lora_rank:
            self._load_adapters(weights)
            self.version = version
            return
        if not self._takes_weights:
            name = self._llm.llm_engine.model_config.model
            raise UserError(f"model={name!r}: is quantised already; train the model that it was made from")
        self._wake("weights")
        dtype = self._llm.llm_engine.model_config.dtype
        rounded = ((name, weight.to(dtype)) for name, weight in weights)
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": rounded})
        self._llm.apply_model(repack_for_cpu)
        self.version = version

    def _load_adapters(self, weights: Any) -> None:
        lora = weights.lora if isinstance(weights, PolicyWeights) else None
        if lora is None:
            raise UserError(
                f"engine lora_rank={self.lora_rank}: there are no adapters; set model.lora, or lora_rank to 0"
            )
        if lora.rank > self.lora_rank:
            raise UserError(f"engine lora_rank={self.lora_rank}: must be at least model.lora.rank, {lora.rank}")
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory() as folder:
            save_adapters(weights.adapters(), lora, self._llm.llm_engine.model_config.model, Path(folder))
            self._llm.llm_engine.add_lora(LoRARequest("policy", 1, folder, load_inplace=True))
        self._adapters = LoRARequest("policy", 1, "loaded already")

    def differing_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Names of vLLM's weights that are not the given ones; it cannot tell of quantised, repacked or split ones."""
        if self.tensor_parallel_size > 1:
            deque(weights, maxlen=0)  # gathering them takes all ranks
            return []
        dtype = self._llm.llm_engine.model_config.dtype
        ((held, fused),) = self._llm.apply_model(partial(checksums, dtype=dtype))
        sent = {name: checksum(weight.to(dtype)) for name, weight in weights}
        if self.lora_rank and isinstance(weights, PolicyWeights) and weights.lora is not None:
            sent |= adapter_checksums(weights.adapters(), weights.lora.scale, dtype)
        return differing(held, fused, sent)

    def make_room(self) -> None:
        """Let go of weights, which the next sync brings, and of the KV cache, if ``sleep`` says so."""
        if self.sleep and not self._asleep and torch.cuda.is_available():
            self._llm.sleep(level=2)
            self._asleep = {"weights", "kv_cache"}

    def interrupt(self) -> None:
        """Let a running :meth:`generate` give up at its next step."""
        self._interrupted = True

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            self._llm.wake_up(tags=[part])
            self._asleep.remove(part)

    def close(self) -> None:
        """Shut vLLM down and free its memory."""
        if self._llm is None:
            return
        from vllm.distributed import parallel_state
        from vllm.v1.engine import core

        _running.discard(self)
        clean_up = core.cleanup_dist_env_and_memory
        if _running:  # they still compute with vLLM's groups
            core.cleanup_dist_env_and_memory = lambda: None
        elif not self._owns_process_group:  # which outlives the engine, and vLLM would destroy
            core.cleanup_dist_env_and_memory = parallel_state.destroy_model_parallel
        try:
            self._llm.llm_engine.engine_core.shutdown()
        finally:
            core.cleanup_dist_env_and_memory = clean_up
        self._llm = None
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def arguments(self, model: str, max_length: int) -> dict[str, Any]:
        """vLLM's own arguments for these settings; see :meth:`start`."""
        from vllm.platforms import current_platform

        cpu = current_platform.is_cpu()
        config = from_pretrained(AutoConfig, model)
        if cpu and self.kv_cache_dtype not in ("auto", self.dtype):
            raise UserError(
                f"engine kv_cache_dtype={self.kv_cache_dtype!r}: on a CPU it must be auto; vLLM has no kernels for it, "
                "or computes garbage"
            )
        self._takes_weights = getattr(config, "quantization_config", None) is None
        if self.routing_replay and not has_experts(config):
            raise UserError(f"engine routing_replay=true: model={model!r} has no experts")
        if self.routing_replay and cpu:
            raise UserError("engine routing_replay=true: vLLM tells the experts on GPUs only")
        if self.lora_rank and cpu and has_experts(config):
            raise UserError(f"engine lora_rank={self.lora_rank}: must be 0 for models with experts on a CPU")
        memory = self.kv_cache_gib if self.kv_cache_gib is not None else 1.0 if cpu else None
        return {
            "model": model,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            **self._quantized(cpu, config),
            "max_model_len": max_length,
            "enforce_eager": cpu if self.enforce_eager is None else self.enforce_eager,
            "logprobs_mode": "processed_logprobs",  # the default ignores the temperature
            "max_logprobs": -1,  # whole distributions, if they are asked for
            "disable_log_stats": True,
            **({"enable_return_routed_experts": True} if self.routing_replay else {}),
            **self._adapted(),
            "use_tqdm_on_load": False,
            "tensor_parallel_size": self.tensor_parallel_size,
            **_beside_ranks(),
            **({} if cpu else {"gpu_memory_utilization": self.gpu_memory_utilization, "enable_sleep_mode": self.sleep}),
            **({} if memory is None else {"kv_cache_memory_bytes": int(memory * 2**30)}),
            **self.options,
        }

    def _adapted(self) -> dict[str, Any]:
        """vLLM's arguments for adapters; it has buffers for some ranks only."""
        if not self.lora_rank:
            return {}
        from vllm.config.lora import MaxLoRARanks

        return {"enable_lora": True, "max_lora_rank": min(r for r in get_args(MaxLoRARanks) if r >= self.lora_rank)}

    def _quantized(self, cpu: bool, config: Any) -> dict[str, Any]:
        """vLLM's arguments for the format: its own kernels, or the simulation."""
        if self.quantization == "none":
            return {}
        missing = self._missing(cpu, config)
        if missing and self.simulate is False:
            raise UserError(
                f"engine quantization={self.quantization!r}: {missing}; set simulate to true, or another quantization"
            )
        if not missing and self.simulate is not True:
            return {"quantization": self.quantization}
        if self.simulate == "auto":
            log.warning("engine quantization=%r is simulated: %s", self.quantization, missing)
        from dclightning.rollout.simulated import overrides  # imports vLLM

        return {"hf_overrides": overrides(self.quantization, self.simulate_activations)}

    def _missing(self, cpu: bool, config: Any) -> str | None:
        """Why vLLM cannot compute in the format itself, or None."""
        if self.quantization not in ONLINE:
            return "vLLM reads it from checkpoints only, where each sync has to quantise anew"
        if cpu and self.quantization not in ONLINE_ON_CPU:
            return f"vLLM has no CPU kernel for it, only for {', '.join(ONLINE_ON_CPU)}"
        if cpu and has_experts(config):
            return "vLLM has no CPU kernel for quantised experts"
        if self.dtype == "float32":
            return "vLLM quantises with dtype bfloat16 or float16 only"
        return None

    def _described(self) -> str:
        return f"quantization={self.quantization!r}, dtype={self.dtype!r}, kv_cache_gib={self.kv_cache_gib}"


def _beside_ranks() -> dict[str, Any]:
    """Engines of ranks, or of groups of them: vLLM joins the trainer's processes, instead of starting some."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return {}
    rank = torch.distributed.get_rank()
    os.environ.setdefault("RANK", str(rank))
    os.environ.setdefault("LOCAL_RANK", str(torch.cuda.current_device() if torch.cuda.is_available() else rank))
    return {"distributed_executor_backend": "external_launcher"}


def _random_state_kept() -> Any:
    # By default torch would open a context on every GPU in sight.
    return torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else [])


def completion(output: Any, sample: str) -> Completion:
    """One of the outputs of a request to vLLM; ``sample`` names it where it is wrong."""
    token_ids, logprobs = list(output.token_ids), list(output.logprobs.logprobs)
    if len(logprobs) != len(token_ids):
        raise RuntimeError(f"sample {sample}: vLLM gave {len(logprobs)} log-probs for {len(token_ids)} tokens")
    for position, logprob in enumerate(logprobs):
        if not -math.inf < logprob <= 1e-4:
            raise RuntimeError(f"sample {sample}: log-prob of token {position} is {logprob}; must be finite, at most 0")
    return Completion(
        token_ids,
        logprobs,
        "length" if output.finish_reason == "length" else "stop",
        ranks=list(output.logprobs.ranks),
        experts=None if output.routed_experts is None else torch.from_numpy(output.routed_experts.astype(np.int16)),
    )
