"""Real rollouts without an engine: token ids and log-probs are given, everything downstream is the product."""

from contextlib import contextmanager
from dataclasses import replace

import lightning as L
import torch
from lightning.pytorch.callbacks import ProgressBar

from dclightning import AdamW, GRPOModule, Rollout
from dclightning.models import load_policy, token_logprobs
from dclightning.packing import pack
from dclightning.rollout.datamodule import RolloutLoader

TINY = "dclightning/tiny-arithmetic"


def random_rollout(
    lengths, group_size=2, prompt=5, rewards=None, seed=0, temperature=1.0, version=0, shared=False
) -> Rollout:
    """Of random tokens; each sequence has a prompt of its own, or as in a real rollout each group shares one."""
    generator = torch.Generator().manual_seed(seed)
    count = len(lengths)
    prompts = torch.tensor([prompt + (i - i % group_size if shared else i) % 3 for i in range(count)])
    responses = torch.tensor(lengths)
    total = int(prompts.sum() + responses.sum())
    token_ids = torch.randint(4, 100, (total,), generator=generator)
    if shared:
        starts = (prompts + responses).cumsum(0) - prompts - responses
        for i, start in enumerate(starts.tolist()):
            first = int(starts[i - i % group_size])
            token_ids[start : start + prompts[i]] = token_ids[first : first + prompts[i]]
    return Rollout(
        token_ids=token_ids,
        prompt_lengths=prompts,
        response_lengths=responses,
        rollout_logprobs=-torch.rand(int(responses.sum()), generator=generator) * 3 - 0.01,
        rollout_ranks=torch.ones(int(responses.sum()), dtype=torch.int64),
        rewards=torch.tensor(rewards or [float(i % 2) for i in range(count)]),
        truncated=torch.zeros(count, dtype=torch.bool),
        group_size=group_size,
        temperature=temperature,
        max_tokens=64,
        weight_versions=torch.full((count,), version),
    )


@torch.no_grad()
def nearly_on_policy(rollout, model=TINY) -> Rollout:
    """The same tokens with log-probs that an engine close to the model could have given."""
    packed = pack(rollout, list(range(len(rollout))))
    logprobs = torch.empty_like(rollout.rollout_logprobs)
    logprobs[packed.index] = token_logprobs(load_policy(model), packed, rollout.temperature)[0]
    return replace(rollout, rollout_logprobs=logprobs + 0.02 * torch.randn(len(logprobs)))


class GivenRollouts(L.LightningDataModule):
    def __init__(self, rollouts):
        super().__init__()
        self.rollouts = rollouts

    def train_dataloader(self):
        return RolloutLoader(lambda: iter(self.rollouts), len(self.rollouts))


class Recorder(L.Callback):
    """Keeps what each step gave and logged, and the first optimizer step's gradients."""

    def __init__(self):
        self.outputs, self.metrics, self.gradients = [], [], None

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if self.gradients is None:
            self.gradients = {
                name: p.grad.clone() for name, p in pl_module.model.named_parameters() if p.grad is not None
            }

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.outputs.append(outputs)

    def on_train_epoch_end(self, trainer, pl_module):
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def quiet_trainer(**options) -> L.Trainer:
    """On one CPU process, writing nothing and nowhere unless told otherwise."""
    usual = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(**{"accelerator": "cpu", "devices": 1, **usual, **options})


def train(
    rollouts,
    callbacks=(),
    model=TINY,
    lr=1e-3,
    max_grad_norm=float("inf"),
    schedule="constant",
    epochs=1,
    module=None,
    **options,
) -> tuple:
    """Fit on given rollouts; returns the module and what was recorded."""
    options = {"mini_batches": 1, "micro_batch_tokens": 10_000, **options}
    optimizer = AdamW(lr=lr, eps=1e-8, max_grad_norm=max_grad_norm, schedule=schedule)
    module = module or GRPOModule(model, optimizer=optimizer, **options)
    recorder = Recorder()
    trainer = quiet_trainer(
        max_epochs=epochs,
        enable_progress_bar=any(isinstance(c, ProgressBar) for c in callbacks),
        callbacks=[*callbacks, recorder],
    )
    trainer.fit(module, GivenRollouts(rollouts))
    return module, recorder


@contextmanager
def kept(engine):
    """One engine for many trainings, each of which would shut it down at its end."""
    close, engine.close = engine.close, lambda: None
    yield engine
    close()
