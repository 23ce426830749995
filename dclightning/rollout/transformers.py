"""Sampling with transformers: slow, and the training policy's own computation, in the precision that is asked for."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dclightning.errors import UserError
from dclightning.rollout.engine import Finished
from dclightning.rollout.types import Completion, Sampling

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TransformersEngine:
    """Samples with transformers' implementation of the model: what the trainer computes, where an engine is in doubt.

    Args:
        precision: Of weights and activations: ``float32``, ``bfloat16`` or ``float16``.
        batch_size: Responses sampled at a time.
    """

    def __init__(self, precision: str = "float32", batch_size: int = 64) -> None:
        if precision not in PRECISIONS:
            raise ValueError(f"precision={precision!r}: must be one of {', '.join(PRECISIONS)}")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1")
        self.precision = precision
        self.batch_size = batch_size
        self.version = 0
        self._model: Any = None

    def start(self, model: str, max_length: int) -> None:
        """Load the model unless that is done; see :class:`~dclightning.rollout.engine.RolloutEngine`."""
        if self._model is not None:
            return
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self._model = AutoModelForCausalLM.from_pretrained(model, dtype=PRECISIONS[self.precision])
            end = AutoTokenizer.from_pretrained(model).eos_token_id
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"transformers cannot load model={model!r}: {reason}") from error
        self._model.to(device).eval()
        ends = self._model.generation_config.eos_token_id
        ends = [ends] if isinstance(ends, int) else ends or []
        ends = sorted({*ends, *([] if end is None else [end])})  # vLLM stops at all of these
        self._ends = torch.tensor(ends, device=device)
        self.version = 0

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        group_size: int,
        seed: int,
        finished: Finished | None = None,
    ) -> list[Completion]:
        """Draw ``group_size`` responses to each prompt, those of a prompt side by side."""
        rows = [ids for ids in prompts for _ in range(group_size)]
        draw = torch.Generator(self._model.device).manual_seed(seed)
        completions: list[Completion] = []
        told = 0
        for start in range(0, len(rows), self.batch_size):
            completions += self._sample(rows[start : start + self.batch_size], sampling, draw)
            while finished is not None and (told + 1) * group_size <= len(completions) and told < len(prompts):
                finished(told, completions[told * group_size : (told + 1) * group_size])
                told += 1
        return completions

    @torch.inference_mode()
    def distributions(self, contexts: list[list[int]], temperature: float) -> Tensor:
        """The next token's log-probabilities after each context, (contexts, vocabulary) float32."""
        rows = [self._model(torch.tensor([ids], device=self._model.device)).logits[0, -1] for ids in contexts]
        return (torch.stack(rows).float() / temperature).log_softmax(-1).cpu()

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights."""
        named = dict(self._model.named_parameters())
        for name, weight in weights:
            named[name].data.copy_(weight)
        self.version = version

    def differing_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """The names of weights that are not the given ones."""
        named = dict(self._model.named_parameters())
        return [name for name, weight in weights if not torch.equal(named[name], weight.to(named[name]))]

    def make_room(self) -> None:
        """Nothing: the weights stay."""

    def interrupt(self) -> None:
        """Nothing: what is sampled is finished."""

    def close(self) -> None:
        """Free the model."""
        self._model = None

    def _sample(self, rows: list[list[int]], sampling: Sampling, draw: torch.Generator) -> list[Completion]:
        """One response to each prompt. Prompts are padded on the left, so that all responses start at one place."""
        device, longest = self._model.device, max(map(len, rows))
        ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
        seen = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=device)
        cache, process = DynamicCache(config=self._model.config), _processors(sampling)
        running = torch.ones(len(rows), dtype=torch.bool, device=device)
        tokens, logprobs = [], []
        for _ in range(sampling.max_tokens):
            places = (seen.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            logits = self._model(
                input_ids=ids, attention_mask=seen, position_ids=places, past_key_values=cache, logits_to_keep=1
            ).logits[:, -1]
            scores = process(None, logits.float()).log_softmax(-1)
            if sampling.temperature:
                token = torch.multinomial(scores.exp(), 1, generator=draw)
            else:
                token = scores.argmax(-1, keepdim=True)
            tokens.append(token)
            logprobs.append(scores.gather(-1, token))
            running &= ~torch.isin(token[:, 0], self._ends)
            if not running.any():
                break
            ids, seen = token, torch.cat([seen, torch.ones_like(token)], dim=-1)
        return [
            _completion(row, row_logprobs, self._ends.tolist())
            for row, row_logprobs in zip(torch.cat(tokens, -1).tolist(), torch.cat(logprobs, -1).tolist(), strict=True)
        ]


def _processors(sampling: Sampling) -> LogitsProcessorList:
    """In vLLM's order: temperature, min-p, top-k, top-p."""
    processors = LogitsProcessorList()
    if sampling.temperature not in (0, 1):
        processors.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.min_p > 0:
        processors.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    return processors


def _completion(tokens: list[int], logprobs: list[float], ends: list[int]) -> Completion:
    end = next((place for place, token in enumerate(tokens) if token in ends), None)
    kept = len(tokens) if end is None else end + 1
    return Completion(tokens[:kept], logprobs[:kept], "length" if end is None else "stop")
