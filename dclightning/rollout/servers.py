"""Several servers as one: work is spread over those that live, and a server that dies is left out until it is back."""

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import httpx

from dclightning.errors import RunStoppedError, UserError

TOKEN = "DCLIGHTNING_TOKEN"
"""The variable of the environment that holds the token, on both sides."""
WEIGHTS = "dclightning-weights"
"""A request's header says which weights it wants, if any will not do, and that of every answer which there are."""
BAD_SAMPLE = 422
"""The status if what was sampled cannot be used, whichever server samples it."""
LOADED = "default"
"""vLLM's label of the weights that it was started with."""

_KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
]
"""A machine that falls silent is noticed within half a minute, however long an answer may take."""
_CONNECTIONS = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
"""As many as there are requests; none is used again that the server, after 5 s, may be about to close."""

log = logging.getLogger(__name__)

Check = Callable[[str, dict[str, Any]], None]
"""Takes a server's URL and status; raises UserError if the server will not do."""


@dataclass
class Server:
    """One of them."""

    url: str
    cause: str | None = None
    """Why it is left out."""
    failing_since: float | None = None


class Servers:
    """Those of a :class:`~dclightning.rollout.remote.RemoteEngine`, which explains the arguments."""

    def __init__(self, urls: list[str], token: str | None, retry_seconds: float, request_seconds: float) -> None:
        self.all = [Server(url.rstrip("/")) for url in urls]
        self.retry_seconds = retry_seconds
        self._client = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(request_seconds, connect=5.0),
            # With a transport of its own it goes past any proxy that the environment names.
            transport=httpx.AsyncHTTPTransport(limits=_CONNECTIONS, socket_options=_KEEPALIVE),
        )

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def wait(self, seconds: float, check: Check) -> None:
        """Wait until all servers answer.

        Raises:
            UserError: If one does not in time, or will not do.
        """
        until = time.monotonic() + seconds

        async def appear(server: Server) -> None:
            told = False
            while True:
                try:
                    await self._meet(server, check)
                    return
                except httpx.HTTPError as error:
                    if _is_final(error):
                        raise UserError(f"urls: {server.url} refuses: {_described(error)}") from error
                    if time.monotonic() > until:
                        message = f"urls: {server.url} has not answered within start_seconds={seconds:g}"
                        raise UserError(f"{message}: {_described(error)}") from error
                    if not told:
                        log.warning("Waiting for server %s: %s", server.url, _described(error))
                    told = True
                await asyncio.sleep(1.0)

        await _together(map(appear, self.all))

    async def rejoin(self, check: Check) -> None:
        """Let the servers that were left out take part again, if they are back."""

        async def look(server: Server) -> None:
            try:
                await self._meet(server, check)
            except (httpx.HTTPError, UserError) as error:
                log.debug("Server %s is still left out: %s", server.url, error)
            else:
                log.warning("Server %s is back", server.url)
                server.cause = None

        await _together(look(server) for server in self.all if server.cause is not None)

    async def spread(
        self,
        path: str,
        asked: list[dict[str, Any]],
        weights: str,
        at_once: int,
        done: Callable[[int, httpx.Response], None],
    ) -> None:
        """Ask for all of it; what a server does not answer is asked of another.

        Each place is with one server, or waits, or is done.

        Args:
            path: Of the requests.
            asked: Their bodies.
            weights: The label of the weights that a server must have.
            at_once: How many requests a server gets at a time.
            done: Is told the place of each request, and the answer.

        Raises:
            RunStoppedError: If no server is left.
        """
        self._forget_failures()
        waiting: asyncio.Queue[int] = asyncio.Queue()
        left, finished = set(range(len(asked))), asyncio.Event()
        for place in left:
            waiting.put_nowait(place)

        async def lane(server: Server) -> None:
            while True:
                place = await waiting.get()
                if server.cause is not None:
                    waiting.put_nowait(place)
                    return
                try:
                    answer = await self._ask(server, "POST", path, json=asked[place], headers={WEIGHTS: weights})
                except httpx.HTTPError as error:
                    if isinstance(error, httpx.HTTPStatusError) and error.response.status_code == BAD_SAMPLE:
                        raise RuntimeError(f"{server.url}: {error.response.text}") from error
                    waiting.put_nowait(place)
                    await self._recover(server, error)
                    continue
                done(place, answer)
                left.remove(place)
                if not left:
                    finished.set()

        # Each server's first lane comes before any server's second, so that few requests are shared, too.
        lanes = [asyncio.create_task(lane(server)) for _ in range(min(at_once, len(asked))) for server in self.all]
        end = asyncio.create_task(finished.wait())
        running: set[asyncio.Task[Any]] = {end, *lanes}
        try:
            while left:
                if running == {end}:
                    causes = "; ".join(f"{server.url}: {server.cause}" for server in self.all)
                    raise RunStoppedError(f"no rollout server is left: {causes}")
                over, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in over:
                    task.result()  # raises what `done` has raised
        finally:
            for task in (end, *lanes):
                task.cancel()
            await asyncio.gather(end, *lanes, return_exceptions=True)

    async def ask_all(self, method: str, path: str, **content: Any) -> list[httpx.Response]:
        """The answers of the servers, each of which is asked until it answers or is left out."""
        self._forget_failures()

        async def insist(server: Server) -> httpx.Response | None:
            while server.cause is None:
                try:
                    return await self._ask(server, method, path, **content)
                except httpx.HTTPError as error:
                    await self._recover(server, error)
            return None

        return [answer for answer in await _together(map(insist, self.all)) if answer is not None]

    def _forget_failures(self) -> None:
        """Nobody knows how long a server that failed the last time has been well since."""
        for server in self.all:
            server.failing_since = None

    async def _meet(self, server: Server, check: Check) -> None:
        check(server.url, (await self._ask(server, "GET", "status", timeout=5.0)).json())

    async def _ask(self, server: Server, method: str, path: str, **content: Any) -> httpx.Response:
        """A server's answer; raises httpx.HTTPError if it has none, or refuses."""
        answer = await self._client.request(method, f"{server.url}/dclightning/{path}", **content)
        if answer.is_error:
            message = f"{answer.status_code}: {answer.text[:300]}"
            raise httpx.HTTPStatusError(message, request=answer.request, response=answer)
        server.failing_since = None
        return answer

    async def _recover(self, server: Server, error: httpx.HTTPError) -> None:
        """Wait until a server may be asked again, longer and longer; or leave it out."""
        now = time.monotonic()
        server.failing_since = server.failing_since or now
        failing = now - server.failing_since
        if server.cause is None and (_is_final(error) or failing > self.retry_seconds):
            server.cause = _described(error)
            log.warning("Server %s is left out until the next push of weights: %s", server.url, server.cause)
        if server.cause is None:
            await asyncio.sleep(min(max(0.25, failing), 2.0))


async def _together(work: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    return await asyncio.gather(*work)


def _is_final(error: httpx.HTTPError) -> bool:
    """Whether a server would say the same when asked again."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in (502, 503, 504)


def _described(error: httpx.HTTPError) -> str:
    return " ".join((str(error) or "no answer").split()) + f" ({type(error).__name__})"
