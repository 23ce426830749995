"""The discrepancy of every engine precision against every trainer precision, with fixed weights.

python benchmarks/precisions.py: the bundled model, and a random mixture of experts. Each cell is measured on a rollout
of 32 problems x 8 responses and whole distributions at 256 positions.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(TORCH_COMPILE_DISABLE="1", VLLM_CONFIGURE_LOGGING="0", VLLM_ENABLE_V1_MULTIPROCESSING="0")

import lightning as L
from models import mixture

from dclightning import GRPOModule, RolloutDataModule, Sampling, VLLMEngine
from dclightning.calibrate import calibrate
from dclightning.callbacks import WeightSync
from dclightning.models import resolve_model

TINY = "dclightning/tiny-arithmetic"
ENGINES = {
    "fp32": {"dtype": "float32"},
    "fp16": {"dtype": "float16"},
    "bf16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8", "dtype": "float32"},
    "fp8_per_channel, native": {"quantization": "fp8_per_channel", "simulate": False, "dtype": "bfloat16"},
    **{
        name: {"quantization": name, "simulate": True, "dtype": "float32"}
        for name in ("fp8_per_channel", "fp8", "fp8_per_block", "mxfp8", "nvfp4", "mxfp4", "int4")
    },
}
TRAINERS = ("float32", "bfloat16", "float16")


def measure(model: str, options: dict, precision: str) -> dict:
    """One cell of the table."""
    engine = VLLMEngine(**options, kv_cache_gib=0.0625)
    data = RolloutDataModule(
        "dclightning/arithmetic-train", engine, prompts_per_step=32, sampling=Sampling(max_tokens=64)
    )
    module = GRPOModule(model, mini_batches=1, micro_batch_tokens=4096, precision=precision)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[WeightSync()],
    )
    report = calibrate(trainer, module, data, rollouts=1).report()
    delta = report["discrepancy"]["probability"]
    return {
        "mean": delta["token_mean"],
        "p99": delta["p99"],
        "max": delta["max"],
        "kl": report["divergences"]["kl"]["mean"],
        "top1": report["divergences"]["top1_agreement"]["mean"],
        "tokens": report["tokens"],
    }


def main() -> None:
    """Print a Markdown table for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where the numbers go as well")
    output = parser.parse_args().json
    logging.disable(logging.WARNING)
    found: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        for title, model in (("bundled model", resolve_model(TINY)), ("random mixture of experts", mixture(folder))):
            print(f"\n{title}: mean |Δp|, p99, max, exact KL\n\n| engine | " + " | ".join(TRAINERS) + " |")
            print("|---|" + "---|" * len(TRAINERS))
            for name, options in ENGINES.items():
                if "native" in name and "mixture" in title:  # vLLM has no CPU kernel for quantised experts
                    continue
                rows = {trainer: measure(model, options, trainer) for trainer in TRAINERS}
                found.setdefault(title, {})[name] = rows
                cells = [f"{r['mean']:.1e}, {r['p99']:.1e}, {r['max']:.1e}, {r['kl']:.1e}" for r in rows.values()]
                print(f"| {name} | " + " | ".join(cells) + " |", flush=True)
    if output:
        output.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
