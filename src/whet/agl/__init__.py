"""The public names of Agent Lightning 0.3 over whet: `import whet.agl as agl`.

Nothing else of whet imports this package. A name that it does not have says what to use instead.
"""

import threading
from typing import TYPE_CHECKING

from whet.agl import algorithm as algorithm
from whet.agl.adapter import (
    Adapter,
    LlmProxyTraceToTriplet,
    OtelTraceAdapter,
    TraceAdapter,
    TracerTraceToTriplet,
    TraceToMessages,
    TraceToTripletBase,
)
from whet.agl.algorithm.apo import APO
from whet.agl.algorithm.base import Algorithm, Baseline, FastAlgorithm, algo
from whet.agl.algorithm.verl import VERL
from whet.agl.emitter import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    find_final_reward,
    find_reward_spans,
    get_message_value,
    get_object_value,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    operation,
    reward,
)
from whet.agl.execution import (
    ClientServerExecutionStrategy,
    ExecutionStrategy,
    SharedMemoryExecutionStrategy,
)
from whet.agl.litagent import LitAgent, RolloutRawResult, llm_rollout, prompt_rollout, rollout
from whet.agl.runner import LitAgentRunner
from whet.agl.runner import LitAgentRunner as Runner
from whet.agl.semconv import Attributes
from whet.agl.spans import (
    AttributeValue,
    Event,
    Link,
    OtelResource,
    Span,
    SpanContext,
    SpanCoreFields,
    StatusCode,
    TraceState,
    TraceStatus,
)
from whet.agl.store.base import (
    LightningStore,
    LightningStoreCapabilities,
    LightningStoreStatistics,
)
from whet.agl.store.client import LightningStoreClient
from whet.agl.store.memory import InMemoryLightningStore
from whet.agl.store.sqlite import SqliteLightningStore
from whet.agl.tracer import (
    AgentOpsTracer,
    DummyTracer,
    OtelTracer,
    SpanRecordingContext,
    Tracer,
    clear_active_tracer,
    get_active_tracer,
    set_active_tracer,
)
from whet.agl.trainer import Trainer, build_component
from whet.agl.types import (
    LLM,
    UNSET,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Dataset,
    EnqueueRolloutRequest,
    Hook,
    NamedResources,
    PaginatedResult,
    ParallelWorkerBase,
    PromptTemplate,
    ProxyLLM,
    Resource,
    ResourcesUpdate,
    ResourceUnion,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutStatus,
    TaskInput,
    Triplet,
    Worker,
    WorkerStatus,
)

if TYPE_CHECKING:
    from whet.agl.store.base import LightningStore as LightningStoreThreaded
    from whet.agl.store.server import LightningStoreServer
else:
    from whet.agl.store.memory import share_store as LightningStoreThreaded

ExecutionEvent = ThreadingEvent = threading.Event

__all__ = [
    "APO",
    "LLM",
    "UNSET",
    "VERL",
    "Adapter",
    "AgentOpsTracer",
    "Algorithm",
    "Attempt",
    "AttemptStatus",
    "AttemptedRollout",
    "AttributeValue",
    "Attributes",
    "Baseline",
    "ClientServerExecutionStrategy",
    "Dataset",
    "DummyTracer",
    "EnqueueRolloutRequest",
    "Event",
    "ExecutionEvent",
    "ExecutionStrategy",
    "FastAlgorithm",
    "Hook",
    "InMemoryLightningStore",
    "LightningStore",
    "LightningStoreCapabilities",
    "LightningStoreClient",
    "LightningStoreServer",
    "LightningStoreStatistics",
    "LightningStoreThreaded",
    "Link",
    "LitAgent",
    "LitAgentRunner",
    "LlmProxyTraceToTriplet",
    "NamedResources",
    "OtelResource",
    "OtelTraceAdapter",
    "OtelTracer",
    "PaginatedResult",
    "ParallelWorkerBase",
    "PromptTemplate",
    "ProxyLLM",
    "Resource",
    "ResourceUnion",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutRawResult",
    "RolloutStatus",
    "Runner",
    "SharedMemoryExecutionStrategy",
    "Span",
    "SpanContext",
    "SpanCoreFields",
    "SpanRecordingContext",
    "SqliteLightningStore",
    "StatusCode",
    "TaskInput",
    "ThreadingEvent",
    "TraceAdapter",
    "TraceState",
    "TraceStatus",
    "TraceToMessages",
    "TraceToTripletBase",
    "Tracer",
    "TracerTraceToTriplet",
    "Trainer",
    "Triplet",
    "Worker",
    "WorkerStatus",
    "algo",
    "algorithm",
    "build_component",
    "clear_active_tracer",
    "emit_annotation",
    "emit_exception",
    "emit_message",
    "emit_object",
    "emit_reward",
    "find_final_reward",
    "find_reward_spans",
    "get_active_tracer",
    "get_message_value",
    "get_object_value",
    "get_reward_value",
    "get_rewards_from_span",
    "is_reward_span",
    "llm_rollout",
    "operation",
    "prompt_rollout",
    "reward",
    "rollout",
    "set_active_tracer",
]

UNSUPPORTED = {
    "AgentLightningClient": "the protocol of version 0.1: use LightningStoreClient",
    "AgentLightningServer": "the protocol of version 0.1: use LightningStoreServer",
    "CollectionBasedLightningStore": "a base class of stores: inherit from LightningStore",
    "DevTaskLoader": "the protocol of version 0.1: use Trainer.dev",
    "FilterField": "internal to their stores: use the arguments of query_*",
    "FilterOptions": "internal to their stores: use the arguments of query_*",
    "GenericResponse": "the protocol of version 0.1",
    "LLMProxy": "whet's gateway records calls with their tokens: use VERL, or `whet serve`",
    "LegacyAgentRunner": "the protocol of version 0.1: use LitAgentRunner",
    "LightningEnvVar": "the variables are read by ClientServerExecutionStrategy",
    "MongoLightningStore": "use SqliteLightningStore, or the PostgreSQL store of whet",
    "MultiprocessingEvent": "runners are tasks of one process: use ThreadingEvent",
    "RolloutLegacy": "the protocol of version 0.1: use Rollout",
    "RolloutRawResultLegacy": "the protocol of version 0.1: use RolloutRawResult",
    "SortOptions": "internal to their stores: use sort_by and sort_order",
    "SpanAttributeNames": "deprecated by them: use whet.agl.semconv",
    "SpanLike": "a union of types: use Span",
    "SpanNames": "deprecated by them: use whet.agl.semconv",
    "Task": "the protocol of version 0.1: use Rollout",
    "TaskIfAny": "the protocol of version 0.1",
    "WeaveTracer": "use OtelTracer",
    "configure_logger": "deprecated by them: use the module logging",
    "lightning_cli": "parse your arguments with argparse",
    "resolve_bool_env_var": "internal to Agent Lightning",
    "resolve_int_env_var": "internal to Agent Lightning",
    "resolve_str_env_var": "internal to Agent Lightning",
    "setup_logging": "use the module logging: the loggers are below 'whet.agl'",
    "setup_module_logging": "use the module logging: the loggers are below 'whet.agl'",
}
"""Names of Agent Lightning 0.3 that are not supported, and what to use instead."""


def __getattr__(name: str) -> object:
    if name == "LightningStoreServer":  # needs the extra `gateway`, which clients do not
        from whet.agl.store.server import LightningStoreServer  # noqa: PLC0415

        return LightningStoreServer
    if name in UNSUPPORTED:
        raise NotImplementedError(f"agl.{name} is not supported by whet.agl: {UNSUPPORTED[name]}")
    raise AttributeError(f"module 'whet.agl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
