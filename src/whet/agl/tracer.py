"""Agent Lightning's tracers: they record what an attempt emits as spans of its trace.

The current trace is a context variable, so that attempts which run at once are kept apart.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any

from whet.agl.semconv import Attributes
from whet.agl.spans import Span, SpanCoreFields, StatusCode, TraceStatus
from whet.agl.store.base import LightningStore
from whet.agl.types import ParallelWorkerBase
from whet.errors import ConfigError
from whet.io.threads import call_in_loop
from whet.runners.context import AttemptContext, active_attempt


class SpanRecordingContext:
    """A span that is open."""

    def __init__(self, name: str, attributes: Attributes | None, start_time: float | None) -> None:
        self.name = name
        self.attributes = dict(attributes or {})
        self.start_time = start_time or time.time()
        self.end_time: float | None = None
        self.status = TraceStatus(status_code="OK")

    def record_exception(self, exception: BaseException) -> None:
        """Record an exception, which makes the status ERROR."""
        self.record_status("ERROR", str(exception))
        self.record_attributes(describe_exception(exception))

    def record_attributes(self, attributes: Attributes) -> None:
        """Add attributes."""
        self.attributes.update(attributes)

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None:
        """Set the status."""
        self.status = TraceStatus(status_code=status_code, description=description)

    def get_recorded_span(self) -> SpanCoreFields:
        """Return the span. Raises ValueError while it is open."""
        if self.end_time is None:
            raise ValueError("the span has not ended yet")
        return SpanCoreFields(
            name=self.name,
            attributes=self.attributes,
            start_time=self.start_time,
            end_time=self.end_time,
            status=self.status,
        )


def describe_exception(exception: BaseException) -> Attributes:
    """Return an exception as attributes, in OpenTelemetry's names."""
    import traceback  # noqa: PLC0415 - only if an exception is recorded

    return {
        "exception.type": type(exception).__name__,
        "exception.message": str(exception),
        "exception.escaped": True,
        "exception.stacktrace": "".join(traceback.format_exception(exception)),
    }


class Trace:
    """The spans of a trace, sent to the store while they are recorded."""

    def __init__(
        self, store: LightningStore | None, rollout_id: str | None, attempt_id: str | None
    ) -> None:
        self.spans: list[Span] = []
        self.trace_id: str | None = None
        self._ids = rollout_id or "", attempt_id or ""
        self._store = store if rollout_id and attempt_id else None
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._sent = 0
        self._ended = False

    def add(self, span: Span) -> None:
        """Add a span, from any thread."""
        self.trace_id = self.trace_id or span.trace_id
        span.rollout_id, span.attempt_id = self._ids
        self.spans.append(span)
        call_in_loop(self._loop, self._wake.set)

    async def send(self) -> None:
        """Send the spans to the store as they come, until the trace ends."""
        while not (self._ended and self._sent == len(self.spans)):
            await self._wake.wait()
            self._wake.clear()
            new = self.spans[self._sent :]
            if self._store is not None and new:
                numbers = await self._store.get_many_span_sequence_ids([self._ids] * len(new))
                for span, number in zip(new, numbers, strict=True):
                    span.sequence_id = number
                await self._store.add_many_spans(new)
            self._sent += len(new)

    def end(self) -> None:
        """Let `send` return once everything is sent."""
        self._ended = True
        self._wake.set()


_trace: ContextVar[Trace | None] = ContextVar("agl_trace", default=None)
_active: ContextVar["Tracer | None"] = ContextVar("agl_tracer", default=None)


class Tracer(ParallelWorkerBase):
    """Records what is emitted. Traces may run at the same time: each is in its own context."""

    def __init__(self) -> None:
        super().__init__()
        self._last: list[Span] = []

    def init_worker(
        self, worker_id: int, store: LightningStore | None = None, *args: Any, **kwargs: Any
    ) -> None:
        super().init_worker(worker_id)

    @asynccontextmanager
    async def trace_context(
        self,
        name: str | None = None,
        *,
        store: LightningStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
        **kwargs: Any,
    ) -> AsyncGenerator[Trace]:
        """Record what is emitted inside, and send it to the store if it knows the attempt."""
        trace = Trace(store, rollout_id, attempt_id)
        tokens = _trace.set(trace), _active.set(self)
        sending = asyncio.create_task(trace.send())
        try:
            with self._collect(trace):
                yield trace
        finally:
            _trace.reset(tokens[0])
            _active.reset(tokens[1])
            trace.end()
            await sending
            self._last = trace.spans

    @contextmanager
    def _collect(self, trace: Trace) -> Generator[None]:
        """Collect spans of other sources until the trace ends."""
        yield

    def get_last_trace(self) -> list[Span]:
        """Return the spans of the current trace, or of the last one."""
        trace = _trace.get()
        return list(trace.spans if trace else self._last)

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Record a span without a duration."""
        now = timestamp or time.time()
        core = SpanCoreFields(
            name=name,
            attributes=attributes or {},
            start_time=now,
            end_time=now,
            status=status or TraceStatus(status_code="OK"),
        )
        self._record(core)
        return core

    @contextmanager
    def operation_context(
        self,
        name: str,
        attributes: Attributes | None = None,
        start_time: float | None = None,
        end_time: float | None = None,
    ) -> Generator[SpanRecordingContext]:
        """Record a span around the block; an exception is recorded and raised."""
        context = SpanRecordingContext(name, attributes, start_time)
        try:
            yield context
        except Exception as error:
            context.record_exception(error)
            raise
        finally:
            context.end_time = end_time or time.time()
            self._record(context.get_recorded_span())

    def _record(self, core: SpanCoreFields) -> None:
        trace = _trace.get()
        if trace is not None:
            span = Span.from_core_fields(core)
            span.trace_id = trace.trace_id or span.trace_id
            trace.add(span)

    def trace_run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function in a trace of its own."""

        async def call() -> Any:
            async with self.trace_context(func.__name__):
                return func(*args, **kwargs)

        return asyncio.run(call())

    async def trace_run_async(
        self, func: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any
    ) -> Any:
        """Await a function in a trace of its own."""
        async with self.trace_context(func.__name__):
            return await func(*args, **kwargs)

    def get_langchain_handler(self) -> Any:
        """Return None: no handler is needed, calls through whet's gateway are recorded."""
        return None


class DummyTracer(Tracer):
    """Makes spans and records none."""

    def _record(self, core: SpanCoreFields) -> None:
        pass


class OtelTracer(Tracer):
    """Records what is emitted, and the spans of SDKs that use OpenTelemetry, if it is installed."""

    @contextmanager
    def _collect(self, trace: Trace) -> Generator[None]:
        if active_attempt.get() is not None or find_spec("opentelemetry") is None:
            yield  # whet's runner collects them, or OpenTelemetry is not installed
            return
        try:
            from whet.runners.tracers import install_tracer  # noqa: PLC0415 - needs the extra

            install_tracer("otel")
        except ConfigError:
            yield
            return
        context = _TraceContext(trace)
        token = active_attempt.set(context)
        try:
            yield
        finally:
            active_attempt.reset(token)
            context.has_ended = True


class AgentOpsTracer(OtelTracer):
    """The default tracer; AgentOps itself is not used, its arguments are accepted."""

    def __init__(
        self, *, agentops_managed: bool = True, instrument_managed: bool = True, daemon: bool = True
    ) -> None:
        super().__init__()


class _TraceContext(AttemptContext):
    """Context of an attempt that adds the spans of our OpenTelemetry processor to a trace."""

    def __init__(self, trace: Trace) -> None:
        from whet.types import Attempt, AttemptId, Endpoint, Rollout  # noqa: PLC0415 - rarely needed

        rollout = Rollout(id="agl", task=None, group="agl")
        attempt = Attempt(id=AttemptId("agl"), rollout=rollout, number=1)
        super().__init__(attempt, Endpoint(base_url="", api_key="", model=""))
        self._trace = trace

    def add_span(self, span: Any) -> None:
        self._trace.add(Span.from_whet(span, "", "", 0))


def get_active_tracer() -> Tracer | None:
    """Return the tracer of the current trace."""
    return _active.get()


def set_active_tracer(tracer: Tracer) -> None:
    """Make a tracer the active one in this context."""
    _active.set(tracer)


def clear_active_tracer() -> None:
    """Clear the active tracer of this context."""
    _active.set(None)
