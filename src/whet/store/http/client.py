"""Client of a store server: the `Store` protocol over HTTP."""

import asyncio
import secrets
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeVar
from urllib.parse import quote, urlencode

import anyio
from anyio import to_thread
from pydantic import JsonValue, TypeAdapter

from whet.errors import LeaseLost, StoreClosed, StoreError, boundary
from whet.io.files import atomic_file
from whet.io.http_client import Response
from whet.protocols import Store
from whet.store import DEFAULT_RUN
from whet.store.codec import to_json_fast
from whet.store.http import rpc
from whet.store.http.batching import Batcher
from whet.store.http.errors import ErrorDetail, from_http
from whet.store.http.rpc import METHODS, BatchResult, RemoteMethod
from whet.store.http.transport import TIMEOUT_S, Request, RetryingClient
from whet.store.queries.tables import check_name
from whet.types import (
    NO_ADVANTAGES,
    Attempt,
    AttemptId,
    AttemptRecord,
    Call,
    GenerationId,
    Mode,
    Outcome,
    Resource,
    Reward,
    Rollout,
    RolloutRecord,
    RunSize,
    Span,
    Status,
    StepRecord,
    Trajectory,
    WorkerRecord,
)

T = TypeVar("T")
P = ParamSpec("P")
Function = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]
"""A method of `Store`, which names the method and types its arguments and result."""

_BATCH_RESULT = TypeAdapter(BatchResult)

PATIENCE_S = 300.0
LONG_TIMEOUT_S = 24 * 3600.0
"""For maintenance, whose duration grows with the store."""
GIVE_BACK_S = 10.0
ROLLOUTS_PER_READ = 64
"""Rollouts whose trajectories come in one response."""
READERS = 2


class HTTPStore(Store):
    """One run of a store behind a server, usable from several event loops and threads at once.

    Waits for a server that is away: every request may be sent again, and is done once.
    """

    def __init__(
        self, client: RetryingClient, run: str = DEFAULT_RUN, *, owns: bool = True
    ) -> None:
        """Closing a store that `owns` its client closes that too."""
        self.run = check_name(run)
        self._client = client
        self._owns = owns
        self._batchers = {
            method.name: Batcher(partial(self._send_batch, method), client.run)
            for method in METHODS.values()
            if method.batched
        }

    @classmethod
    def connect(
        cls, url: str, *, token: str, run: str = DEFAULT_RUN, patience_s: float = PATIENCE_S
    ) -> "HTTPStore":
        """Open a run of the store at a URL. The server may be started later: it is waited for.

        Raises:
            ConfigError: the URL is invalid.
        """
        return cls(RetryingClient(url, token, patience_s=patience_s), run)

    def for_run(self, run: str) -> "HTTPStore":
        return HTTPStore(self._client, run, owns=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._owns:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(self._client.close)

    # ------------------------------------------------------------------ queue

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        await self._call(Store.enqueue, rollouts)

    async def claim(self, worker: str, *, lease_s: float, wait_s: float) -> Attempt | None:
        deadline = anyio.current_time() + wait_s
        while True:
            left_s = max(deadline - anyio.current_time(), 0.0)
            try:
                attempt = await self._claim(worker, lease_s, min(left_s, rpc.MAX_WAIT_S))
            except LeaseLost:
                continue  # it was ours and its lease expired while the server was away
            if attempt is not None or left_s <= rpc.MAX_WAIT_S:
                return attempt

    async def heartbeat(self, attempt: AttemptId, *, lease_s: float) -> None:
        await self._add(Store.heartbeat, attempt, lease_s=lease_s)

    async def finish(self, attempt: AttemptId, outcome: Outcome) -> None:
        await self._add(Store.finish, attempt, outcome)

    async def wait(self, rollouts: Sequence[str]) -> None:
        await self._call(Store.wait, rollouts)

    async def cancel(self, rollouts: Sequence[str]) -> int:
        return await self._call(Store.cancel, rollouts)

    async def ended(self, attempt: AttemptId) -> Status:
        return await self._call(Store.ended, attempt)

    async def release_workers(self) -> int:
        return await self._call(Store.release_workers)

    # ------------------------------------------------------------------ attempts

    async def attempt(self, attempt: AttemptId) -> Attempt:
        return await self._call(Store.attempt, attempt)

    async def append(self, call: Call) -> None:
        await self._add(Store.append, call)

    async def emit(
        self, attempt: AttemptId, reward: Reward, *, idempotency_key: str | None = None
    ) -> None:
        await self._add(Store.emit, attempt, reward, idempotency_key=idempotency_key)

    async def rewards(self, attempt: AttemptId) -> list[Reward]:
        return await self._call(Store.rewards, attempt)

    async def calls(self, attempt: AttemptId) -> list[Call]:
        return await self._call(Store.calls, attempt)

    async def trajectories(
        self, rollouts: Sequence[str], *, failed: bool = False
    ) -> list[Trajectory]:
        readers = asyncio.Semaphore(READERS)  # one is parsed while the next is on its way

        async def read(part: Sequence[str]) -> list[Trajectory]:
            async with readers:
                return await self._call(Store.trajectories, part, failed=failed)

        starts = range(0, len(rollouts), ROLLOUTS_PER_READ)
        parts = [read(rollouts[start : start + ROLLOUTS_PER_READ]) for start in starts]
        return [trajectory for part in await asyncio.gather(*parts) for trajectory in part]

    async def failures(self, rollouts: Sequence[str]) -> dict[str, str]:
        return await self._call(Store.failures, rollouts)

    async def record(self, attempt: AttemptId, spans: Sequence[Span]) -> None:
        await self._add(Store.record, attempt, spans)

    async def spans(self, attempt: AttemptId) -> list[Span]:
        return await self._call(Store.spans, attempt)

    # ------------------------------------------------------------------ steps, resources

    async def commit(
        self,
        record: StepRecord,
        *,
        advantages: Mapping[GenerationId, float] = NO_ADVANTAGES,
        epoch: int | None = None,
    ) -> None:
        await self._call(Store.commit, record, advantages=dict(advantages), epoch=epoch)

    async def steps(self, *, after: int = -1, limit: int | None = None) -> list[StepRecord]:
        found: list[StepRecord] = []
        while limit is None or len(found) < limit:
            most = rpc.MAX_PAGE if limit is None else min(limit - len(found), rpc.MAX_PAGE)
            page = await self._call(Store.steps, after=after, limit=most)
            found += page
            if len(page) < most:
                break
            after = page[-1].step
        return found

    async def advantages(self, step: int) -> dict[GenerationId, float]:
        return await self._call(Store.advantages, step)

    async def publish(self, name: str, value: JsonValue, *, epoch: int | None = None) -> int:
        return await self._call(Store.publish, check_name(name), value, epoch=epoch)

    async def get(self, name: str, version: int) -> Resource:
        return await self._call(Store.get, name, version)

    async def latest(self, name: str) -> Resource:
        return await self._call(Store.latest, name)

    async def resources(self) -> list[Resource]:
        return await self._call(Store.resources)

    # ------------------------------------------------------------------ listings

    async def rollouts(
        self,
        *,
        status: Status | None = None,
        mode: Mode | None = None,
        group: str | None = None,
        after: str | None = None,
        limit: int = 100,
    ) -> list[RolloutRecord]:
        found: list[RolloutRecord] = []
        while len(found) < limit:
            most = min(limit - len(found), rpc.MAX_PAGE)
            page = await self._call(
                Store.rollouts, status=status, mode=mode, group=group, after=after, limit=most
            )
            found += page
            if len(page) < most:
                break
            after = page[-1].rollout.id
        return found

    async def attempts(self, rollout: str) -> list[AttemptRecord]:
        return await self._call(Store.attempts, rollout)

    async def workers(self) -> list[WorkerRecord]:
        return await self._call(Store.workers)

    async def counts(self) -> dict[str, int]:
        return await self._call(Store.counts)

    # ------------------------------------------------------------------ retention

    async def size(self) -> dict[str, RunSize]:
        return await self._call(Store.size)

    async def prune(self, before: float) -> int:
        return await self._call(Store.prune, before)

    async def drop(self) -> None:
        await self._call(Store.drop)

    async def vacuum(self) -> None:
        await self._call(Store.vacuum)

    async def export(self, file: Path) -> None:
        with (
            boundary(StoreError, f"{str(file)!r} cannot be written"),
            atomic_file(file) as partial,
        ):
            await self._transfer(METHODS["export"], download=partial)

    async def load(self, file: Path) -> None:
        if not await to_thread.run_sync(file.is_file):
            raise StoreError(f"{str(file)!r} cannot be loaded: there is no such file")
        try:
            await self._transfer(METHODS["load"], upload=file)
        except StoreError as error:
            raise type(error)(f"{str(file)!r} cannot be loaded: {error}") from error

    # ------------------------------------------------------------------ one request

    async def _call(self, function: "Function[P, T]", *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a method of the store on the server."""
        method = METHODS[function.__name__]
        with boundary(StoreError, "store"):  # such as a lone surrogate in an id
            request = self._build(method, _bind(method, args, kwargs))
        timeout_s = LONG_TIMEOUT_S if method.name in _LONG else TIMEOUT_S + rpc.MAX_WAIT_S
        while True:
            response = await self._send(request, timeout_s)
            if response.status != 202:  # else it was held as long as a request is
                return await _parse(method, response)

    def _build(self, method: RemoteMethod[Any], arguments: dict[str, Any]) -> Request:
        """Build the request of a method from its arguments."""
        path = {
            name: quote(str(arguments.pop(name)), safe="") for name in _list_path_parameters(method)
        }
        url = method.url(run=self.run, **path)
        if method.polls:
            arguments.setdefault("wait_s", rpc.MAX_WAIT_S)
        headers = {"Idempotency-Key": _create_key()} if method.keyed else {}
        if method.verb != "POST":
            query = {name: value for name, value in arguments.items() if value is not None}
            return Request(
                method.verb, f"{url}?{urlencode(query)}" if query else url, headers=headers
            )
        return Request("POST", url, _encode(method, arguments).encode(), headers)

    async def _send(self, request: Request, timeout_s: float) -> Response:
        sent = self._client.run(self._client.send(request, timeout_s=timeout_s))
        return await asyncio.wrap_future(sent)

    async def _transfer(
        self,
        method: RemoteMethod[Any],
        *,
        upload: Path | None = None,
        download: Path | None = None,
    ) -> None:
        # An archive is compressed already.
        headers = {"Idempotency-Key": _create_key(), "Accept-Encoding": "identity"}
        url = method.url(run=self.run)
        request = Request(method.verb, url, b"", headers, upload, download)
        await self._send(request, LONG_TIMEOUT_S)

    # ------------------------------------------------------------------ claims

    async def _claim(self, worker: str, lease_s: float, wait_s: float) -> Attempt | None:
        method = METHODS["claim"]
        arguments = {"worker": worker, "lease_s": lease_s, "wait_s": wait_s}
        request = self._build(method, arguments)
        try:
            return await _parse(method, await self._send(request, TIMEOUT_S + wait_s))
        except asyncio.CancelledError:
            # The server may have made the claim, or still make it: no worker would run it.
            with suppress(StoreClosed):
                self._client.run(self._give_back(request.headers["Idempotency-Key"]))
            raise

    async def _give_back(self, key: str) -> None:
        url = METHODS["give_back"].url(run=self.run, key=key)
        with suppress(StoreError):  # its lease will expire
            await self._client.send(Request("DELETE", url), patience_s=GIVE_BACK_S)

    # ------------------------------------------------------------------ batches

    async def _add(self, function: "Function[P, None]", *args: P.args, **kwargs: P.kwargs) -> None:
        """Call a batched method of the store, together with other calls of it."""
        method = METHODS[function.__name__]
        item = _encode(method, _bind(method, args, kwargs))
        detail = await self._batchers[method.name].add(item)
        if detail is not None:
            raise from_http(detail)

    async def _send_batch(
        self, method: RemoteMethod[Any], items: Sequence[str]
    ) -> Sequence[ErrorDetail | None]:
        headers = {"Idempotency-Key": _create_key()} if method.keyed else {}
        body = f'{{"items":[{",".join(items)}]}}'.encode()
        request = Request("POST", method.url(run=self.run), body, headers)
        response = await self._client.send(request)
        return rpc.parse_json(_BATCH_RESULT, response.body).errors


_LONG = {"size", "prune", "drop", "vacuum"}
"""Operations of maintenance."""


def _bind(method: RemoteMethod[Any], args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(method.parameters, args, strict=False)), **kwargs}


def _list_path_parameters(method: RemoteMethod[Any]) -> list[str]:
    return [name for name in method.path_parameters if name != "run"]


def _encode(method: RemoteMethod[Any], arguments: dict[str, Any]) -> str:
    """Validate and encode what the server would refuse otherwise."""
    with boundary(StoreError, f"{method.name} cannot be sent"):
        return to_json_fast(method.request.model_validate(arguments))


async def _parse(method: RemoteMethod[T], response: Response) -> T:
    with boundary(StoreError, "the store's response cannot be read"):
        if method.is_silent:
            return None  # type: ignore[return-value] - T is None
        if len(response.body) < 2**16:
            return rpc.parse_json(method.response, response.body)
        # Megabytes of calls, parsed without blocking the loop's other tasks.
        return await to_thread.run_sync(rpc.parse_json, method.response, response.body)


def _create_key() -> str:
    return secrets.token_hex(16)
