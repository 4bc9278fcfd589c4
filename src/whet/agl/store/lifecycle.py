"""Status changes of rollouts, attempts and workers in memory, as in Agent Lightning 0.3."""

import asyncio
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from pydantic import BaseModel

from whet.agl.spans import Span
from whet.agl.store.base import LightningStore
from whet.agl.types import (
    FINISHED,
    QUEUING,
    RUNNING,
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Metadata,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    TaskInput,
    Unset,
    Worker,
)
from whet.io.threads import call_in_loop

M = TypeVar("M", bound=BaseModel)


class RolloutLifecycle(LightningStore):
    """Base class of stores: queue, attempts, retries, time-outs and waits.

    A lock guards every change; nothing is awaited while it is held, so that any number of event
    loops and threads may share a store.
    """

    def __init__(self, *, scan_debounce_seconds: float) -> None:
        """`scan_debounce_seconds`: least time between two scans for time-outs."""
        self._lock = threading.RLock()
        self._debounce = scan_debounce_seconds
        self._started = time.time()
        self._scanned = 0.0
        self._rollouts: dict[str, Rollout] = {}
        self._attempts: dict[str, list[Attempt]] = defaultdict(list)
        self._spans: dict[str, dict[tuple[str, str], Span]] = defaultdict(dict)
        self._sequence: dict[str, int] = defaultdict(int)
        self._resources: dict[str, ResourcesUpdate] = {}
        self._latest_resources_id = ""
        """Id of the latest resources."""
        self._workers: dict[str, Worker] = {}
        self._queue = deque[str]()
        self._queued_ids = set[str]()
        """Ids in the queue."""
        self._running_ids = dict[str, None]()
        """Ids of rollouts that may time out, in the order they began."""
        self._waiters: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    # ------------------------------------------------------------------- persistence

    def _record_change(self, record: BaseModel) -> None:
        """Record that a record was added or changed; called with the lock held."""

    async def _flush(self) -> None:
        """Return once every change so far is durable."""

    # ------------------------------------------------------------------- queue

    async def start_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Metadata | None = None,
        worker_id: str | None = None,
    ) -> AttemptedRollout:
        with self._lock:
            self._expire_attempts()
            request = EnqueueRolloutRequest(
                input=input, mode=mode, resources_id=resources_id, config=config, metadata=metadata
            )
            rollout = self._add_rollout(request, "preparing")
            attempt = self._add_attempt(rollout, worker_id)
            result = attach_attempt(rollout, attempt)
        await self._flush()
        return result

    async def enqueue_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest]
    ) -> Sequence[Rollout]:
        with self._lock:
            self._expire_attempts()
            added = [copy_record(self._add_rollout(request, "queuing")) for request in rollouts]
        await self._flush()
        return added

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        found: list[AttemptedRollout] = []
        with self._lock:
            self._expire_attempts()
            while self._queue and len(found) < limit:
                id = self._queue.popleft()
                self._queued_ids.discard(id)
                rollout = self._rollouts[id]
                if rollout.status in QUEUING:  # else its status was changed while it waited
                    attempt = self._add_attempt(rollout, worker_id, is_dequeue=True)
                    found.append(attach_attempt(rollout, attempt))
            if worker_id is not None:
                if found:
                    self._update_worker_status(found[-1].attempt, is_dequeue=True)
                else:
                    self._mark_idle(worker_id)
        await self._flush()
        return found

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None
    ) -> AttemptedRollout:
        with self._lock:
            self._expire_attempts()
            rollout = self._find_rollout(rollout_id)
            attempt = self._add_attempt(rollout, worker_id)
            result = attach_attempt(rollout, attempt)
        await self._flush()
        return result

    async def wait_for_rollouts(
        self, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> list[Rollout]:
        deadline = None if timeout is None else time.monotonic() + timeout
        event = asyncio.Event()
        with self._lock:
            self._waiters[event] = asyncio.get_running_loop()
        try:
            while True:
                event.clear()
                with self._lock:
                    self._expire_attempts()
                    known = [self._rollouts[id] for id in rollout_ids if id in self._rollouts]
                    finished = [copy_record(r) for r in known if r.status in FINISHED]
                left = None if deadline is None else deadline - time.monotonic()
                if len(finished) == len(known) or (left is not None and left <= 0):
                    return finished
                await self._wait_for_change(event, left)
        finally:
            with self._lock:
                del self._waiters[event]

    async def _wait_for_change(self, event: asyncio.Event, left: float | None) -> None:
        """Wait for a change, or until the next scan for time-outs is due."""
        pause = max(self._debounce, 0.05) if self._running_ids else None
        times = [each for each in (left, pause) if each is not None]
        with suppress(TimeoutError):
            await asyncio.wait_for(event.wait(), min(times, default=None))

    async def update_rollout(
        self,
        rollout_id: str,
        input: TaskInput = UNSET,
        mode: RolloutMode | Unset | None = UNSET,
        resources_id: str | Unset | None = UNSET,
        status: RolloutStatus | Unset = UNSET,
        config: RolloutConfig | Unset = UNSET,
        metadata: Metadata | Unset | None = UNSET,
    ) -> Rollout:
        values = {
            "input": input,
            "mode": mode,
            "resources_id": resources_id,
            "config": config,
            "metadata": metadata,
        }
        with self._lock:
            self._expire_attempts()
            rollout = self._find_rollout(rollout_id)
            _validate(rollout, {**values, "status": status})
            for name, value in values.items():
                if not isinstance(value, Unset):
                    setattr(rollout, name, value)
            if isinstance(status, Unset):
                self._record_change(rollout)
            else:
                self._set_status(rollout, status)
            result = copy_record(rollout)
        await self._flush()
        return result

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: Metadata | Unset | None = UNSET,
    ) -> Attempt:
        with self._lock:
            self._expire_attempts()
            rollout = self._find_rollout(rollout_id)
            attempt = self._find_attempt(rollout_id, attempt_id)
            values = {
                "status": status,
                "worker_id": worker_id,
                "last_heartbeat_time": last_heartbeat_time,
                "metadata": metadata,
            }
            _validate(attempt, values)
            for name, value in values.items():
                if not isinstance(value, Unset):
                    setattr(attempt, name, value)
            self._apply_attempt_change(
                rollout, attempt, has_new_status=not isinstance(status, Unset)
            )
            if attempt.worker_id and not (
                isinstance(status, Unset) and isinstance(worker_id, Unset)
            ):
                self._update_worker_status(attempt)
            result = copy_record(attempt)
        await self._flush()
        return result

    # ------------------------------------------------------------------- changes, under the lock

    def _add_rollout(self, request: EnqueueRolloutRequest, status: RolloutStatus) -> Rollout:
        config = request.config
        rollout = Rollout(
            rollout_id=f"ro-{secrets.token_hex(6)}",
            input=request.input,
            mode=request.mode,
            resources_id=request.resources_id or self._latest_resources_id or None,
            start_time=time.time(),
            status=status,
            config=config.model_copy(deep=True) if config else RolloutConfig(),
            metadata=dict(request.metadata or {}),
        )
        self._rollouts[rollout.rollout_id] = rollout
        self._set_status(rollout, status)
        return rollout

    def _add_attempt(
        self, rollout: Rollout, worker_id: str | None, *, is_dequeue: bool = False
    ) -> Attempt:
        attempts = self._attempts[rollout.rollout_id]
        attempt = Attempt(
            rollout_id=rollout.rollout_id,
            attempt_id=f"at-{secrets.token_hex(4)}",
            sequence_id=len(attempts) + 1,
            start_time=time.time(),
            worker_id=worker_id,
        )
        attempts.append(attempt)
        self._record_change(attempt)
        self._set_status(rollout, "preparing")
        # Dequeuing sets the worker's status once, for the last rollout.
        if worker_id is not None and not is_dequeue:
            self._update_worker_status(attempt)
        return attempt

    def _apply_attempt_change(
        self, rollout: Rollout, attempt: Attempt, *, has_new_status: bool
    ) -> None:
        """Record a changed attempt, and update the rollout if it is its latest one."""
        if has_new_status and attempt.status in ("failed", "succeeded"):
            attempt.end_time = time.time()
        self._record_change(attempt)
        if attempt is self._attempts[rollout.rollout_id][-1]:
            status = _derive_rollout_status(attempt, rollout.config)
            if status != rollout.status:
                self._set_status(rollout, status)

    def _set_status(self, rollout: Rollout, status: RolloutStatus) -> None:
        id = rollout.rollout_id
        rollout.status = status
        if status in FINISHED:
            rollout.end_time = time.time()
        if status in RUNNING:
            self._running_ids[id] = None
        else:
            self._running_ids.pop(id, None)
        if status in QUEUING and id not in self._queued_ids:
            self._queued_ids.add(id)
            self._queue.append(id)
        self._record_change(rollout)
        if status in FINISHED:
            for event, loop in self._waiters.items():
                call_in_loop(loop, event.set)

    def _update_worker_status(self, attempt: Attempt, *, is_dequeue: bool = False) -> None:
        assert attempt.worker_id is not None
        worker = self._workers.setdefault(attempt.worker_id, Worker(worker_id=attempt.worker_id))
        now = time.time()
        if is_dequeue:
            worker.last_dequeue_time = now
        if attempt.status in RUNNING:
            worker.status, worker.last_busy_time = "busy", now
            worker.current_rollout_id = attempt.rollout_id
            worker.current_attempt_id = attempt.attempt_id
        else:
            ended = attempt.status in ("succeeded", "failed")
            worker.status, worker.last_idle_time = "idle" if ended else "unknown", now
            worker.current_rollout_id = worker.current_attempt_id = None
        self._record_change(worker)

    def _mark_idle(self, worker_id: str) -> None:
        worker = self._workers.setdefault(worker_id, Worker(worker_id=worker_id))
        worker.last_dequeue_time = time.time()
        if worker.status != "idle":
            worker.status, worker.last_idle_time = "idle", worker.last_dequeue_time
        self._record_change(worker)

    def _expire_attempts(self) -> None:
        """End attempts that are past their limits, at most once in the debounce time."""
        now = time.time()
        if now - self._scanned < self._debounce:
            return
        self._scanned = now
        for id in list(self._running_ids):
            rollout = self._rollouts[id]
            attempt = self._attempts[id][-1] if self._attempts[id] else None
            status = attempt and _find_overdue_status(attempt, rollout.config, now)
            if attempt and status:
                attempt.status = status
                self._apply_attempt_change(rollout, attempt, has_new_status=True)
                if attempt.worker_id:
                    self._update_worker_status(attempt)

    def _find_rollout(self, rollout_id: str) -> Rollout:
        if rollout_id not in self._rollouts:
            raise ValueError(f"Rollout {rollout_id} not found")
        return self._rollouts[rollout_id]

    def _find_attempt(self, rollout_id: str, attempt_id: str) -> Attempt:
        attempts = self._attempts[rollout_id]
        if not attempts:
            raise ValueError(f"No attempts found for rollout {rollout_id}")
        if attempt_id == "latest":
            return attempts[-1]
        for attempt in reversed(attempts):
            if attempt.attempt_id == attempt_id:
                return attempt
        raise ValueError(f"Attempt {attempt_id} not found for rollout {rollout_id}")


def copy_record(record: M) -> M:
    """Return a copy for the caller, so that changes of the store do not reach it."""
    return record.model_copy()


def attach_attempt(rollout: Rollout, attempt: Attempt) -> AttemptedRollout:
    """Return a copy of a rollout with a copy of one of its attempts."""
    return AttemptedRollout.model_construct(**rollout.__dict__, attempt=copy_record(attempt))


def _validate(record: BaseModel, values: Mapping[str, object]) -> None:
    """Check values of fields. Raises pydantic's ValidationError, which is a ValueError."""
    probe = record.model_copy()
    for name, value in values.items():
        if not isinstance(value, Unset):
            type(record).__pydantic_validator__.validate_assignment(probe, name, value)


def _derive_rollout_status(attempt: Attempt, config: RolloutConfig) -> RolloutStatus:
    """Return the status of a rollout, which follows from its latest attempt."""
    status = attempt.status
    if status in ("preparing", "running", "succeeded"):
        return status
    is_retried = status in config.retry_condition and attempt.sequence_id < config.max_attempts
    return "requeuing" if is_retried else "failed"


def _find_overdue_status(
    attempt: Attempt, config: RolloutConfig, now: float
) -> AttemptStatus | None:
    """Return the new status of an attempt that is past a limit of its rollout, else None."""
    if config.timeout_seconds is not None and now - attempt.start_time > config.timeout_seconds:
        return "timeout"
    last_heartbeat = attempt.last_heartbeat_time or attempt.start_time
    if (
        config.unresponsive_seconds is not None
        and now - last_heartbeat > config.unresponsive_seconds
    ):
        return "unresponsive"
    return None
