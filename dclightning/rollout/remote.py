"""The engine that samples with servers elsewhere."""

import asyncio
import base64
import os
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import asdict
from typing import Any
from uuid import uuid4

import httpx
import numpy as np
import torch
from safetensors.torch import load, save
from torch import Tensor
from torch import distributed as dist

from dclightning.errors import UserError
from dclightning.identity import architecture, fingerprint
from dclightning.rollout.engine import Finished
from dclightning.rollout.servers import LOADED, TOKEN, Servers
from dclightning.rollout.types import Completion, Sampling
from dclightning.rollout.vllm_weights import checksum, differing
from dclightning.seeds import derive_seed

CHUNK = 2**28
"""Bytes of weights that are pushed at a time, but at least one of them."""


class RemoteEngine:
    """Samples with servers on this or other machines, each started by ``dclightning serve``.

    Prompts go to whichever server has room. If one dies, the others take over what it has not finished; at the next
    push of weights it is tried again, and takes part again if it is back. Which server answers does not matter: each
    prompt has a seed of its own. If no server is left, the run stops with a checkpoint.

    The servers ask for the token in the environment's ``DCLIGHTNING_TOKEN``, if they were started with one.

    Args:
        urls: Of the servers, such as ``http://10.0.0.5:8000``. All must have the same model and settings.
        responses_at_once: How many responses a server is asked for at a time.
        start_seconds: How long to wait for the servers at the start.
        retry_seconds: How long a server may fail until it is left out; it is asked again at growing intervals.
        request_seconds: How long a server may take for all responses to one prompt, and to replace its weights.
    """

    def __init__(
        self,
        urls: list[str],
        responses_at_once: int = 256,
        start_seconds: float = 600.0,
        retry_seconds: float = 10.0,
        request_seconds: float = 3600.0,
    ) -> None:
        if not urls:
            raise ValueError("urls: name at least one server, such as http://127.0.0.1:8000")
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"urls: {url!r} must start with http:// or https://")
        if len(set(urls)) < len(urls):
            raise ValueError(f"urls={urls}: a server is named twice")
        if responses_at_once < 1:
            raise ValueError(f"responses_at_once={responses_at_once}: must be at least 1")
        for name, seconds in (
            ("start_seconds", start_seconds),
            ("retry_seconds", retry_seconds),
            ("request_seconds", request_seconds),
        ):
            if not seconds > 0:
                raise ValueError(f"{name}={seconds}: must be positive")
        self.urls = urls
        self.responses_at_once = responses_at_once
        self.start_seconds = start_seconds
        self.retry_seconds = retry_seconds
        self.request_seconds = request_seconds
        self.version = 0
        self._runner: asyncio.Runner | None = None
        self._task: asyncio.Task[Any] | None = None

    @property
    def quantization(self) -> str:
        """Of the servers, once they have said so."""
        return str(self._status["settings"]["quantization"])

    @property
    def dtype(self) -> str:
        """That the servers compute in, once they have said so."""
        return str(self._status["dtype"])

    @property
    def routing_replay(self) -> bool:
        """Whether they tell the experts, once they have said so."""
        return bool(self._status["settings"]["routing_replay"])

    def start(self, model: str, max_length: int) -> None:
        """Wait until all servers answer; see :class:`~dclightning.rollout.engine.RolloutEngine`.

        Raises:
            UserError: If one does not in time, or serves something else.
        """
        if self._runner is not None:
            return
        self._runner = asyncio.Runner()
        self._servers = Servers(self.urls, os.environ.get(TOKEN), self.retry_seconds, self.request_seconds)
        self._architecture, self._max_length = architecture(model), max_length
        self._status: dict[str, Any] = {}
        self._run(self._servers.wait(self.start_seconds, self._check))
        # Sampling before any push is right with the files' weights only.
        self._weights = LOADED if self._status["model"] == fingerprint(model) else "those of another model"
        self.version = 0

    def generate(
        self,
        prompts: list[list[int]],
        sampling: Sampling,
        group_size: int,
        seed: int,
        finished: Finished | None = None,
    ) -> list[Completion]:
        """Draw ``group_size`` responses to each prompt, those of a prompt side by side.

        Raises:
            RunStoppedError: If no server is left.
        """
        options = {"n": group_size, "sampling": asdict(sampling)}
        asked = [
            {"place": place, "prompt": ids, "seed": derive_seed(seed, place), **options}
            for place, ids in enumerate(prompts)
        ]
        groups: list[list[Completion]] = [[] for _ in prompts]

        def done(place: int, answer: httpx.Response) -> None:
            groups[place] = [_completion(row) for row in answer.json()]
            if finished is not None:
                finished(place, groups[place])

        at_once = max(1, self.responses_at_once // group_size)
        self._run(self._servers.spread("generate", asked, self._weights, at_once, done))
        return [completion for group in groups for completion in group]

    def distributions(self, contexts: list[list[int]], temperature: float) -> Tensor:
        """The next token's log-probabilities after each context, (contexts, vocabulary) float32."""
        starts = range(0, len(contexts), 8)
        asked = [{"contexts": contexts[start : start + 8], "temperature": temperature} for start in starts]
        found: dict[int, Tensor] = {}

        def done(place: int, answer: httpx.Response) -> None:
            found[place] = load(answer.content)["logprobs"]

        self._run(self._servers.spread("distributions", asked, self._weights, 4, done))
        return torch.cat([found[place] for place in range(len(asked))])

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Push all weights to all servers, from rank 0; those that had been left out are tried again.

        Where that fails it is the next sampling that says so: there, all ranks can stop with a checkpoint.
        """
        if not self._status["takes_weights"]:
            raise UserError("the servers' model is quantised already; train the model that it was made from")
        label = f"{version}-{uuid4().hex}"
        if dist.is_initialized():
            dist.barrier()  # until no rank samples any more
        if not dist.is_initialized() or dist.get_rank() == 0:
            self._run(self._servers.rejoin(self._check))
            count = 0
            for chunk in _chunks(weights, getattr(torch, self.dtype)):
                self._run(self._servers.ask_all("PUT", f"weights/{label}/{count}", content=save(chunk)))
                count += 1
            self._run(self._servers.ask_all("POST", f"weights/{label}", json={"chunks": count}))
        else:
            for _ in weights:  # gathering them takes all ranks
                pass
        outcome: list[Any] = [label, *(server.cause for server in self._servers.all)]
        if dist.is_initialized():
            dist.broadcast_object_list(outcome)
        self._weights, *causes = outcome
        for server, cause in zip(self._servers.all, causes, strict=True):
            server.cause, server.failing_since = cause, None
        self.version = version

    def differing_weights(self, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
        """Names of weights that a server holds otherwise than given; it cannot tell of quantised or split ones."""
        dtype = getattr(torch, self.dtype)
        sent = {name: checksum(weight.to(dtype)) for name, weight in weights}
        found: list[str] = []
        for answer in self._run(self._servers.ask_all("GET", "checksums")):
            if len(workers := answer.json()) == 1:
                held, fused = workers[0]
                found += differing(held, fused, sent)
        return list(dict.fromkeys(found))

    def make_room(self) -> None:
        """The servers have their memory for themselves."""

    def interrupt(self) -> None:
        """Ask for nothing more; see :class:`~dclightning.rollout.engine.RolloutEngine`."""
        if self._runner is not None and self._task is not None:
            self._runner.get_loop().call_soon_threadsafe(self._task.cancel)

    def close(self) -> None:
        """Leave the servers, which go on."""
        if self._runner is not None:
            self._run(self._servers.close())
            self._runner.close()
            self._runner = None

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        assert self._runner is not None, "start comes first"

        async def interruptible() -> Any:
            self._task = asyncio.current_task()
            try:
                return await work
            finally:
                self._task = None

        return self._runner.run(interruptible())

    def _check(self, url: str, status: dict[str, Any]) -> None:
        """Refuse a server that serves something else than is asked for, or than the first."""
        if status["config"] != self._architecture:
            raise UserError(f"urls: {url} serves a model of another configuration")
        if status["max_length"] < self._max_length:
            raise UserError(f"urls: {url} serves max_length={status['max_length']}, {self._max_length} are needed")
        self._status = self._status or status
        for name in ("model", "dtype", "settings"):
            if status[name] != self._status[name]:
                raise UserError(
                    f"urls: {url} and another server differ in {name}: {status[name]}, {self._status[name]}"
                )


def _chunks(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """As many weights at a time as one request takes."""
    chunk: dict[str, Tensor] = {}
    size = 0
    for name, weight in weights:
        weight = weight.to(dtype)
        if chunk and size + weight.nbytes > CHUNK:
            yield chunk
            chunk, size = {}, 0
        chunk[name] = weight.cpu().contiguous()
        size += weight.nbytes
    yield chunk


def _completion(row: dict[str, Any]) -> Completion:
    if (experts := row["experts"]) is not None:
        chosen = np.frombuffer(base64.b64decode(experts["int16"]), np.int16).reshape(experts["shape"])
        row["experts"] = torch.from_numpy(chosen.copy())
    return Completion(**row)
