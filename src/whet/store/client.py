"""A store that is served elsewhere, by its URL."""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache
from pathlib import Path
from types import NoneType, TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote, urlencode

import anyio
from anyio import to_thread
from pydantic import JsonValue, TypeAdapter

from whet.errors import LeaseLost, MissingExtra, StoreClosed, StoreError, WhetError, boundary
from whet.protocols import Store
from whet.store.http import frames, wire
from whet.store.http.batching import Batcher
from whet.store.http.problems import Problem, error_of
from whet.store.packed import pack_call
from whet.store.packing import to_json
from whet.store.sql import DEFAULT_RUN
from whet.types import (
    Attempt,
    AttemptId,
    AttemptRecord,
    Call,
    Mode,
    Name,
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

try:
    from whet.store.http.asking import TIMEOUT_S, Asking, Unreachable
    from whet.store.http.connection import Reply, Request, Sink
except ImportError as error:
    raise MissingExtra.of("a store over HTTP", "gateway") from error

T = TypeVar("T")
U = TypeVar("U")

_NAME = TypeAdapter[str](Name)

PATIENCE_S = 300.0
NO_TIMEOUT_S = 24 * 3600.0
"""For what takes as long as it takes."""
GIVE_BACK_S = 10.0
READ_AT_ONCE = 64
"""Rollouts whose trajectories come in one answer."""
READERS = 2
PIECE = 2**18


class HTTPStore(Store):
    """One run of a store behind a server, usable from several event loops and threads at once.

    A server that is gone is waited for: every request may be sent again, and is done once.
    """

    def __init__(self, asking: Asking, run: str = DEFAULT_RUN, *, owns: bool = True) -> None:
        """Closing a store that `owns` its connections closes those too."""
        with boundary(StoreError, "run"):
            self.run = _NAME.validate_python(run)
        self._asking = asking
        self._owns = owns
        self._base = f"/v1/runs/{run}"
        self._claims = self._batcher(self._send_claims)
        self._appends = self._batcher(self._send_calls)
        self._heartbeats = self._batcher(self._send_to("/heartbeats", "heartbeats"))
        self._finishes = self._batcher(self._send_to("/outcomes", "finishes"))
        self._emits = self._batcher(self._send_to("/rewards", "rewards"))
        self._records = self._batcher(self._send_to("/spans", "told"))

    @classmethod
    def connect(
        cls, url: str, *, token: str, run: str = DEFAULT_RUN, patience_s: float = PATIENCE_S
    ) -> "HTTPStore":
        """A run of the store at a URL. The server may be started later: it is waited for.

        Raises:
            ConfigError: the URL is none.
        """
        return cls(Asking(url, token, patience_s=patience_s), run)

    def for_run(self, run: str) -> "HTTPStore":
        return HTTPStore(self._asking, run, owns=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._owns:
            with anyio.CancelScope(shield=True):
                await to_thread.run_sync(self._asking.close)

    # ------------------------------------------------------------------ the queue

    async def enqueue(self, rollouts: Sequence[Rollout]) -> None:
        with boundary(StoreError, "rollouts cannot be stored"):
            body = to_json({"rollouts": [rollout.model_dump() for rollout in rollouts]})
        await self._post("/rollouts", body)

    async def claim(self, worker: str, *, lease_s: float, wait_s: float) -> Attempt | None:
        deadline = anyio.current_time() + wait_s
        while True:
            left_s = max(deadline - anyio.current_time(), 0.0)
            try:
                attempt = await self._claim(worker, lease_s, min(left_s, wire.MAX_WAIT_S))
            except LeaseLost:
                continue  # it was ours and is lost, as the server was away: look for another
            if attempt is not None or left_s <= wire.MAX_WAIT_S:
                return attempt

    async def heartbeat(self, attempt: AttemptId, *, lease_s: float) -> None:
        item = wire.Heartbeat.model_construct(attempt=attempt, lease_s=lease_s)
        await self._in_batch(self._heartbeats, to_json(item))

    async def finish(self, attempt: AttemptId, outcome: Outcome) -> None:
        item = wire.Finish.model_construct(attempt=attempt, outcome=outcome)
        await self._in_batch(self._finishes, to_json(item))

    async def wait(self, rollouts: Sequence[str]) -> None:
        body = to_json({"rollouts": list(rollouts), "wait_s": wire.MAX_WAIT_S})
        while not (await self._post("/rollouts/wait", body, gives=wire.Waited)).ended:
            pass

    async def cancel(self, rollouts: Sequence[str]) -> int:
        body = to_json({"ticket": _ticket(), "rollouts": list(rollouts)})
        return (await self._post("/rollouts/cancel", body, gives=wire.Counted)).count

    async def ended(self, attempt: AttemptId) -> Status:
        path = f"/attempts/{quote(attempt, safe='')}/end?wait_s={wire.MAX_WAIT_S}"
        while True:
            status = (await self._get(path, wire.Standing)).status
            if status is not Status.RUNNING:
                return status

    async def release_workers(self) -> int:
        body = to_json({"ticket": _ticket()})
        return (await self._post("/workers/release", body, gives=wire.Counted)).count

    # ------------------------------------------------------------------ the log

    async def attempt(self, attempt: AttemptId) -> Attempt:
        return await self._get(f"/attempts/{quote(attempt, safe='')}", Attempt)

    async def append(self, call: Call) -> None:
        framed = frames.frame_call(pack_call(call))
        await self._in_batch(self._appends, framed, len(framed.head) + len(framed.numbers))

    async def emit(self, attempt: AttemptId, reward: Reward) -> None:
        item = wire.Emit.model_construct(ticket=_ticket(), attempt=attempt, reward=reward)
        await self._in_batch(self._emits, to_json(item))

    async def rewards(self, attempt: AttemptId) -> list[Reward]:
        return await self._get(f"/attempts/{quote(attempt, safe='')}/rewards", list[Reward])

    async def calls(self, attempt: AttemptId) -> list[Call]:
        reply = await self._ask("GET", f"{self._base}/attempts/{quote(attempt, safe='')}/calls")
        return frames.read_calls(reply.body)

    async def trajectories(self, rollouts: Sequence[str]) -> list[Trajectory]:
        starts = range(0, len(rollouts), READ_AT_ONCE)
        reading = asyncio.Semaphore(READERS)  # one is read while the next is on its way

        async def read(start: int) -> list[Trajectory]:
            body = to_json({"rollouts": list(rollouts[start : start + READ_AT_ONCE])}).encode()
            async with reading:
                reply = await self._ask("POST", f"{self._base}/rollouts/trajectories", body)
                return await to_thread.run_sync(frames.read_trajectories, reply.body)

        parts = await asyncio.gather(*(read(start) for start in starts))
        return [trajectory for part in parts for trajectory in part]

    async def failures(self, rollouts: Sequence[str]) -> dict[str, str]:
        body = to_json({"rollouts": list(rollouts)})
        return await self._post("/rollouts/failures", body, gives=dict[str, str])

    async def record(self, attempt: AttemptId, spans: Sequence[Span]) -> None:
        item = to_json(wire.Told.model_construct(attempt=attempt, spans=tuple(spans)))
        await self._in_batch(self._records, item, len(item))

    async def spans(self, attempt: AttemptId) -> list[Span]:
        return await self._get(f"/attempts/{quote(attempt, safe='')}/spans", list[Span])

    # ------------------------------------------------------------------ the steps

    async def commit(self, record: StepRecord) -> None:
        await self._post("/steps", to_json(record))

    async def steps(self, *, after: int = -1, limit: int | None = None) -> list[StepRecord]:
        found: list[StepRecord] = []
        while limit is None or len(found) < limit:
            most = wire.MAX_PAGE if limit is None else min(limit - len(found), wire.MAX_PAGE)
            query = urlencode({"after": after, "limit": most})
            page = await self._get(f"/steps?{query}", list[StepRecord])
            found += page
            if len(page) < most:
                break
            after = page[-1].step
        return found

    # ------------------------------------------------------------------ resources

    async def publish(self, name: str, value: JsonValue) -> int:
        with boundary(StoreError, "the resource cannot be stored"):
            body, name = to_json({"ticket": _ticket(), "value": value}), _NAME.validate_python(name)
        return (await self._post(f"/resources/{name}", body, gives=wire.Published)).version

    async def get(self, name: str, version: int) -> Resource:
        return await self._get(f"/resources/{quote(name, safe='')}/{version}", Resource)

    async def latest(self, name: str) -> Resource:
        return await self._get(f"/resources/{quote(name, safe='')}", Resource)

    async def resources(self) -> list[Resource]:
        return await self._get("/resources", list[Resource])

    # ------------------------------------------------------------------ what is there

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
        filters = {"status": status, "mode": mode, "group": group}
        while len(found) < limit:
            most = min(limit - len(found), wire.MAX_PAGE)
            asked = {**filters, "after": after, "limit": most}
            query = urlencode({name: value for name, value in asked.items() if value is not None})
            page = await self._get(f"/rollouts?{query}", list[RolloutRecord])
            found += page
            if len(page) < most:
                break
            after = page[-1].rollout.id
        return found

    async def attempts(self, rollout: str) -> list[AttemptRecord]:
        return await self._get(f"/rollouts/{quote(rollout, safe='')}/attempts", list[AttemptRecord])

    async def workers(self) -> list[WorkerRecord]:
        return await self._get("/workers", list[WorkerRecord])

    async def counts(self) -> dict[str, int]:
        return await self._get("/counts", dict[str, int])

    # ------------------------------------------------------------------ retention

    async def size(self) -> dict[str, RunSize]:
        reply = await self._ask("GET", "/v1/size", timeout_s=NO_TIMEOUT_S)
        return _parsed(reply, dict[str, RunSize])

    async def prune(self, before: float) -> int:
        body = to_json({"ticket": _ticket(), "before": before}).encode()
        reply = await self._ask("POST", f"{self._base}/prune", body, timeout_s=NO_TIMEOUT_S)
        return _parsed(reply, wire.Counted).count

    async def drop(self) -> None:
        await self._ask("DELETE", f"{self._base}?ticket={_ticket()}", timeout_s=NO_TIMEOUT_S)

    async def vacuum(self) -> None:
        await self._ask("POST", "/v1/vacuum", timeout_s=NO_TIMEOUT_S)

    async def export(self, file: Path) -> None:
        part = file.with_name(f"{file.name}.part")
        with boundary(StoreError, f"{str(file)!r} cannot be written"):
            await self._download(part)
            part.replace(file)

    async def load(self, file: Path) -> None:
        if not await to_thread.run_sync(file.is_file):
            raise StoreError(f"{str(file)!r} cannot be loaded: there is no such file")
        request = Request(
            "PUT", f"{self._base}/archive?ticket={_ticket()}", pieces=lambda: _pieces(file)
        )
        try:
            await self._submit(request, NO_TIMEOUT_S)
        except StoreError as error:
            raise type(error)(f"{str(file)!r} cannot be loaded: {error}") from error

    async def _download(self, part: Path) -> None:
        with ExitStack() as stack:

            def sink() -> Sink:
                stack.close()  # of a download that broke off
                return stack.enter_context(part.open("wb")).write

            await self._submit(Request("GET", f"{self._base}/archive", sink=sink), NO_TIMEOUT_S)

    # ------------------------------------------------------------------ asking

    async def _ask(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float = TIMEOUT_S
    ) -> Reply:
        return await self._submit(Request(method, path, body), timeout_s)

    async def _get(self, path: str, gives: type[T]) -> T:
        return _parsed(await self._ask("GET", self._base + path), gives)

    async def _post(self, path: str, body: str, gives: type[T] = NoneType) -> T:
        return _parsed(await self._ask("POST", self._base + path, body.encode()), gives)

    async def _submit(self, request: Request, timeout_s: float) -> Reply:
        asked = self._asking.submit(self._asking.ask(request, timeout_s=timeout_s))
        return await asyncio.wrap_future(asked)

    async def _claim(self, worker: str, lease_s: float, wait_s: float) -> Attempt | None:
        claim = wire.Claim.model_construct(ticket=_ticket(), worker=worker, lease_s=lease_s)
        ask = self._claim_alone(claim, wait_s) if wait_s > 0 else self._claims.add(claim)
        try:
            claimed = await asyncio.wrap_future(self._asking.submit(ask))
        except asyncio.CancelledError:
            # It may have been done, or be done yet: nobody will hear of it.
            with suppress(StoreClosed):
                self._asking.submit(self._give_back(claim.ticket))
            raise
        if claimed.error is not None:
            raise error_of(claimed.error)
        return claimed.attempt

    async def _claim_alone(self, claim: wire.Claim, wait_s: float) -> wire.Claimed:
        [claimed] = await self._send_claims([claim], wait_s)
        return claimed

    async def _give_back(self, ticket: str) -> None:
        request = Request("DELETE", f"{self._base}/claims/{ticket}")
        with suppress(StoreError):  # its lease will run out
            await self._asking.ask(request, patience_s=GIVE_BACK_S)

    # ------------------------------------------------------------------ asking for many at once

    async def _in_batch(self, batcher: Batcher[T, Problem | None], item: T, size: int = 0) -> None:
        problem = await asyncio.wrap_future(self._asking.submit(batcher.add(item, size)))
        if problem is not None:
            raise error_of(problem)

    def _batcher(self, send: Callable[[Sequence[T]], Awaitable[Sequence[U]]]) -> Batcher[T, U]:
        return Batcher(send, is_refusal=_is_refusal)

    def _send_to(
        self, path: str, name: str
    ) -> Callable[[Sequence[str]], Awaitable[Sequence[Problem | None]]]:
        async def send(items: Sequence[str]) -> Sequence[Problem | None]:
            body = f'{{"{name}":[{",".join(items)}]}}'.encode()
            reply = await self._asking.ask(Request("POST", self._base + path, body))
            return _parsed(reply, wire.Done).errors

        return send

    async def _send_calls(self, calls: Sequence[frames.Framed]) -> Sequence[Problem | None]:
        body = frames.frame_calls(calls)
        reply = await self._asking.ask(Request("POST", f"{self._base}/calls", body))
        return _parsed(reply, wire.Done).errors

    async def _send_claims(
        self, claims: Sequence[wire.Claim], wait_s: float = 0.0
    ) -> Sequence[wire.Claimed]:
        body = to_json(wire.Claims.model_construct(claims=tuple(claims), wait_s=wait_s)).encode()
        request = Request("POST", f"{self._base}/claims", body)
        reply = await self._asking.ask(request, timeout_s=wait_s + TIMEOUT_S)
        return _parsed(reply, wire.ClaimedBatch).claimed


def _ticket() -> str:
    return secrets.token_hex(16)


def _parsed(reply: Reply, gives: type[T]) -> T:
    if not reply.body:
        return None  # type: ignore
    return _adapter(gives).validate_python(wire.parse_json(reply.body))


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # Any: of all answers
    return TypeAdapter(kind)


def _is_refusal(error: WhetError) -> bool:
    return isinstance(error, StoreError) and not isinstance(error, (Unreachable, StoreClosed))


async def _pieces(file: Path) -> AsyncGenerator[bytes]:
    async with await anyio.open_file(file, "rb") as source:
        while piece := await source.read(PIECE):
            yield piece
