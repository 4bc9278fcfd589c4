"""Rollouts, attempts, workers, resources and queries, with the fields of Agent Lightning 0.3."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, Protocol, TypeVar, cast

from pydantic import BaseModel, Field, model_validator

# Programs import spans from here as well.
from whet.agl.spans import Event as Event
from whet.agl.spans import Link as Link
from whet.agl.spans import OtelResource as OtelResource
from whet.agl.spans import Span as Span
from whet.agl.spans import SpanContext as SpanContext
from whet.agl.spans import SpanCoreFields as SpanCoreFields
from whet.agl.spans import TraceStatus as TraceStatus
from whet.io.attempt_url import build_attempt_path

if TYPE_CHECKING:
    from whet.agl.litagent import LitAgent
    from whet.agl.runner import LitAgentRunner
    from whet.agl.tracer import Tracer

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

RolloutMode = Literal["train", "val", "test"]
RolloutStatus = Literal[
    "queuing", "preparing", "running", "failed", "succeeded", "cancelled", "requeuing"
]
AttemptStatus = Literal["preparing", "running", "failed", "succeeded", "unresponsive", "timeout"]
WorkerStatus = Literal["idle", "busy", "unknown"]
TaskInput = Any
"""The task of a rollout, any JSON value. Any: it is the user's own."""
Metadata = dict[str, Any]

FINISHED = frozenset({"failed", "succeeded", "cancelled"})
QUEUING = frozenset({"queuing", "requeuing"})
RUNNING = frozenset({"preparing", "running"})


class Unset:
    """Type of `UNSET`, the default of arguments that may also be None."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = Unset()


class RolloutConfig(BaseModel):
    """Limits and retries of a rollout."""

    timeout_seconds: float | None = None
    unresponsive_seconds: float | None = None
    max_attempts: int = Field(default=1, ge=1)
    retry_condition: list[AttemptStatus] = Field(default_factory=list[AttemptStatus])


class Attempt(BaseModel):
    """One execution of a rollout."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    start_time: float
    end_time: float | None = None
    status: AttemptStatus = "preparing"
    worker_id: str | None = None
    last_heartbeat_time: float | None = None
    metadata: Metadata | None = None


class Rollout(BaseModel):
    """A task to run, and its status."""

    rollout_id: str
    input: TaskInput
    start_time: float
    end_time: float | None = None
    mode: RolloutMode | None = None
    resources_id: str | None = None
    status: RolloutStatus = "queuing"
    config: RolloutConfig = Field(default_factory=RolloutConfig)
    metadata: Metadata | None = None


class AttemptedRollout(Rollout):
    """A rollout with one of its attempts, the latest in queries."""

    attempt: Attempt

    @model_validator(mode="after")
    def _check_attempt(self) -> "AttemptedRollout":
        if self.attempt.rollout_id != self.rollout_id:
            raise ValueError("the attempt belongs to another rollout")
        return self


class EnqueueRolloutRequest(BaseModel):
    """A rollout to enqueue."""

    input: TaskInput
    mode: RolloutMode | None = None
    resources_id: str | None = None
    config: RolloutConfig | None = None
    metadata: Metadata | None = None


class Worker(BaseModel):
    """A process or task that dequeues rollouts."""

    worker_id: str
    status: WorkerStatus = "unknown"
    heartbeat_stats: Metadata | None = None
    last_heartbeat_time: float | None = None
    last_dequeue_time: float | None = None
    last_busy_time: float | None = None
    last_idle_time: float | None = None
    current_rollout_id: str | None = None
    current_attempt_id: str | None = None


class Triplet(BaseModel):
    """A model call for training: prompt, response and reward."""

    prompt: Any
    response: Any
    reward: float | None = None
    metadata: Metadata = Field(default_factory=Metadata)


class PaginatedResult(BaseModel, Sequence[T], Generic[T]):
    """A page of a query, which is a sequence too."""

    items: Sequence[T]
    limit: int
    offset: int
    total: int

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:  # Any: an item, or a list of a slice
        return cast(Any, self.items)[index]

    def __iter__(self) -> Iterator[T]:  # pyright: ignore[reportIncompatibleMethodOverride]  # iterates over items, not fields
        return iter(self.items)


class Dataset(Protocol[T_co]):
    """Tasks by index; a list is one."""

    def __getitem__(self, index: int, /) -> T_co: ...

    def __len__(self) -> int: ...


# --------------------------------------------------------------------------- resources


class Resource(BaseModel):
    """A value that agents receive."""

    resource_type: Any


class LLM(Resource):
    """An endpoint of a model."""

    resource_type: Literal["llm"] = "llm"
    endpoint: str
    model: str
    api_key: str | None = None
    sampling_parameters: Metadata = Field(default_factory=Metadata)

    def get_base_url(self, *args: Any, **kwargs: Any) -> str:
        """Return the base URL for clients."""
        return self.endpoint


class ProxyLLM(LLM):
    """Endpoint of a proxy that identifies rollouts by their URL."""

    resource_type: Literal["proxy_llm"] = "proxy_llm"  # pyright: ignore[reportIncompatibleVariableOverride]  # as in Agent Lightning

    def get_base_url(self, rollout_id: str | None = None, attempt_id: str | None = None) -> str:
        """Return the base URL of an attempt, or without ids that of the proxy.

        Raises:
            ValueError: only one id was passed.
        """
        if rollout_id is None and attempt_id is None:
            return self.endpoint
        if rollout_id is None or attempt_id is None:
            raise ValueError("expected both rollout_id and attempt_id, or neither")
        base = self.endpoint.removesuffix("/")
        root = base.removesuffix("/v1")
        suffix = "/v1" if root != base else ""
        return root + build_attempt_path(rollout_id, attempt_id) + suffix

    def with_attempted_rollout(self, rollout: AttemptedRollout) -> LLM:
        """Return the endpoint of an attempt."""
        return LLM(
            endpoint=self.get_base_url(rollout.rollout_id, rollout.attempt.attempt_id),
            model=self.model,
            sampling_parameters=self.sampling_parameters,
            api_key=self.api_key,
        )


class PromptTemplate(Resource):
    """A prompt with placeholders."""

    resource_type: Literal["prompt_template"] = "prompt_template"
    template: str
    engine: Literal["jinja", "f-string", "poml"]

    def format(self, **values: Any) -> str:
        """Fill the placeholders.

        Raises:
            NotImplementedError: the engine is not `f-string`.
        """
        if self.engine != "f-string":
            raise NotImplementedError(
                f"format() supports the engine 'f-string'; found {self.engine!r}: render the "
                "template in your agent"
            )
        return self.template.format(**values)


ResourceUnion = Annotated[LLM | ProxyLLM | PromptTemplate, Field(discriminator="resource_type")]
NamedResources = dict[str, ResourceUnion]


class ResourcesUpdate(BaseModel):
    """A version of the resources."""

    resources_id: str
    create_time: float
    update_time: float
    version: int
    resources: NamedResources


# --------------------------------------------------------------------------- workers and hooks


class ParallelWorkerBase:
    """Component with workers: `init`, `init_worker`, `run`, `teardown_worker` and `teardown`."""

    def __init__(self) -> None:
        self.worker_id: int | None = None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Prepare what the workers share."""

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Prepare a worker."""
        self.worker_id = worker_id

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work."""

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Clean up after a worker."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Clean up."""


class Hook(ParallelWorkerBase):
    """Callbacks around every attempt; an exception in one is logged."""

    async def on_trace_start(
        self, *, agent: "LitAgent", runner: "LitAgentRunner", tracer: "Tracer", rollout: Rollout
    ) -> None:
        """Run after the trace began, before the agent."""

    async def on_trace_end(
        self, *, agent: "LitAgent", runner: "LitAgentRunner", tracer: "Tracer", rollout: Rollout
    ) -> None:
        """Run after the agent, before the trace ends."""

    async def on_rollout_start(
        self, *, agent: "LitAgent", runner: "LitAgentRunner", rollout: Rollout
    ) -> None:
        """Run before an attempt."""

    async def on_rollout_end(
        self,
        *,
        agent: "LitAgent",
        runner: "LitAgentRunner",
        rollout: Rollout,
        spans: "list[Span]",
    ) -> None:
        """Run after an attempt, with the spans that were stored."""
