"""Agents that are services: something listens elsewhere, and is asked once for each attempt."""

import asyncio
import http.client
import io
import json
from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import urlsplit

import anyio
from anyio import to_thread
from pydantic import JsonValue

from whet.errors import AgentFailed, ConfigError
from whet.runners.attempt import ids_of, last_reward, read_posted, reward_in
from whet.types import Endpoint, Rollout

RewardFunction = Callable[[JsonValue, Any], float | Awaitable[float]]
"""`(task, answer) -> reward`, async or not. Any: whatever the service answered."""

CONNECT_S = 10.0
PAUSE_S = 0.5
ANSWER_LIMIT = 32 * 2**20
PIECE = 2**16
SHOWN = 300

HINT = "answer with a JSON object that has `reward`, post one to the reward_url, or pass reward="


class Service:
    """An agent behind an address: a plain `POST /chat` with JSON in and out.

    Subclass it and write `chat` for a service that is asked in another way. A service that is not
    there is waited for while it restarts; whatever else goes wrong is the reason that the attempt
    failed for, and only the queue tries again.
    """

    def __init__(
        self,
        url: str = "",
        *,
        reward: RewardFunction | None = None,
        max_turns: int = 10,
        concurrency: int | None = None,
        patience_s: float = 60.0,
    ) -> None:
        """`url` is asked at its path, or at `/chat` if it has none.

        `reward` says here what an answer is worth. `concurrency` is how many attempts the service
        is given at once, if fewer than the runner has. `patience_s` is how long one waits for a
        service that cannot be connected to.

        Raises:
            ConfigError: the URL is none.
        """
        self.__name__ = type(self).__name__
        self.url = _checked(url) if url else ""
        self.max_turns = max_turns
        self.patience_s = patience_s
        self._reward = reward
        self._free = None if concurrency is None else anyio.Semaphore(concurrency)

    async def chat(
        self,
        trace_id: str,
        sampling_params: dict[str, Any],
        max_turns: int,
        *,
        llm: Endpoint,
        **sample: Any,
    ) -> Any:
        """Have the service work on a sample, and give its answer. Any: they are the service's own.

        The service sends `trace_id` as a header of its model calls, or uses `llm` as it is: both
        say whose calls they are. A task that is no object is `sample["task"]`.

        Raises:
            AgentFailed: it gave no answer.
        """
        body = {
            "trace_id": trace_id,
            "sampling_params": sampling_params,
            "max_turns": max_turns,
            "llm": {
                **llm.model_dump(),
                "headers": {"trace_id": trace_id},
                "reward_url": f"{llm.base_url}/rewards",
                "traces_url": f"{llm.base_url}/traces",
            },
            "sample": sample,
        }
        return await self._post(json.dumps(body).encode())

    async def __call__(
        self, task: JsonValue, llm: Endpoint, rollout: Rollout | None = None
    ) -> float:
        """Run one attempt."""
        sample = cast(dict[str, Any], task) if isinstance(task, dict) else {"task": task}
        forced = {} if rollout is None else rollout.sampling.model_dump(exclude_none=True)
        chat = self.chat(ids_of(llm).attempt, forced, self.max_turns, llm=llm, **sample)
        if self._free is None:
            answer = await chat
        else:
            async with self._free:
                answer = await chat
        if self._reward is not None:
            given = self._reward(task, answer)
            return await given if isinstance(given, Awaitable) else given
        told = reward_in(answer)
        if told is not None:
            return told
        return last_reward(await to_thread.run_sync(read_posted, llm), HINT)

    async def _post(self, body: bytes) -> JsonValue:
        """Ask the service, once it can be connected to."""
        if not self.url:
            raise ConfigError("a Service has a URL, or a method `chat` of its own")
        deadline = anyio.current_time() + self.patience_s
        while True:
            try:
                streams = await _connect(self.url)
                break
            except OSError as error:
                if anyio.current_time() + PAUSE_S > deadline:
                    raise AgentFailed(f"the service {self.url!r} is not there: {error}") from error
                await anyio.sleep(PAUSE_S)
        try:
            return await _ask(*streams, self.url, body)
        except (OSError, http.client.HTTPException) as error:
            said = str(error) or type(error).__name__
            raise AgentFailed(f"the service {self.url!r} gave no answer: {said}") from error


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _connect(url: str) -> Streams:
    parts = urlsplit(url)
    secure = parts.scheme == "https"
    async with asyncio.timeout(CONNECT_S):
        return await asyncio.open_connection(
            parts.hostname, parts.port or (443 if secure else 80), ssl=secure or None
        )


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, url: str, body: bytes
) -> JsonValue:
    """One request on a connection, which is closed however it ends: the service then knows."""
    parts = urlsplit(url)
    path = f"{parts.path}?{parts.query}" if parts.query else parts.path
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {parts.netloc.rpartition('@')[2]}\r\n"
        f"content-type: application/json\r\naccept: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        answer = bytearray()
        while piece := await reader.read(PIECE):
            answer += piece
            if len(answer) > ANSWER_LIMIT:
                raise AgentFailed(f"the service {url!r} answers without end")
    finally:
        writer.close()
    return _read(bytes(answer), url)


class _Received:
    """Bytes as `http.client` reads them, which wants a socket."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def _read(answer: bytes, url: str) -> JsonValue:
    response = http.client.HTTPResponse(cast(Any, _Received(answer)))  # Any: see there
    response.begin()
    said = response.read()
    if response.status != 200:
        text = " ".join(said.decode(errors="replace").split())
        raise AgentFailed(f"the service {url!r} answered {response.status}: {text[:SHOWN]}")
    try:
        return json.loads(said)
    except ValueError as error:
        shown = said[:SHOWN].decode(errors="replace")
        raise AgentFailed(f"the service {url!r} answered no JSON: {shown!r}") from error


def _checked(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"a service has a URL such as http://host:8001/chat; found {url!r}")
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/chat"
