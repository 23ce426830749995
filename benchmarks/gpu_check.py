"""What only a GPU can show, each part in a process of its own; the page that is printed is in Markdown.

bin/gpu-check, or python benchmarks/gpu_check.py [PART ...]. Without a GPU the parts run on the CPU, as far as they go.
"""

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CONFIGURE_LOGGING="0")

import lightning as L
import torch
from models import TINY, mixture

from dclightning import AdamW, GRPOModule, RolloutDataModule, Sampling, VLLMEngine
from dclightning.calibrate import calibrate
from dclightning.callbacks import LagrangianCallback, StaleWeights, WeightSync
from dclightning.models import load_tokenizer

GPU = torch.cuda.is_available()
SECONDS = 150
"""The longest that a part may take."""


class Watch(L.Callback):
    """What each step logged, and how much of the GPU is in use in the middle of its update."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.ends: list[float] = []
        self.gib = 0.0

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Look at the GPU."""
        if GPU:
            free, total = torch.cuda.mem_get_info()
            self.gib = max(self.gib, (total - free) / 2**30)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep what was logged."""
        self.ends.append(time.perf_counter())
        self.rows.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def trainer(rollouts: int, callbacks: list[L.Callback]) -> L.Trainer:
    """On one device, and quiet."""
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return L.Trainer(
        accelerator="auto", devices=1, max_epochs=1, limit_train_batches=rollouts, callbacks=callbacks,
        enable_model_summary=False, **options,
    )  # fmt: skip


def fit(rollouts: int = 20 if GPU else 4, one_step_off: bool = False, **engine: Any) -> dict[str, Any]:
    """The quickstart's run, in BF16, with FP8 rollouts."""
    watch = Watch()
    module = GRPOModule(TINY, optimizer=AdamW(lr=2e-4), mini_batches=1, micro_batch_tokens=4096, precision="bfloat16")
    engine = {"quantization": "fp8_per_channel", "simulate": False, "dtype": "bfloat16", "kv_cache_gib": 0.25, **engine}
    data = RolloutDataModule(
        "dclightning/arithmetic-train", VLLMEngine(**engine), prompts_per_step=32, sampling=Sampling(max_tokens=64),
        one_step_off=one_step_off,
    )  # fmt: skip
    price = LagrangianCallback(initial=0.5, lr=300.0, budget=0.0012)
    trainer(rollouts, [price, WeightSync(), StaleWeights(action="stop"), watch]).fit(module, data)
    times = ("time/rollout_s", "time/update_s", "time/sync_s")
    medians = {name: round(statistics.median(row[name] for row in watch.rows[1:]), 3) for name in times}
    reward = [row["train/reward"] for row in watch.rows]
    deltas = [row["discrepancy/sequence_mean"] for row in watch.rows]
    return {
        "reward": f"{reward[0]:.3f} to {statistics.mean(reward[-5:]):.3f}",
        "mean discrepancy": f"{statistics.mean(deltas):.2e}",
        "multiplier": round(watch.rows[-1]["lagrangian/multiplier"], 3),
        "a step, s": round(statistics.median(b - a for a, b in pairwise(watch.ends)), 3),
        **medians,
        "GiB in use in the update": round(watch.gib, 2),
    }


def formats() -> dict[str, Any]:
    """The mean discrepancy of formats in vLLM's own kernels, and simulated."""
    found = {}
    for name in ("fp8", "fp8_per_channel", "fp8_per_block", "mxfp8", "mxfp4"):
        for simulate in (False, True):
            engine = VLLMEngine(name, simulate=simulate, dtype="bfloat16", kv_cache_gib=0.25)
            data = RolloutDataModule(
                "dclightning/arithmetic-train", engine, prompts_per_step=16, sampling=Sampling(max_tokens=64)
            )
            try:
                report = calibrate(trainer(1, [WeightSync()]), GRPOModule(TINY, mini_batches=1), data, rollouts=1)
                value = f"{report.report()['discrepancy']['probability']['token_mean']:.2e}"
            except Exception as error:  # what a GPU has no kernel for
                value = " ".join(str(error).split())[:80]
            found[f"{name}, {'simulated' if simulate else 'native'}"] = value
    return found


def sync(layers: int = 28, width: int = 1024) -> dict[str, Any]:
    """A weight sync of half a billion parameters, beside a copy of the same bytes."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = load_tokenizer(TINY)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 128, head_dim=64, max_position_embeddings=512,
    )  # fmt: skip
    policy = Qwen3ForCausalLM(config)
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        weights = dict(policy.to("cuda" if GPU else "cpu").named_parameters())
        for name, options in {"bf16": {}, "fp8": {"quantization": "fp8_per_channel"}}.items():
            engine = VLLMEngine(dtype="bfloat16", kv_cache_gib=0.25, **options)
            engine.start(folder, max_length=256)
            seconds[f"sync to {name}, s"] = _median(lambda: engine.load_weights(weights.items(), 1))  # noqa: B023
            engine.close()
    copies = {name: torch.empty_like(weight) for name, weight in weights.items()}
    seconds["copy, s"] = _median(lambda: [copies[name].copy_(weight) for name, weight in weights.items()])
    return {"million parameters": round(sum(w.numel() for w in weights.values()) / 1e6), **seconds}


def _median(action: Any) -> float:
    times = []
    for _ in range(6):
        start = time.perf_counter()
        with torch.no_grad():
            action()
        if GPU:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return round(statistics.median(times[1:]), 4)


def experts() -> dict[str, Any]:
    """Whether the engine's experts, used by the trainer, bring both policies together (R3)."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for replay in (False, True):
            engine = VLLMEngine(dtype="bfloat16", kv_cache_gib=0.25, routing_replay=replay)
            data = RolloutDataModule(
                "dclightning/arithmetic-train", engine, prompts_per_step=16, sampling=Sampling(max_tokens=32)
            )
            module = GRPOModule(mixture(folder), mini_batches=1)
            report = calibrate(trainer(1, [WeightSync()]), module, data, rollouts=1).report()
            name = "with the engine's experts" if replay else "with its own"
            found[f"mean discrepancy {name}"] = f"{report['discrepancy']['probability']['token_mean']:.2e}"
    return found


PARTS: dict[str, Any] = {
    "quickstart": fit,
    "quickstart, engine asleep in the update": lambda: fit(sleep=True),
    "quickstart, one step off": lambda: fit(one_step_off=True),
    "formats": formats,
    "weight sync": sync,
    "routing replay": experts,
}


def main(parts: list[str]) -> int:
    """Run the parts, each by itself; the number of those that failed."""
    if unknown := set(parts) - set(PARTS):
        print(f"gpu_check.py: {unknown.pop()!r} is not a part; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    name = torch.cuda.get_device_name() if GPU else "no GPU: the CPU"
    print(f"# {name}, torch {torch.__version__}\n", flush=True)
    failed = 0
    for part in parts or PARTS:
        start = time.perf_counter()
        try:
            command = [sys.executable, __file__, "--part", part]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
            last = (done.stdout.splitlines() or [""])[-1]
            lines = json.loads(last) if done.returncode == 0 else {"failed": done.stderr.strip()[-500:]}
        except subprocess.TimeoutExpired:
            lines = {"failed": f"took longer than {SECONDS} s"}
        failed += "failed" in lines
        print(f"## {part} ({time.perf_counter() - start:.0f} s)\n")
        print("\n".join(f"- {key}: {value}" for key, value in lines.items()) + "\n", flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["--part"]:
        logging.disable(logging.WARNING)
        print("\n" + json.dumps(PARTS[sys.argv[2]]()))
    else:
        sys.exit(main(sys.argv[1:]))
