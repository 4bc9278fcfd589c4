"""The store over HTTP, as a table: what is asked where, what it takes and what it gives."""

import asyncio
import os
import tempfile
import zipfile
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import anyio
from anyio import to_thread
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from whet.errors import StoreError
from whet.store.http import frames, wire
from whet.store.http.bodies import Limits, read_pieces
from whet.store.http.holding import Holding
from whet.store.http.metrics import Metrics
from whet.store.http.problems import Problem, TooLarge, is_fault, tell
from whet.store.sql import SQLStore
from whet.types import (
    Attempt,
    AttemptId,
    AttemptRecord,
    Resource,
    Reward,
    RolloutRecord,
    RunSize,
    Span,
    Status,
    StepRecord,
    Value,
    WorkerRecord,
    gateways_in,
)

T = TypeVar("T")
Ask = TypeVar("Ask")
Gives = TypeVar("Gives")

ARCHIVE = "application/zip"
FEW_BYTES = 256 * 2**20
MOST_PACKED = 100
"""How many times smaller than it is an archive may be, beyond a few bytes."""


class Nothing(Value):
    """A request that says nothing but where it goes."""


class Frame(NamedTuple):
    """A body with numbers after its head."""

    content: bytes


@dataclass(frozen=True, slots=True)
class Asked(Generic[Ask]):
    """A request that was understood."""

    ask: Ask
    """Its JSON body or frame if it is a POST, else its query."""
    store: SQLStore
    """Of the run in the path."""
    path: Mapping[str, str]
    request: Request
    holding: Holding
    metrics: Metrics
    limits: Limits


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Ask, Gives]):
    """What may be asked at a path. The first line of `act` says what it does."""

    name: str
    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    act: Callable[[Asked[Ask]], Coroutine[Any, Any, Gives]]
    asks: type[Ask]
    gives: type[Gives]
    head: type[Value] | None = None
    """Of the frame it takes or gives."""


async def _each(acts: Sequence[Awaitable[object]]) -> wire.Done:
    """All at once, so that they share a commit; each is refused for itself."""
    gave = await asyncio.gather(*acts, return_exceptions=True)
    return wire.Done(errors=tuple(_refused(one) for one in gave))


def _refused(gave: object) -> Problem | None:
    if isinstance(gave, StoreError) and not is_fault(gave):
        return tell(gave).problem
    if isinstance(gave, BaseException):
        raise gave
    return None


# --------------------------------------------------------------------------- the queue


async def _claim(asked: Asked[wire.Claims]) -> wire.ClaimedBatch:
    """Take rollouts as new attempts; waits for the first, not for all."""
    first, *others = asked.ask.claims
    one = partial(_claim_one, asked.store)
    if asked.ask.wait_s > 0:
        claimed = [await asked.holding.hold(asked.request, lambda: one(first, asked.ask.wait_s))]
    else:
        claimed, others = [], asked.ask.claims
    claimed += await asyncio.gather(*(one(claim, 0.0) for claim in others))
    asked.metrics.count("claims", sum(each.attempt is not None for each in claimed))
    return wire.ClaimedBatch(claimed=tuple(claimed))


async def _claim_one(store: SQLStore, claim: wire.Claim, wait_s: float) -> wire.Claimed:
    try:
        return wire.Claimed(
            attempt=await store.once(claim.ticket).claim(
                claim.worker, lease_s=claim.lease_s, wait_s=wait_s
            )
        )
    except StoreError as error:
        return wire.Claimed(error=_refused(error))


async def _give_back(asked: Asked[Nothing]) -> None:
    """Undo a claim that its worker never heard of; the ticket claims nothing any more."""
    await asked.store.give_back(asked.path["ticket"])


async def _heartbeat(asked: Asked[wire.Heartbeats]) -> wire.Done:
    """Keep leases."""
    done = await _each(
        [asked.store.heartbeat(one.attempt, lease_s=one.lease_s) for one in asked.ask.heartbeats]
    )
    asked.metrics.count("heartbeats", done.errors.count(None))
    return done


async def _finish(asked: Asked[wire.Finishes]) -> wire.Done:
    """End attempts. An outcome that comes too late is refused, and kept for the record."""
    finishes = asked.ask.finishes
    done = await _each([asked.store.finish(one.attempt, one.outcome) for one in finishes])
    for one, error in zip(finishes, done.errors, strict=True):
        if error is None:
            failure = one.outcome.failure
            asked.metrics.count("outcomes", how=failure.kind if failure else "succeeded")
        elif error.code == "lease_lost":
            asked.metrics.count("late_outcomes")
    return done


async def _enqueue(asked: Asked[wire.Enqueue]) -> None:
    """Add rollouts, all or none; one whose id is known is left as it is."""
    await asked.store.enqueue(asked.ask.rollouts)


async def _wait(asked: Asked[wire.WaitFor]) -> wire.Waited:
    """Wait until all of some rollouts have ended."""

    async def wait() -> bool:
        with anyio.move_on_after(asked.ask.wait_s):
            await asked.store.wait(asked.ask.rollouts)
            return True
        return False

    return wire.Waited(ended=await asked.holding.hold(asked.request, wait))


async def _cancel(asked: Asked[wire.Cancel]) -> wire.Counted:
    """End those that have not ended, with their attempts, and count them."""
    store = asked.store.once(asked.ask.ticket)
    return wire.Counted(count=await store.cancel(asked.ask.rollouts))


async def _ended(asked: Asked[wire.HowLong]) -> wire.Standing:
    """Wait until an attempt has ended."""
    attempt = AttemptId(asked.path["attempt"])

    async def wait() -> Status:
        with anyio.move_on_after(asked.ask.wait_s):
            return await asked.store.ended(attempt)
        return Status.RUNNING

    return wire.Standing(status=await asked.holding.hold(asked.request, wait))


async def _release(asked: Asked[wire.Ticketed]) -> wire.Counted:
    """Take every running attempt from its worker, and count them."""
    return wire.Counted(count=await asked.store.once(asked.ask.ticket).release_workers())


# --------------------------------------------------------------------------- the log


async def _append(asked: Asked[Frame]) -> wire.Done:
    """Record calls, each once by its id."""
    calls = frames.read_packed_calls(asked.ask.content)
    done = await _each([asked.store.append_packed(call) for call in calls])
    recorded = [c for c, error in zip(calls, done.errors, strict=True) if error is None]
    sampled = sum(len(each.tokens) // 4 for call in recorded for each in call.generations)
    asked.metrics.count("calls", len(recorded))
    asked.metrics.count("sampled_tokens", sampled)
    return done


async def _emit(asked: Asked[wire.Emits]) -> wire.Done:
    """Record rewards."""
    done = await _each(
        [asked.store.once(one.ticket).emit(one.attempt, one.reward) for one in asked.ask.rewards]
    )
    asked.metrics.count("rewards", done.errors.count(None))
    return done


async def _attempt(asked: Asked[Nothing]) -> Attempt:
    """A running attempt."""
    return await asked.store.attempt(AttemptId(asked.path["attempt"]))


async def _rewards(asked: Asked[Nothing]) -> list[Reward]:
    """The rewards of an attempt in the order they came."""
    return await asked.store.rewards(AttemptId(asked.path["attempt"]))


async def _calls(asked: Asked[Nothing]) -> Frame:
    """The calls of an attempt in the order they were recorded."""
    calls = await asked.store.packed_calls(AttemptId(asked.path["attempt"]))
    return Frame(frames.frame_calls(map(frames.frame_call, calls)))


async def _trajectories(asked: Asked[wire.RolloutIds]) -> Frame:
    """The succeeded attempts of some rollouts, in the order asked."""
    found = await asked.store.packed_trajectories(asked.ask.rollouts)
    return Frame(frames.frame_trajectories(found))


async def _failures(asked: Asked[wire.RolloutIds]) -> dict[str, str]:
    """Why rollouts failed, for those of the given that did."""
    return await asked.store.failures(asked.ask.rollouts)


async def _record(asked: Asked[wire.Spans]) -> wire.Done:
    """Keep spans, each once by its ids, also of attempts that have ended."""
    told = asked.ask.told
    done = await _each([asked.store.record(one.attempt, one.spans) for one in told])
    kept = [one for one, error in zip(told, done.errors, strict=True) if error is None]
    asked.metrics.count("spans", sum(len(one.spans) for one in kept))
    return done


async def _spans(asked: Asked[Nothing]) -> list[Span]:
    """The spans of an attempt in the order they began."""
    return await asked.store.spans(AttemptId(asked.path["attempt"]))


# --------------------------------------------------------------------------- steps, resources


async def _commit(asked: Asked[StepRecord]) -> None:
    """Record a training step and what it consumed; the very last one again changes nothing."""
    await asked.store.commit(asked.ask)


async def _steps(asked: Asked[wire.StepPage]) -> list[StepRecord]:
    """Training steps, oldest first."""
    return await asked.store.steps(after=asked.ask.after, limit=asked.ask.limit)


async def _publish(asked: Asked[wire.Publish]) -> wire.Published:
    """Add the next version of a resource."""
    store = asked.store.once(asked.ask.ticket)
    return wire.Published(version=await store.publish(asked.path["name"], asked.ask.value))


async def _resources(asked: Asked[Nothing]) -> list[Resource]:
    """The newest version of every resource."""
    return await asked.store.resources()


async def _gateways(asked: Asked[Nothing]) -> list[wire.Gateway]:
    """Where the run's model is served now; empty while no `whet serve` does."""
    known = gateways_in(await asked.store.resources())
    return [wire.Gateway(url=each.url, model=each.model) for each in known]


async def _latest(asked: Asked[Nothing]) -> Resource:
    """The newest version of a resource."""
    return await asked.store.latest(asked.path["name"])


async def _get(asked: Asked[Nothing]) -> Resource:
    """One version of a resource."""
    return await asked.store.get(asked.path["name"], int(asked.path["version"]))


# --------------------------------------------------------------------------- what is there


async def _rollouts(asked: Asked[wire.RolloutPage]) -> list[RolloutRecord]:
    """Rollouts in the order they came, by page and filter."""
    page = asked.ask
    return await asked.store.rollouts(
        status=page.status, mode=page.mode, group=page.group, after=page.after, limit=page.limit
    )


async def _attempts(asked: Asked[Nothing]) -> list[AttemptRecord]:
    """The attempts of a rollout, with the reports that came too late."""
    return await asked.store.attempts(asked.path["rollout"])


async def _workers(asked: Asked[Nothing]) -> list[WorkerRecord]:
    """Whoever claimed or waits to claim, the last heard of first."""
    return await asked.store.workers()


async def _counts(asked: Asked[Nothing]) -> dict[str, int]:
    """How many rollouts, attempts, calls, spans, generations and sampled tokens there are."""
    return await asked.store.counts()


# --------------------------------------------------------------------------- retention


async def _size(asked: Asked[Nothing]) -> dict[str, RunSize]:
    """What every run keeps."""
    return await asked.store.size()


async def _vacuum(asked: Asked[Nothing]) -> None:
    """Give the space of what was forgotten back to the disk."""
    await asked.store.vacuum()


async def _prune(asked: Asked[wire.Prune]) -> wire.Counted:
    """Forget calls, rewards and spans of rollouts that ended before a time, and count them."""
    return wire.Counted(count=await asked.store.once(asked.ask.ticket).prune(asked.ask.before))


async def _drop(asked: Asked[wire.Ticketed]) -> None:
    """Forget the run and all that is in it."""
    await asked.store.once(asked.ask.ticket).drop()


async def _export(asked: Asked[Nothing]) -> Response:
    """The whole run as one file."""
    file = _temporary()
    try:
        await asked.store.export(file)
    except BaseException:
        file.unlink(missing_ok=True)
        raise
    return FileResponse(file, media_type=ARCHIVE, background=BackgroundTask(file.unlink))


async def _load(asked: Asked[wire.Ticketed]) -> None:
    """Fill an empty run with what was exported."""
    file = _temporary()
    try:
        async with await anyio.open_file(file, "wb") as out:
            async for piece in read_pieces(asked.request, asked.limits):
                await out.write(piece)
        await to_thread.run_sync(_check_archive, file, asked.limits.archive)
        with _without_name(file):
            await asked.store.once(asked.ask.ticket).load(file)
    finally:
        file.unlink(missing_ok=True)


def _check_archive(file: Path, limit: int) -> None:
    """Refuse what would unpack to much more than runs do. Whether it is one is seen later."""
    with suppress(zipfile.BadZipFile), zipfile.ZipFile(file) as archive:
        # A member is read no further than the size it claims.
        size = sum(member.file_size for member in archive.infolist())
        if size > min(limit, max(FEW_BYTES, MOST_PACKED * file.stat().st_size)):
            raise TooLarge(f"the archive would unpack to {size} bytes")


@contextmanager
def _without_name(file: Path) -> Generator[None]:
    """The file has no name where it came from."""
    try:
        yield
    except StoreError as error:
        told = type(error)(str(error).replace(repr(str(file)), "the archive"))
        raise told from error.__cause__


def _temporary() -> Path:
    handle, name = tempfile.mkstemp(prefix="whet-", suffix=".zip")
    os.close(handle)
    return Path(name)


_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"

IN_PATHS: dict[str, str] = {
    "run": _NAME,
    "rollout": _NAME,
    "attempt": r"[A-Za-z0-9][A-Za-z0-9_.-]{0,159}",
    "name": _NAME,
    "version": r"[0-9]{1,9}",
    "ticket": r"[A-Za-z0-9_-]{1,64}",
}
"""What may stand in a path: nothing that needs quoting, and no way out of it."""

RUN = "/v1/runs/{run}"
ROLLOUTS = f"{RUN}/rollouts"
ATTEMPT = f"{RUN}/attempts/{{attempt}}"
RESOURCES = f"{RUN}/resources"

ENDPOINTS: tuple[Endpoint[Any, Any], ...] = (  # Any: each row knows its own
    # The first are asked most often.
    Endpoint("append", "POST", f"{RUN}/calls", _append, Frame, wire.Done, wire.CallsHead),
    Endpoint("claim", "POST", f"{RUN}/claims", _claim, wire.Claims, wire.ClaimedBatch),
    Endpoint("finish", "POST", f"{RUN}/outcomes", _finish, wire.Finishes, wire.Done),
    Endpoint("emit", "POST", f"{RUN}/rewards", _emit, wire.Emits, wire.Done),
    Endpoint("heartbeat", "POST", f"{RUN}/heartbeats", _heartbeat, wire.Heartbeats, wire.Done),
    Endpoint("attempt", "GET", ATTEMPT, _attempt, Nothing, Attempt),
    Endpoint("calls", "GET", f"{ATTEMPT}/calls", _calls, Nothing, Frame, wire.CallsHead),
    Endpoint("record", "POST", f"{RUN}/spans", _record, wire.Spans, wire.Done),
    Endpoint("rewards", "GET", f"{ATTEMPT}/rewards", _rewards, Nothing, list[Reward]),
    Endpoint("spans", "GET", f"{ATTEMPT}/spans", _spans, Nothing, list[Span]),
    Endpoint("ended", "GET", f"{ATTEMPT}/end", _ended, wire.HowLong, wire.Standing),
    Endpoint("give_back", "DELETE", f"{RUN}/claims/{{ticket}}", _give_back, Nothing, NoneType),
    Endpoint("enqueue", "POST", ROLLOUTS, _enqueue, wire.Enqueue, NoneType),
    Endpoint("rollouts", "GET", ROLLOUTS, _rollouts, wire.RolloutPage, list[RolloutRecord]),
    Endpoint("wait", "POST", f"{ROLLOUTS}/wait", _wait, wire.WaitFor, wire.Waited),
    Endpoint("cancel", "POST", f"{ROLLOUTS}/cancel", _cancel, wire.Cancel, wire.Counted),
    Endpoint(
        "trajectories",
        "POST",
        f"{ROLLOUTS}/trajectories",
        _trajectories,
        wire.RolloutIds,
        Frame,
        wire.TrajectoriesHead,
    ),
    Endpoint(
        "failures", "POST", f"{ROLLOUTS}/failures", _failures, wire.RolloutIds, dict[str, str]
    ),
    Endpoint(
        "attempts",
        "GET",
        f"{ROLLOUTS}/{{rollout}}/attempts",
        _attempts,
        Nothing,
        list[AttemptRecord],
    ),
    Endpoint("commit", "POST", f"{RUN}/steps", _commit, StepRecord, NoneType),
    Endpoint("steps", "GET", f"{RUN}/steps", _steps, wire.StepPage, list[StepRecord]),
    Endpoint("publish", "POST", f"{RESOURCES}/{{name}}", _publish, wire.Publish, wire.Published),
    Endpoint("resources", "GET", RESOURCES, _resources, Nothing, list[Resource]),
    Endpoint("latest", "GET", f"{RESOURCES}/{{name}}", _latest, Nothing, Resource),
    Endpoint("get", "GET", f"{RESOURCES}/{{name}}/{{version}}", _get, Nothing, Resource),
    Endpoint("gateways", "GET", f"{RUN}/gateways", _gateways, Nothing, list[wire.Gateway]),
    Endpoint("workers", "GET", f"{RUN}/workers", _workers, Nothing, list[WorkerRecord]),
    Endpoint(
        "release_workers", "POST", f"{RUN}/workers/release", _release, wire.Ticketed, wire.Counted
    ),
    Endpoint("counts", "GET", f"{RUN}/counts", _counts, Nothing, dict[str, int]),
    Endpoint("prune", "POST", f"{RUN}/prune", _prune, wire.Prune, wire.Counted),
    Endpoint("export", "GET", f"{RUN}/archive", _export, Nothing, Response),
    Endpoint("load", "PUT", f"{RUN}/archive", _load, wire.Ticketed, NoneType),
    Endpoint("drop", "DELETE", RUN, _drop, wire.Ticketed, NoneType),
    Endpoint("size", "GET", "/v1/size", _size, Nothing, dict[str, RunSize]),
    Endpoint("vacuum", "POST", "/v1/vacuum", _vacuum, Nothing, NoneType),
)
