"""The store's methods, with the arguments of Agent Lightning 0.3."""

from collections.abc import Sequence
from typing import Any, Literal

from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from whet.agl.spans import Span
from whet.agl.types import (
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    EnqueueRolloutRequest,
    Metadata,
    NamedResources,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    TaskInput,
    Unset,
    Worker,
    WorkerStatus,
)

Order = Literal["asc", "desc"]
Logic = Literal["and", "or"]


class LightningStoreCapabilities(TypedDict, total=False):
    """Properties of a store."""

    thread_safe: bool
    async_safe: bool
    zero_copy: bool
    otlp_traces: bool


class LightningStoreStatistics(TypedDict, total=False):
    """Counts of a store."""

    name: str
    total_rollouts: int
    total_attempts: int
    total_spans: int
    total_resources: int
    total_workers: int
    uptime: float


class LightningStore:
    """Queue of rollouts with their attempts, spans, resources and workers.

    For an unknown id, methods that change something raise ValueError, others return nothing.
    """

    @property
    def capabilities(self) -> LightningStoreCapabilities:
        """Properties of this store."""
        return LightningStoreCapabilities(
            thread_safe=False, async_safe=False, zero_copy=False, otlp_traces=False
        )

    def otlp_traces_endpoint(self) -> str:
        """Raise NotImplementedError: spans are added with `add_span`."""
        raise NotImplementedError(
            "whet.agl has no OTLP endpoint: add spans with add_span, or use the store of `whet`, "
            "which takes OTLP"
        )

    async def statistics(self) -> LightningStoreStatistics:
        """Return counts."""
        raise NotImplementedError

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
        """Add a rollout with its first attempt, without the queue."""
        raise NotImplementedError

    async def enqueue_rollout(
        self,
        input: TaskInput,
        mode: RolloutMode | None = None,
        resources_id: str | None = None,
        config: RolloutConfig | None = None,
        metadata: Metadata | None = None,
        *,
        task: TaskInput = UNSET,
    ) -> Rollout:
        """Enqueue a rollout; without `resources_id` it gets the latest resources.

        `enqueue_rollout(agent, task=...)` enqueues the task: the runners have the agent.
        """
        request = EnqueueRolloutRequest(
            input=input if isinstance(task, Unset) else task,
            mode=mode,
            resources_id=resources_id,
            config=config,
            metadata=metadata,
        )
        [rollout] = await self.enqueue_many_rollouts([request])
        return rollout

    async def enqueue_many_rollouts(
        self, rollouts: Sequence[EnqueueRolloutRequest]
    ) -> Sequence[Rollout]:
        """Enqueue rollouts in order."""
        raise NotImplementedError

    async def dequeue_rollout(self, worker_id: str | None = None) -> AttemptedRollout | None:
        """Take the oldest rollout of the queue as a new attempt; None if it is empty."""
        found = await self.dequeue_many_rollouts(limit=1, worker_id=worker_id)
        return found[0] if found else None

    async def dequeue_many_rollouts(
        self, *, limit: int = 1, worker_id: str | None = None
    ) -> Sequence[AttemptedRollout]:
        """Take up to `limit` rollouts of the queue."""
        raise NotImplementedError

    async def start_attempt(
        self, rollout_id: str, worker_id: str | None = None
    ) -> AttemptedRollout:
        """Add an attempt, even beyond the limit of attempts. Raises ValueError."""
        raise NotImplementedError

    async def wait_for_rollouts(
        self, rollout_ids: Sequence[str], timeout: float | None = None
    ) -> list[Rollout]:
        """Wait until all have finished, or for the timeout; return those that have."""
        raise NotImplementedError

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
        """Set fields of a rollout; a status `queuing` enqueues it again. Raises ValueError."""
        raise NotImplementedError

    async def update_attempt(
        self,
        rollout_id: str,
        attempt_id: str,
        status: AttemptStatus | Unset = UNSET,
        worker_id: str | Unset = UNSET,
        last_heartbeat_time: float | Unset = UNSET,
        metadata: Metadata | Unset | None = UNSET,
    ) -> Attempt:
        """Set fields of an attempt, or of the `latest`; the rollout follows its latest attempt.

        Raises:
            ValueError: the rollout or the attempt is unknown.
        """
        raise NotImplementedError

    # ------------------------------------------------------------------- spans

    async def add_span(self, span: Span) -> Span | None:
        """Store a span; None if its attempt has one with that id. Raises ValueError.

        A span is a heartbeat of its attempt, and the first one makes it `running`.
        """
        added = await self.add_many_spans([span])
        return added[0] if added else None

    async def add_many_spans(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Store spans, and return those that are new. Raises ValueError."""
        raise NotImplementedError

    async def add_otel_span(
        self,
        rollout_id: str,
        attempt_id: str,
        readable_span: Any,  # Any: of OpenTelemetry's SDK, which may be missing
        sequence_id: int | None = None,
    ) -> Span | None:
        """Convert a span of OpenTelemetry's SDK and store it. Raises ValueError."""
        if sequence_id is None:
            sequence_id = await self.get_next_span_sequence_id(rollout_id, attempt_id)
        return await self.add_span(
            Span.from_opentelemetry(readable_span, rollout_id, attempt_id, sequence_id)
        )

    async def get_next_span_sequence_id(self, rollout_id: str, attempt_id: str) -> int:
        """Return a number that grows with every call for the rollout."""
        [number] = await self.get_many_span_sequence_ids([(rollout_id, attempt_id)])
        return number

    async def get_many_span_sequence_ids(
        self, rollout_attempt_ids: Sequence[tuple[str, str]]
    ) -> Sequence[int]:
        """Return a number for each pair of ids."""
        raise NotImplementedError

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
        """Return spans of a rollout or of several, of all attempts, one, or the `latest`."""
        raise NotImplementedError

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
        """Return rollouts, each with its latest attempt if it has one."""
        raise NotImplementedError

    async def query_attempts(
        self,
        rollout_id: str,
        *,
        sort_by: str | None = "sequence_id",
        sort_order: Order = "asc",
        limit: int = -1,
        offset: int = 0,
    ) -> PaginatedResult[Attempt]:
        """Return the attempts of a rollout."""
        raise NotImplementedError

    async def get_rollout_by_id(self, rollout_id: str) -> AttemptedRollout | Rollout | None:
        """Return a rollout with its latest attempt."""
        raise NotImplementedError

    async def get_latest_attempt(self, rollout_id: str) -> Attempt | None:
        """Return the latest attempt of a rollout."""
        raise NotImplementedError

    # ------------------------------------------------------------------- resources and workers

    async def add_resources(self, resources: NamedResources) -> ResourcesUpdate:
        """Add resources, which become the latest."""
        raise NotImplementedError

    async def update_resources(
        self, resources_id: str, resources: NamedResources
    ) -> ResourcesUpdate:
        """Replace resources, or add them under an id of your choice; they become the latest."""
        raise NotImplementedError

    async def get_resources_by_id(self, resources_id: str) -> ResourcesUpdate | None:
        """Return resources."""
        raise NotImplementedError

    async def get_latest_resources(self) -> ResourcesUpdate | None:
        """Return the latest resources."""
        raise NotImplementedError

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
        """Return resources in the order they were added."""
        raise NotImplementedError

    async def update_worker(
        self, worker_id: str, heartbeat_stats: Metadata | Unset = UNSET
    ) -> Worker:
        """Record a heartbeat of a worker, and add the worker if it is new."""
        raise NotImplementedError

    async def get_worker_by_id(self, worker_id: str) -> Worker | None:
        """Return a worker."""
        raise NotImplementedError

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
        """Return workers."""
        raise NotImplementedError
