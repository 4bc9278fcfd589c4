"""The public names of Agent Lightning 0.3 over whet: `import whet.agl as agl`.

Nothing else of whet imports this package. A name that it does not have says what to use instead.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import threading

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
        Event,
        Link,
        OtelResource,
        Span,
        SpanContext,
        SpanCoreFields,
        StatusCode,
        TraceStatus,
    )
    from whet.agl.store.base import (
        LightningStore,
        LightningStoreCapabilities,
        LightningStoreStatistics,
    )
    from whet.agl.store.base import LightningStore as LightningStoreThreaded
    from whet.agl.store.client import LightningStoreClient
    from whet.agl.store.memory import InMemoryLightningStore
    from whet.agl.store.server import LightningStoreServer
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

_HOME = {
    "APO": "whet.agl.algorithm.apo",
    "Adapter": "whet.agl.adapter",
    "AgentOpsTracer": "whet.agl.tracer",
    "Algorithm": "whet.agl.algorithm.base",
    "Attempt": "whet.agl.types",
    "AttemptStatus": "whet.agl.types",
    "AttemptedRollout": "whet.agl.types",
    "Attributes": "whet.agl.semconv",
    "Baseline": "whet.agl.algorithm.base",
    "ClientServerExecutionStrategy": "whet.agl.execution",
    "Dataset": "whet.agl.types",
    "DummyTracer": "whet.agl.tracer",
    "EnqueueRolloutRequest": "whet.agl.types",
    "Event": "whet.agl.spans",
    "ExecutionStrategy": "whet.agl.execution",
    "FastAlgorithm": "whet.agl.algorithm.base",
    "Hook": "whet.agl.types",
    "InMemoryLightningStore": "whet.agl.store.memory",
    "LLM": "whet.agl.types",
    "LightningStore": "whet.agl.store.base",
    "LightningStoreCapabilities": "whet.agl.store.base",
    "LightningStoreClient": "whet.agl.store.client",
    "LightningStoreServer": "whet.agl.store.server",
    "LightningStoreStatistics": "whet.agl.store.base",
    "Link": "whet.agl.spans",
    "LitAgent": "whet.agl.litagent",
    "LitAgentRunner": "whet.agl.runner",
    "LlmProxyTraceToTriplet": "whet.agl.adapter",
    "NamedResources": "whet.agl.types",
    "OtelResource": "whet.agl.spans",
    "OtelTraceAdapter": "whet.agl.adapter",
    "OtelTracer": "whet.agl.tracer",
    "PaginatedResult": "whet.agl.types",
    "ParallelWorkerBase": "whet.agl.types",
    "PromptTemplate": "whet.agl.types",
    "ProxyLLM": "whet.agl.types",
    "Resource": "whet.agl.types",
    "ResourceUnion": "whet.agl.types",
    "ResourcesUpdate": "whet.agl.types",
    "Rollout": "whet.agl.types",
    "RolloutConfig": "whet.agl.types",
    "RolloutMode": "whet.agl.types",
    "RolloutRawResult": "whet.agl.litagent",
    "RolloutStatus": "whet.agl.types",
    "SharedMemoryExecutionStrategy": "whet.agl.execution",
    "Span": "whet.agl.spans",
    "SpanContext": "whet.agl.spans",
    "SpanCoreFields": "whet.agl.spans",
    "SpanRecordingContext": "whet.agl.tracer",
    "SqliteLightningStore": "whet.agl.store.sqlite",
    "StatusCode": "whet.agl.spans",
    "TaskInput": "whet.agl.types",
    "TraceAdapter": "whet.agl.adapter",
    "TraceStatus": "whet.agl.spans",
    "TraceToMessages": "whet.agl.adapter",
    "TraceToTripletBase": "whet.agl.adapter",
    "Tracer": "whet.agl.tracer",
    "TracerTraceToTriplet": "whet.agl.adapter",
    "Trainer": "whet.agl.trainer",
    "Triplet": "whet.agl.types",
    "UNSET": "whet.agl.types",
    "VERL": "whet.agl.algorithm.verl",
    "Worker": "whet.agl.types",
    "WorkerStatus": "whet.agl.types",
    "algo": "whet.agl.algorithm.base",
    "build_component": "whet.agl.trainer",
    "clear_active_tracer": "whet.agl.tracer",
    "emit_annotation": "whet.agl.emitter",
    "emit_exception": "whet.agl.emitter",
    "emit_message": "whet.agl.emitter",
    "emit_object": "whet.agl.emitter",
    "emit_reward": "whet.agl.emitter",
    "find_final_reward": "whet.agl.emitter",
    "find_reward_spans": "whet.agl.emitter",
    "get_active_tracer": "whet.agl.tracer",
    "get_message_value": "whet.agl.emitter",
    "get_object_value": "whet.agl.emitter",
    "get_reward_value": "whet.agl.emitter",
    "get_rewards_from_span": "whet.agl.emitter",
    "is_reward_span": "whet.agl.emitter",
    "llm_rollout": "whet.agl.litagent",
    "operation": "whet.agl.emitter",
    "prompt_rollout": "whet.agl.litagent",
    "reward": "whet.agl.emitter",
    "rollout": "whet.agl.litagent",
    "set_active_tracer": "whet.agl.tracer",
    "Runner": "whet.agl.runner:LitAgentRunner",
    "ExecutionEvent": "threading:Event",
    "ThreadingEvent": "threading:Event",
    "LightningStoreThreaded": "whet.agl.store.memory:share_store",
}
"""The module that defines each name, and its name there if it has another."""

UNSUPPORTED = {
    "AgentLightningClient": "the protocol of version 0.1: use LightningStoreClient",
    "AgentLightningServer": "the protocol of version 0.1: use LightningStoreServer",
    "CollectionBasedLightningStore": "a base class of stores: inherit from LightningStore",
    "DevTaskLoader": "the protocol of version 0.1: use Trainer.dev",
    "FilterField": "an internal of their stores: use the arguments of query_*",
    "FilterOptions": "an internal of their stores: use the arguments of query_*",
    "GenericResponse": "the protocol of version 0.1",
    "LLMProxy": "whet's gateway records calls with their tokens: use VERL, or `whet serve`",
    "LegacyAgentRunner": "the protocol of version 0.1: use LitAgentRunner",
    "LightningEnvVar": "the variables are read by ClientServerExecutionStrategy",
    "MongoLightningStore": "use SqliteLightningStore, or the PostgreSQL store of whet",
    "MultiprocessingEvent": "runners are tasks of one process: use ThreadingEvent",
    "RolloutLegacy": "the protocol of version 0.1: use Rollout",
    "RolloutRawResultLegacy": "the protocol of version 0.1: use RolloutRawResult",
    "SortOptions": "an internal of their stores: use sort_by and sort_order",
    "SpanAttributeNames": "deprecated by them: use whet.agl.semconv",
    "SpanLike": "a union of types: use Span",
    "SpanNames": "deprecated by them: use whet.agl.semconv",
    "Task": "the protocol of version 0.1: use Rollout",
    "TaskIfAny": "the protocol of version 0.1",
    "WeaveTracer": "use OtelTracer",
    "configure_logger": "deprecated by them: use the module logging",
    "lightning_cli": "parse your arguments with argparse",
    "resolve_bool_env_var": "an internal of theirs",
    "resolve_int_env_var": "an internal of theirs",
    "resolve_str_env_var": "an internal of theirs",
    "setup_logging": "use the module logging: the loggers are below 'whet.agl'",
    "setup_module_logging": "use the module logging: the loggers are below 'whet.agl'",
}
"""Names of Agent Lightning 0.3 that are not supported, and what to use instead."""


def __getattr__(name: str) -> object:
    if name in UNSUPPORTED:
        raise NotImplementedError(f"agl.{name} is not supported by whet.agl: {UNSUPPORTED[name]}")
    if name == "algorithm":
        return importlib.import_module("whet.agl.algorithm")
    if name not in _HOME:
        raise AttributeError(f"module 'whet.agl' has no attribute {name!r}")
    module, _, original = _HOME[name].partition(":")
    value = vars(importlib.import_module(module))[original or name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
