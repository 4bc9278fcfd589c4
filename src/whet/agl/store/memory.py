"""`InMemoryLightningStore`: rollouts, spans, resources and workers in this process."""

import secrets
import time
import warnings
from collections.abc import Sequence

from whet.agl.spans import Span
from whet.agl.store.base import (
    LightningStore,
    LightningStoreCapabilities,
    LightningStoreStatistics,
    Logic,
    Order,
)
from whet.agl.store.lifecycle import RolloutLifecycle, attach_attempt, copy_record
from whet.agl.store.queries import build_conditions, select_page
from whet.agl.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
    Metadata,
    NamedResources,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutStatus,
    Unset,
    Worker,
    WorkerStatus,
)


class InMemoryLightningStore(RolloutLifecycle):
    """A store in this process, for any number of event loops and threads."""

    def __init__(
        self,
        *,
        thread_safe: bool = True,
        eviction_memory_threshold: float | None = None,
        safe_memory_threshold: float | None = None,
        span_size_estimator: object = None,
        tracker: object = None,
        scan_debounce_seconds: float = 10.0,
    ) -> None:
        """`scan_debounce_seconds`: least time between two scans for time-outs.

        Raises:
            NotImplementedError: eviction or a tracker is requested.
        """
        if eviction_memory_threshold or safe_memory_threshold or span_size_estimator or tracker:
            raise NotImplementedError(
                "whet.agl's store evicts no spans and has no tracker: use SqliteLightningStore to "
                "keep them on disk, and `whet store` for metrics"
            )
        super().__init__(scan_debounce_seconds=scan_debounce_seconds)

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        return LightningStoreCapabilities(
            thread_safe=True, async_safe=True, zero_copy=False, otlp_traces=False
        )

    async def statistics(self) -> LightningStoreStatistics:
        with self._lock:
            return LightningStoreStatistics(
                name=type(self).__name__,
                total_rollouts=len(self._rollouts),
                total_attempts=sum(len(a) for a in self._attempts.values()),
                total_spans=sum(len(s) for s in self._spans.values()),
                total_resources=len(self._resources),
                total_workers=len(self._workers),
                uptime=time.time() - self._started,
            )

    # ------------------------------------------------------------------- spans

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        added: list[Span] = []
        with self._lock:
            for span in spans:  # all or none
                self._find_rollout(span.rollout_id)
                self._find_attempt(span.rollout_id, span.attempt_id)
            for span in spans:
                id, key = span.rollout_id, (span.attempt_id, span.span_id)
                self._sequence[id] = max(self._sequence[id], span.sequence_id)
                if key not in self._spans[id]:
                    self._spans[id][key] = span
                    self._record_change(span)
                    self._record_heartbeat(id, span.attempt_id)
                    added.append(span)
        await self._flush()
        return added

    def _record_heartbeat(self, rollout_id: str, attempt_id: str) -> None:
        rollout = self._rollouts[rollout_id]
        attempt = self._find_attempt(rollout_id, attempt_id)
        attempt.last_heartbeat_time = time.time()
        if attempt.status in ("preparing", "unresponsive"):
            attempt.status = "running"
        self._record_change(attempt)
        is_latest = attempt is self._attempts[rollout_id][-1]
        if is_latest and rollout.status in ("preparing", "requeuing"):
            self._set_status(rollout, "running")

    async def get_many_span_sequence_ids(
        self, rollout_attempt_ids: Sequence[tuple[str, str]]
    ) -> Sequence[int]:
        numbers: list[int] = []
        with self._lock:
            for id, _ in rollout_attempt_ids:
                self._sequence[id] += 1
                numbers.append(self._sequence[id])
        return numbers

    async def query_spans(
        self,
        rollout_id: str | list[str],
        attempt_id: str | None = None,
        *,
        trace_id: str | None = None,
        trace_id_contains: str | None = None,
        span_id: str | None = None,
        span_id_contains: str | None = None,
        parent_id: str | None = None,
        parent_id_contains: str | None = None,
        name: str | None = None,
        name_contains: str | None = None,
        filter_logic: Logic = "and",
        limit: int = -1,
        offset: int = 0,
        sort_by: str | None = "sequence_id",
        sort_order: Order = "asc",
    ) -> PaginatedResult[Span]:
        conditions = build_conditions(
            exact={
                "trace_id": trace_id,
                "span_id": span_id,
                "parent_id": parent_id,
                "name": name,
            },
            contains={
                "trace_id": trace_id_contains,
                "span_id": span_id_contains,
                "parent_id": parent_id_contains,
                "name": name_contains,
            },
        )
        ids = [rollout_id] if isinstance(rollout_id, str) else rollout_id
        with self._lock:
            self._expire_attempts()
            spans = [span for id in ids for span in self._select_spans(id, attempt_id)]
        return select_page(spans, conditions, filter_logic, sort_by, sort_order, limit, offset)

    def _select_spans(self, rollout_id: str, attempt_id: str | None) -> list[Span]:
        spans = list(self._spans.get(rollout_id, {}).values())
        if attempt_id is None:
            return spans
        if attempt_id == "latest":
            attempts = self._attempts.get(rollout_id)
            if not attempts:
                return []
            attempt_id = attempts[-1].attempt_id
        return [span for span in spans if span.attempt_id == attempt_id]

    # ------------------------------------------------------------------- queries

    async def query_rollouts(
        self,
        *,
        status_in: Sequence[RolloutStatus] | None = None,
        rollout_id_in: Sequence[str] | None = None,
        rollout_id_contains: str | None = None,
        filter_logic: Logic = "and",
        sort_by: str | None = None,
        sort_order: Order = "asc",
        limit: int = -1,
        offset: int = 0,
        status: Sequence[RolloutStatus] | None = None,
        rollout_ids: Sequence[str] | None = None,
    ) -> PaginatedResult[AttemptedRollout | Rollout]:
        for old, new, value in (
            ("status", "status_in", status),
            ("rollout_ids", "rollout_id_in", rollout_ids),
        ):
            if value is not None:
                warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=2)
        conditions = build_conditions(
            within={
                "status": status_in if status_in is not None else status,
                "rollout_id": rollout_id_in if rollout_id_in is not None else rollout_ids,
            },
            contains={"rollout_id": rollout_id_contains},
        )
        with self._lock:
            self._expire_attempts()
            rollouts = self._rollouts.values()
            page = select_page(
                rollouts, conditions, filter_logic, sort_by, sort_order, limit, offset
            )
            items = [self._attach_latest(rollout) for rollout in page.items]
        return PaginatedResult[AttemptedRollout | Rollout].model_construct(
            items=items, limit=limit, offset=offset, total=page.total
        )

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: Order = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        with self._lock:
            self._expire_attempts()
            attempts = [copy_record(a) for a in self._attempts.get(rollout_id, [])]
        return select_page(attempts, [], "and", sort_by, sort_order, limit, offset)

    async def get_rollout_by_id(self, rollout_id: str) -> AttemptedRollout | Rollout | None:
        with self._lock:
            self._expire_attempts()
            rollout = self._rollouts.get(rollout_id)
            return rollout and self._attach_latest(rollout)

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        with self._lock:
            self._expire_attempts()
            attempts = self._attempts.get(rollout_id)
            return copy_record(attempts[-1]) if attempts else None

    def _attach_latest(self, rollout: Rollout) -> AttemptedRollout | Rollout:
        attempts = self._attempts.get(rollout.rollout_id)
        return attach_attempt(rollout, attempts[-1]) if attempts else copy_record(rollout)

    # ------------------------------------------------------------------- resources and workers

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        return await self.update_resources(f"rs-{secrets.token_hex(6)}", resources)

    async def update_resources(
        self, resources_id: str, resources: NamedResources
    ) -> ResourcesUpdate:
        with self._lock:
            now, known = time.time(), self._resources.get(resources_id)
            update = ResourcesUpdate(
                resources_id=resources_id,
                create_time=known.create_time if known else now,
                update_time=now,
                version=known.version + 1 if known else 1,
                resources=resources,
            )
            self._resources[resources_id] = update
            self._latest_resources_id = resources_id
            self._record_change(update)
        await self._flush()
        return copy_record(update)

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        with self._lock:
            found = self._resources.get(resources_id)
            return copy_record(found) if found else None

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        return await self.get_resources_by_id(self._latest_resources_id)

    async def query_resources(
        self,
        *,
        resources_id: str | None = None,
        resources_id_contains: str | None = None,
        sort_by: str | None = None,
        sort_order: Order = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[ResourcesUpdate]:
        conditions = build_conditions(
            exact={"resources_id": resources_id}, contains={"resources_id": resources_id_contains}
        )
        with self._lock:
            known = [copy_record(each) for each in self._resources.values()]
        return select_page(known, conditions, "and", sort_by, sort_order, limit, offset)

    async def update_worker(
        self, worker_id: str, heartbeat_stats: Metadata | Unset = UNSET
    ) -> Worker:
        with self._lock:
            worker = self._workers.setdefault(worker_id, Worker(worker_id=worker_id))
            worker.last_heartbeat_time = time.time()
            if not isinstance(heartbeat_stats, Unset):
                worker.heartbeat_stats = dict(heartbeat_stats)
            self._record_change(worker)
            result = copy_record(worker)
        await self._flush()
        return result

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        with self._lock:
            worker = self._workers.get(worker_id)
            return copy_record(worker) if worker else None

    async def query_workers(
        self,
        *,
        status_in: Sequence[WorkerStatus] | None = None,
        worker_id_contains: str | None = None,
        filter_logic: Logic = "and",
        sort_by: str | None = None,
        sort_order: Order = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Worker]:
        conditions = build_conditions(
            within={"status": status_in}, contains={"worker_id": worker_id_contains}
        )
        with self._lock:
            self._expire_attempts()
            workers = [copy_record(worker) for worker in self._workers.values()]
        return select_page(workers, conditions, filter_logic, sort_by, sort_order, limit, offset)


def share_store(store: LightningStore) -> LightningStore:
    """Return the store: every store of this package may be used from several threads."""
    return store
