"""dclightning's DC-GRPO, a step at a time.

python dc_grpo.py MODEL PROBLEMS TOKENS PROMPTS MICRO_BATCH MINI_BATCHES [one-step-off]
"""

import os
import sys
from typing import Any

os.environ.update(VLLM_CONFIGURE_LOGGING="0")

import lightning as L
from turns import wait_for_turn

from dclightning import AdamW, GRPOModule, RolloutDataModule, Sampling, VLLMEngine
from dclightning.callbacks import LagrangianCallback, WeightSync

model, problems, tokens, prompts, micro_batch, mini_batches, *more = sys.argv[1:]


class Turns(L.Callback):
    """Waits after each step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Tell what was trained on, and the times of the step before, which are logged behind this."""
        seconds = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("time/")}
        tokens, passed = float(batch.response_lengths.sum()), float(len(batch.token_ids))
        wait_for_turn(tokens=tokens, passed=passed, drawn_s=batch.seconds, **seconds)


def exact(problems: list[Any], completions: list[Any]) -> list[float]:
    """Whether the response ends with the answer."""
    return [float(c.text.strip().endswith(p.answer)) for p, c in zip(problems, completions, strict=True)]


data = RolloutDataModule(
    problems,
    VLLMEngine(dtype="float32", kv_cache_gib=0.25),
    reward=exact,
    prompts_per_step=int(prompts),
    sampling=Sampling(max_tokens=int(tokens)),
    one_step_off=bool(more),
)
L.seed_everything(0)
trainer = L.Trainer(
    accelerator="cpu", devices=1, max_epochs=-1, default_root_dir=os.environ["TMPDIR"], enable_progress_bar=False,
    enable_checkpointing=False, callbacks=[LagrangianCallback(), WeightSync(), Turns()], log_every_n_steps=1,
)  # fmt: skip
module = GRPOModule(
    model, optimizer=AdamW(lr=1e-6), mini_batches=int(mini_batches), micro_batch_tokens=int(micro_batch)
)
trainer.fit(module, data)
