"""What a run takes of each GPU's memory and how long a step is, put together from a run's parts; nothing is started."""

from dataclasses import dataclass
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from transformers import AutoConfig

from dclightning.doctor import GIB
from dclightning.errors import UserError
from dclightning.lora import check_adapters
from dclightning.memory import (
    Layout,
    Part,
    adapter_count,
    communication_buffers,
    engine_weights,
    engine_workspace,
    kv_bytes_per_token,
    parts,
    skeleton,
    total,
)
from dclightning.models import from_pretrained
from dclightning.rehearsal import of_one_rank, rehearse
from dclightning.rollout.shares import Shares
from dclightning.rollout.vllm import VLLMEngine
from dclightning.step_time import GPU, GPUS, GPUName, Phase, Work, rollout, scoring_and_update, synchronisation
from dclightning.strategies import ParallelStrategy, check_layout, replicas

PHASES = ("update", "step", "rollout")
"""When memory is looked at: in forward and backward passes, in the optimizer's step, and while the engine samples."""


@dataclass(frozen=True)
class Item:
    """What takes memory of a GPU."""

    name: str
    how: str
    size: float
    """Bytes."""
    phases: tuple[str, ...] = PHASES
    """When it is there."""
    of_engine: bool = False
    """Whether it is gone while the engine sleeps."""


@dataclass(frozen=True)
class Plan:
    """What a run is estimated to take."""

    items: list[Item]
    times: list[Phase]
    memory: float
    """The GPU's, in bytes."""
    sleeps: bool
    """Whether the engine does in the update."""
    problems: list[str]
    """What cannot be, however much memory is left."""
    helps: list[str]
    """What would make it smaller."""

    def needed(self, phase: str, sleeps: bool) -> float:
        """Bytes of a GPU that are needed in a phase."""
        asleep = sleeps and phase != "rollout"
        return sum(item.size for item in self.items if phase in item.phases and not (asleep and item.of_engine))

    @property
    def excess(self) -> float:
        """Bytes that the largest phase is over the GPU's memory; negative if it fits."""
        return max(self.needed(phase, self.sleeps) for phase in PHASES) - self.memory

    @property
    def seconds(self) -> float:
        """Of a whole step."""
        return sum(phase.seconds for phase in self.times)

    @property
    def fits(self) -> bool:
        """Whether there is memory for all that the run does."""
        return self.excess <= 0 and not self.problems


def estimate(
    trainer: Any,
    module: Any,
    datamodule: Any,
    gpu: GPUName = "H100",
    response_length: int | None = None,
    mfu: float = 0.4,
    bandwidth_utilization: float = 0.6,
) -> Plan:
    """Estimate memory and time.

    Args:
        trainer: Has the ``strategy`` and the ``world_size``.
        module: A :class:`~dclightning.module.GRPOModule`.
        datamodule: A :class:`~dclightning.rollout.datamodule.RolloutDataModule`.
        gpu: One of :data:`~dclightning.step_time.GPUS`.
        response_length: Mean tokens of a response; by default half of the longest.
        mfu: Share of the GPU's operations a second that is reached.
        bandwidth_utilization: Share of the bytes a second that is reached.

    Raises:
        UserError: If the layout, or one of the options, is impossible.
    """
    config = from_pretrained(AutoConfig, module.model_name)
    layout = layout_of(trainer.strategy, trainer.world_size)
    datamodule.check_engine()
    check_adapters(module.lora, layout.tensor_parallel_size)
    if layout.sharded:
        check_layout(config, layout.ranks, layout.tensor_parallel_size, layout.expert_parallel_size)
    _check(datamodule, response_length, mfu, bandwidth_utilization)
    spanned = getattr(datamodule.engine, "tensor_parallel_size", 1)
    shares = Shares(layout.ranks, training_parallel=layout.tensor_parallel_size, engine_parallel=spanned)
    datamodule.check_shares(shares, module.mini_batches)
    longest = datamodule.sampling.max_tokens
    device, engine, of = GPUS[gpu], datamodule.engine, parts(skeleton(config), layout)
    work = Work(
        responses=datamodule.prompts_per_step * datamodule.group_size,
        length=response_length or -(-longest // 2),
        longest=longest,
        micro_batch_tokens=module.micro_batch_tokens,
        mfu=mfu,
        bandwidth_utilization=bandwidth_utilization,
    )
    items, problems = _training(config, of, layout, module, work, datamodule.one_step_off), list[str]()
    passes = 2 if module.reference_kl.coefficient else 1
    times = scoring_and_update(
        config, of, layout, work, device, module.precision, module.gradient_checkpointing, passes
    )
    if isinstance(engine, VLLMEngine):  # others are elsewhere, or for tests
        cache, of_engine, problems = _engine(config, of, engine, device, work)
        largest = max(of, key=lambda part: part.whole)
        transit = Item("sync", f"{largest.name} in FP32 and BF16", 6.0 * largest.whole, ("rollout",))
        items = [*items, *of_engine, transit]
        per_token = kv_bytes_per_token(config, engine)
        if not problems:
            times = [rollout(config, of, layout, work, device, engine, cache / per_token, per_token), *times]
        times = [*times, synchronisation(of, layout, work, device, engine)]
    helps = _helps(items, layout, module, engine, work, datamodule.one_step_off)
    sleeps = getattr(engine, "sleep", False)
    return Plan(items, times, device.memory, sleeps, problems, helps)


def layout_of(strategy: Strategy | str, ranks: int) -> Layout:
    """The layout that a strategy makes of so many ranks; strategies of Lightning that shard otherwise are refused."""
    if isinstance(strategy, ParallelStrategy):
        replicas(ranks, strategy.tensor_parallel_size)
        return Layout(ranks, True, strategy.tensor_parallel_size, strategy.expert_parallel_size)
    known = isinstance(strategy, DDPStrategy | SingleDeviceStrategy)
    if not known and strategy != "auto" and not str(strategy).startswith("ddp"):
        raise UserError(f"trainer.strategy={strategy!r}: must be auto, ddp or dclightning.ParallelStrategy")
    return Layout(ranks, False)


def _check(datamodule: Any, response_length: int | None, mfu: float, bandwidth: float) -> None:
    for name, share in (("mfu", mfu), ("bandwidth_utilization", bandwidth)):
        if not 0 < share <= 1:
            raise UserError(f"{name}={share}: must be a share of the data sheet's number, over 0 and at most 1")
    longest = datamodule.sampling.max_tokens
    if response_length is not None and not 0 < response_length <= longest:
        raise UserError(f"response_length={response_length}: must be from 1 to sampling.max_tokens, {longest}")


def _training(config: Any, of: list[Part], layout: Layout, module: Any, work: Work, one_step_off: bool) -> list[Item]:
    held = trained = total(of, "held")
    share = f"{held / 1e6:,.1f} of {total(of) / 1e6:,.1f} million parameters"
    lengths = _micro_batch(layout, module, work)
    one = of_one_rank(config, layout.tensor_parallel_size, layout.expert_parallel_size)
    checkpointing, entropy = module.gradient_checkpointing, module.entropy_bonus > 0
    passed = rehearse(one, lengths, module.precision, checkpointing, entropy, layout.sharded and layout.ranks > 1)
    more = "a layer computed again" if checkpointing else "of the backward pass"
    gathered_bytes = 2 if module.precision == "bfloat16" and layout.ranks > 1 else 4
    buffers = communication_buffers(of, layout, gathered_bytes)
    items = [Item("weights", f"FP32, {share}", 4.0 * held)]
    if module.lora is not None:
        adapters = adapter_count(config, module.lora)
        trained = -(-adapters // layout.replicas) if layout.sharded else adapters
        items.append(Item("adapters", f"FP32, {adapters / 1e6:,.1f} million in all", 4.0 * trained))
    items += [
        Item("gradients", "FP32", 4.0 * trained, ("update", "step")),
        Item("AdamW", "two FP32 numbers a parameter", 8.0 * trained),
        Item("AdamW's temporaries", "FP32", 4.0 * trained, ("step",)),
        Item("activations", f"{sum(lengths):,} tokens, kept for the backward pass", passed.kept, ("update",)),
        Item("temporaries", f"{more}, logits (128 MiB at a time)", passed.peak - passed.kept, ("update",)),
    ]
    if module.reference_kl.coefficient and module.lora is None:  # with adapters it is the policy without them
        items.append(Item("reference policy", f"FP32, {share}", 4.0 * held))
    if one_step_off:
        items.append(Item("policy that sampled", "FP32, the copy for one_step_off", 4.0 * held))
    if buffers:
        how = "gathered layers, gradients on their way" if layout.sharded else "DDP's buckets"
        items.append(Item("communication", how, buffers, ("update",)))
    return items


def _micro_batch(layout: Layout, module: Any, work: Work) -> list[int]:
    """The lengths of the largest micro-batch: as many of the longest responses as the budget holds, at least one."""
    of_a_step = work.responses // layout.replicas // module.mini_batches
    count = max(1, min(of_a_step, module.micro_batch_tokens // work.longest))
    return [work.longest] * count


def _engine(
    config: Any, of: list[Part], engine: VLLMEngine, gpu: GPU, work: Work
) -> tuple[float, list[Item], list[str]]:
    """The bytes of the KV cache, what the engine has on each GPU, and what it has no room for."""
    weights = engine_weights(of, engine)
    # vLLM's own limits of an engine step, by the GPU's memory; an A100 gets the smaller ones (EngineArgs).
    tokens, sequences = (16384, 1024) if gpu.memory > 75e9 and gpu is not GPUS["A100-80GB"] else (8192, 256)
    workspace = engine_workspace(config, tokens, sequences)
    share, size = engine.gpu_memory_utilization, engine.kv_cache_gib
    cache = max(0.0, share * gpu.memory - weights - workspace) if size is None else size * GIB
    source = f"gpu_memory_utilization={share:g}" if size is None else f"kv_cache_gib={size:g}"
    response = work.longest * kv_bytes_per_token(config, engine)
    problems = []
    if cache < response:
        needed = f"a response of {work.longest:,} tokens takes {response / GIB:.2f}"
        problems.append(f"engine {source} leaves {cache / GIB:.2f} GiB for the KV cache, {needed}")
    tp = f", over {engine.tensor_parallel_size} GPUs" if engine.tensor_parallel_size > 1 else ""
    held = f"{source}: {cache / response:.1f} responses of {work.longest:,} tokens"
    items = [
        Item("engine's weights", f"{_format(engine)}{tp}", weights, of_engine=True),
        Item("KV cache", held, cache, of_engine=True),
        Item("engine's workspace", "activations and logits of vLLM", workspace, of_engine=True),
    ]
    return cache, items, problems


def _format(engine: VLLMEngine) -> str:
    simulated = " (simulated)" if engine.simulate is True else ""
    return f"dtype {engine.dtype}" + ("" if engine.quantization == "none" else f", {engine.quantization}{simulated}")


def _helps(items: list[Item], layout: Layout, module: Any, engine: Any, work: Work, one_step_off: bool) -> list[str]:
    """What would make the run smaller on each GPU, with how much, as far as that is known."""
    size = {item.name: item.size / GIB for item in items}
    states = sum(size[name] for name in ("weights", "gradients", "AdamW"))
    helps = []
    if not module.gradient_checkpointing:
        helps.append(f"model.gradient_checkpointing: true (activations are {size['activations']:.1f} GiB)")
    if len(_micro_batch(layout, module, work)) > 1:
        helps.append(f"model.micro_batch_tokens: {work.longest}, one response at a time")
    if not layout.sharded:
        helps.append(f"trainer.strategy: dclightning.ParallelStrategy, which shards the {states:.1f} GiB of states")
    else:
        helps.append(f"twice the GPUs: about {states / 2:.1f} GiB less of states")
    if "reference policy" in size:
        helps.append(f"model.reference_kl.coefficient: 0 (the reference policy is {size['reference policy']:.1f} GiB)")
    if not isinstance(engine, VLLMEngine):
        return helps
    of_engine = sum(item.size for item in items if item.of_engine) / GIB
    if not engine.sleep and not one_step_off:
        helps.append(f"data.engine.init_args.sleep: true ({of_engine:.1f} GiB less in the update)")
    setting = "gpu_memory_utilization" if engine.kv_cache_gib is None else "kv_cache_gib"
    helps.append(f"data.engine.init_args.{setting}: another one (the KV cache is {size['KV cache']:.1f} GiB)")
    if engine.quantization == "none":
        saved = size["engine's weights"] / 2
        helps.append(f"data.engine.init_args.quantization: fp8 (up to {saved:.1f} GiB less of weights)")
    return helps
