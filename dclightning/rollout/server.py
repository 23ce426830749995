"""What stands in front of vLLM's API server: who may ask, with which weights, and the requests of ``RemoteEngine``."""

import asyncio
import base64
import hmac
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import cache
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from safetensors.torch import save
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from transformers import AutoConfig, AutoModelForCausalLM
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.entrypoints.serve.utils.api_utils import with_cancellation
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.utils import random_uuid

from dclightning.models import from_pretrained
from dclightning.rollout.servers import BAD_SAMPLE, LOADED, TOKEN, WEIGHTS
from dclightning.rollout.types import Completion
from dclightning.rollout.vllm import completion

OTHERS = "was it restarted, or does another run use it?"


@dataclass(frozen=True)
class Served:
    """What a server says of itself."""

    model: str
    """What :func:`~dclightning.identity.fingerprint` says of the weights' files."""
    config: str
    """What :func:`~dclightning.identity.architecture` says of the model."""
    takes_weights: bool
    """Whether its weights can be replaced: not if their files are quantised."""
    settings: dict[str, Any]
    """Those of the engine on which the log-probs depend."""


class Gate:
    """Lets in who has the token and asks for the weights that there are; hands on to vLLM what is not for it."""

    def __init__(self, app: ASGIApp) -> None:
        self.token = os.environ.get(TOKEN, "")
        self.weights = LOADED
        self.incoming = ""
        """The label of the weights that are on their way."""
        self.chunks: dict[int, BinaryIO] = {}
        """Those of them that are here. Files in memory without a name: nothing is left of them if the server dies."""
        self.updating = asyncio.Lock()
        self.router = Router(
            [
                Route("/dclightning/status", self.status),
                Route("/dclightning/checksums", self.checksums),
                Route("/dclightning/generate", self.generate, methods=["POST"]),
                Route("/dclightning/distributions", self.distributions, methods=["POST"]),
                Route("/dclightning/weights/{label}/{index:int}", self.take, methods=["PUT"]),
                Route("/dclightning/weights/{label}", self.load, methods=["POST"]),
            ],
            redirect_slashes=False,
            default=app,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, refuse, or hand on."""
        if scope["type"] == "lifespan":
            await self.router.default(scope, receive, send)
            return

        async def send_with_label(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (WEIGHTS.encode(), self.weights.encode())]
            await send(message)

        headers = dict(scope["headers"])
        wanted = headers.get(WEIGHTS.encode(), self.weights.encode()).decode()
        if scope["path"] != "/health" and not self._is_known(headers.get(b"authorization", b"")):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            answer: ASGIApp = PlainTextResponse(f"wrong token; is {TOKEN} the server's?", 401)
        elif wanted != self.weights:
            answer = PlainTextResponse(f"has weights {self.weights!r} and not {wanted!r}; {OTHERS}", 409)
        else:
            answer = self.router
        await answer(scope, receive, send_with_label)

    def _is_known(self, authorization: bytes) -> bool:
        return not self.token or hmac.compare_digest(authorization, f"Bearer {self.token}".encode())

    async def status(self, request: Request) -> Response:
        """What is served."""
        served, config = request.app.state.args.served, request.app.state.engine_client.model_config
        dtype = str(config.dtype).removeprefix("torch.")
        return JSONResponse({**vars(served), "max_length": config.max_model_len, "dtype": dtype})

    async def checksums(self, request: Request) -> Response:
        """The checksums of the weights, from each worker."""
        return JSONResponse(await request.app.state.engine_client.collective_rpc("dclightning_checksums"))

    async def generate(self, request: Request) -> Response:
        """Responses to one prompt."""
        asked = await request.json()
        return await self._generate(request, asked) or Response(status_code=499)  # nobody waits for it

    @with_cancellation  # type: ignore[untyped-decorator]
    async def _generate(self, request: Request, asked: dict[str, Any]) -> Response:
        parameters = SamplingParams(
            n=asked["n"],
            seed=asked["seed"],
            **asked["sampling"],
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        weights = self.weights
        outputs = await self._outputs(request, asked["prompt"], parameters)
        used = {span.version for output in outputs for span in output.weight_versions or []}
        if used != {weights} or any(output.finish_reason == "abort" for output in outputs):
            return PlainTextResponse("the weights were changed while it was sampling", 503)
        try:
            found = [completion(output, f"{asked['place']}.{output.index}") for output in outputs]
        except RuntimeError as error:
            return PlainTextResponse(str(error), BAD_SAMPLE)
        return JSONResponse(list(map(to_json, found)))

    async def distributions(self, request: Request) -> Response:
        """The next token's log-probs after each context, as safetensors."""
        asked = await request.json()
        parameters = SamplingParams(
            max_tokens=1, temperature=asked["temperature"], logprobs=-1, flat_logprobs=True, detokenize=False, seed=0
        )
        vocabulary = request.app.state.engine_client.model_config.get_vocab_size()
        found, weights = torch.full((len(asked["contexts"]), vocabulary), -torch.inf), self.weights
        for row, context in zip(found, asked["contexts"], strict=True):
            (output,) = await self._outputs(request, context, parameters)
            row[torch.tensor(output.logprobs.token_ids)] = torch.tensor(output.logprobs.logprobs)
        if self.weights != weights:
            return PlainTextResponse("the weights were changed meanwhile", 503)
        return Response(save({"logprobs": found}))

    async def _outputs(self, request: Request, prompt: list[int], parameters: SamplingParams) -> list[Any]:
        engine = request.app.state.engine_client
        results: AsyncIterator[Any] = engine.generate(tokens_input(prompt), parameters, random_uuid())
        return [result async for result in results][-1].outputs  # type: ignore[no-any-return]

    async def take(self, request: Request) -> Response:
        """Keep some of the weights until all are there."""
        label, index = request.path_params["label"], request.path_params["index"]
        if label != self.incoming:
            self._expect(label)
        chunk = os.fdopen(os.memfd_create("weights"), "wb")
        async for part in request.stream():
            chunk.write(part)
        chunk.flush()
        if label != self.incoming:  # another run's have begun to arrive meanwhile
            chunk.close()
            return PlainTextResponse(f"other weights are arriving; {OTHERS}", 409)
        self.chunks[index] = chunk
        return Response(status_code=204)

    async def load(self, request: Request) -> Response:
        """Replace the weights by those that were taken, all of which must be there and fit."""
        label, count = request.path_params["label"], (await request.json())["chunks"]
        async with self.updating:
            if label == self.weights:  # a client asks again if the answer is lost
                return Response(status_code=204)
            if label != self.incoming or sorted(self.chunks) != list(range(count)):
                return PlainTextResponse(f"not all weights are there; {OTHERS}", 409)
            engine = request.app.state.engine_client
            # Taken out, for whatever arrives meanwhile would close the others.
            chunks, self.chunks, self.incoming = self.chunks, {}, ""
            paths = [f"/proc/{os.getpid()}/fd/{chunks[index].fileno()}" for index in range(count)]
            if misfit := _misfit(paths, engine.model_config.model):
                return PlainTextResponse(misfit, 422)
            await engine.pause_generation(mode="abort", clear_cache=True)
            self.weights = "none, since an update failed"
            await engine.start_weight_update()
            for path in paths:
                await engine.update_weights(WeightTransferUpdateRequest({"path": path}))
            await engine.finish_weight_update(label)
            self.weights = label
            await engine.resume_generation()
        return Response(status_code=204)

    def _expect(self, label: str) -> None:
        for chunk in self.chunks.values():
            chunk.close()
        self.incoming, self.chunks = label, {}


def to_json(found: Completion) -> dict[str, Any]:
    """What of a completion goes over the wire."""
    experts = found.experts
    return {
        "token_ids": found.token_ids,
        "logprobs": found.logprobs,
        "finish_reason": found.finish_reason,
        "ranks": found.ranks,
        "experts": None
        if experts is None
        else {"shape": list(experts.shape), "int16": base64.b64encode(experts.numpy().tobytes()).decode()},
    }


def _misfit(paths: list[str], model: str) -> str | None:
    """Why some weights are not a whole set of a model's, or None."""
    expected, found = _shapes(model), dict[str, tuple[int, ...]]()
    for path in paths:
        with safe_open(path, "pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            return f"weight {name} has the shape {found.get(name)}, and in the model {expected.get(name)}"
    return None


@cache
def _shapes(model: str) -> dict[str, tuple[int, ...]]:
    """What the trainer's model of the same name has, each tied weight once."""
    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(from_pretrained(AutoConfig, model))
    return {name: tuple(parameter.shape) for name, parameter in policy.named_parameters()}
