"""TRL's GRPOTrainer, a step at a time; runs in an environment of its own, without dclightning.

python trl_grpo.py MODEL PROBLEMS TOKENS ENGINE, where ENGINE is vllm, vllm-onednn or transformers.

On CPUs vLLM repacks weights for oneDNN, and TRL cannot load new ones into what is repacked. So it runs in two ways:
as it is, but with torch's products in the place of oneDNN's; and with oneDNN, but vLLM's reload for TRL's own sync.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")

import trl.generation.vllm_generation as generation
import vllm._custom_ops as operators
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from turns import wait_for_turn
from vllm import LLM

model, problems, tokens, engine = sys.argv[1:]
RESPONSES = 64
# By default vLLM would sample in BF16, for which most CPUs have no fast kernels, and take more memory than there is.
generation.LLM = partial(LLM, dtype="float32", kv_cache_memory_bytes=2**28, enforce_eager=True)


def sync(self: Any) -> None:
    """Give vLLM all weights."""
    self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._iter_named_params()})
    self.llm.reset_prefix_cache()


if engine == "vllm-onednn":
    generation.VLLMGeneration.sync_weights = sync
else:
    operators._supports_onednn = False


class Turns(TrainerCallback):
    """Waits after each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Tell what was trained on."""
        wait_for_turn(tokens=trainer._metrics["train"]["completions/mean_length"][-1] * RESPONSES)


def exact(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """Whether the response ends with the answer."""
    return [float(c[0]["content"].strip().endswith(a)) for c, a in zip(completions, answer, strict=True)]


rows = [json.loads(line) for line in Path(problems).read_text().splitlines()]
data = [{"prompt": [{"role": "user", "content": row["problem"]}], "answer": row["answer"]} for row in rows]
config = GRPOConfig(
    output_dir=os.environ["TMPDIR"],
    use_cpu=True,
    bf16=False,
    learning_rate=1e-6,
    lr_scheduler_type="constant",
    per_device_train_batch_size=RESPONSES,
    num_generations=8,
    max_completion_length=int(tokens),
    max_steps=1_000_000,
    gradient_checkpointing=False,
    use_vllm=engine != "transformers",
    vllm_mode="colocate",
    vllm_max_model_length=int(tokens) + 64,
    model_init_kwargs={"dtype": "float32"},
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    seed=0,
)
trainer = GRPOTrainer(
    model=model, reward_funcs=exact, args=config, train_dataset=Dataset.from_list(data), callbacks=[Turns()]
)
trainer.train()
