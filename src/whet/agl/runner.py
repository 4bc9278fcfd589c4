"""`LitAgentRunner`: runs an agent on the rollouts of a store, and reports spans and status."""

import asyncio
import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, cast

from whet.agl.emitter import emit_reward
from whet.agl.litagent import LitAgent, RolloutRawResult
from whet.agl.spans import Span, SpanCoreFields
from whet.agl.store.base import LightningStore
from whet.agl.tracer import Trace, Tracer
from whet.agl.types import AttemptedRollout, Hook, NamedResources, ParallelWorkerBase, RolloutMode

logger = logging.getLogger(__name__)

FIRST_POLL_S = 0.02
MAX_POLL_S = 1.0


class StopEvent(Protocol):
    """An event that stops runners, such as `threading.Event`."""

    def is_set(self) -> bool: ...


class LitAgentRunner(ParallelWorkerBase):
    """Runs one rollout at a time; start several for more."""

    def __init__(
        self,
        tracer: Tracer,
        max_rollouts: int | None = None,
        poll_interval: float = MAX_POLL_S,
        heartbeat_interval: float = 10.0,
        **options: Any,
    ) -> None:
        """`options` of the heartbeat's process are accepted: it is a task of this event loop."""
        super().__init__()
        self._tracer = tracer
        self._max_rollouts = max_rollouts
        self._poll_interval = poll_interval
        self._heartbeat_interval = heartbeat_interval
        self._agent: LitAgent | None = None
        self._store: LightningStore | None = None
        self._hooks: Sequence[Hook] = ()

    def init(self, agent: LitAgent, *, hooks: Sequence[Hook] | None = None, **kwargs: Any) -> None:
        self._agent = agent
        self._hooks = tuple(hooks or ())
        agent.set_runner(self)
        self._tracer.init()

    def init_worker(self, worker_id: int, store: LightningStore, **kwargs: Any) -> None:
        self.worker_id = worker_id
        self._store = store
        self._tracer.init_worker(worker_id, store)

    @property
    def tracer(self) -> Tracer:
        return self._tracer

    def get_agent(self) -> LitAgent:
        """Return the agent. Raises ValueError before `init`."""
        if self._agent is None:
            raise ValueError("the runner has no agent: call init(agent)")
        return self._agent

    def get_store(self) -> LightningStore:
        """Return the store. Raises ValueError before `init_worker`."""
        if self._store is None:
            raise ValueError("the runner has no store: call init_worker(worker_id, store)")
        return self._store

    def get_worker_id(self) -> str:
        """Return the name of the worker."""
        return f"Worker-{self.worker_id}" if self.worker_id is not None else "Worker-Unknown"

    @contextmanager
    def run_context(
        self,
        *,
        agent: LitAgent,
        store: LightningStore,
        hooks: Sequence[Hook] | None = None,
        worker_id: int | None = None,
    ) -> "Generator[LitAgentRunner]":
        """Prepare the runner for `iter` or `step` inside."""
        self.init(agent, hooks=hooks)
        self.init_worker(worker_id or 0, store)
        try:
            yield self
        finally:
            self.teardown_worker(worker_id or 0)
            self.teardown()

    async def iter(self, *, event: StopEvent | None = None) -> None:
        """Run rollouts as they come, until the event is set or the limit is reached."""
        store, done = self.get_store(), 0
        heartbeats = asyncio.create_task(self._send_heartbeats(store))
        try:
            while self._max_rollouts is None or done < self._max_rollouts:
                rollout = await self._dequeue(store, event)
                if rollout is None:
                    return
                try:
                    await self._run(rollout)
                except Exception:
                    attempt = rollout.attempt.attempt_id
                    logger.exception("rollout=%s attempt=%s failed", rollout.rollout_id, attempt)
                done += 1
        finally:
            heartbeats.cancel()

    async def step(
        self,
        input: Any,
        *,
        resources: NamedResources | None = None,
        mode: RolloutMode | None = None,
        event: StopEvent | None = None,
    ) -> Any:
        """Run one task without the queue and return its rollout. Raises what the agent raises."""
        store = self.get_store()
        resources_id = None
        if resources is not None:
            resources_id = (await store.add_resources(resources)).resources_id
        rollout = await store.start_rollout(
            input, mode=mode, resources_id=resources_id, worker_id=self.get_worker_id()
        )
        await self._run(rollout)
        return await store.get_rollout_by_id(rollout.rollout_id)

    async def _dequeue(
        self, store: LightningStore, event: StopEvent | None
    ) -> AttemptedRollout | None:
        pause = FIRST_POLL_S
        while event is None or not event.is_set():
            rollout = await store.dequeue_rollout(worker_id=self.get_worker_id())
            if rollout is not None:
                return rollout
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._poll_interval)
        return None

    async def _send_heartbeats(self, store: LightningStore) -> None:
        while True:
            try:
                await store.update_worker(self.get_worker_id(), {})
            except Exception:
                logger.exception("a heartbeat failed")
            await asyncio.sleep(self._heartbeat_interval)

    async def _run(self, rollout: AttemptedRollout) -> None:
        """Run an attempt and report its status; raises what the agent raises."""
        store, agent = self.get_store(), self.get_agent()
        ids = rollout.rollout_id, rollout.attempt.attempt_id
        spans: list[Span] = []
        status = "failed"
        try:
            resources = await self._load_resources(store, rollout)
            await self._call_hooks("on_rollout_start", agent=agent, rollout=rollout)
            async with self._tracer.trace_context(
                ids[0], store=store, rollout_id=ids[0], attempt_id=ids[1]
            ) as trace:
                await self._call_hooks(
                    "on_trace_start", agent=agent, rollout=rollout, tracer=self._tracer
                )
                result = await call_agent(agent, rollout, resources)
                await self._call_hooks(
                    "on_trace_end", agent=agent, rollout=rollout, tracer=self._tracer
                )
                record_result(trace, result)
            spans = trace.spans
            status = "succeeded"
        finally:  # also when canceled, where the status is still "failed"
            await self._call_hooks("on_rollout_end", agent=agent, rollout=rollout, spans=spans)
            await store.update_attempt(*ids, status=status)

    async def _load_resources(
        self, store: LightningStore, rollout: AttemptedRollout
    ) -> NamedResources:
        if rollout.resources_id:
            update = await store.get_resources_by_id(rollout.resources_id)
            if update is None:
                raise RuntimeError(f"the resources {rollout.resources_id!r} are missing")
        else:
            update = await store.get_latest_resources()
        return update.resources if update else {}

    async def _call_hooks(self, name: str, **arguments: Any) -> None:
        await call_hooks(self._hooks, name, runner=self, **arguments)


async def call_hooks(hooks: Sequence[Hook], name: str, **arguments: Any) -> None:
    """Call one of the callbacks of each hook; an exception in one is logged."""
    for hook in hooks:
        try:
            await getattr(hook, name)(**arguments)
        except Exception:
            logger.exception("the hook %s failed", name)


async def call_agent(
    agent: LitAgent, rollout: AttemptedRollout, resources: NamedResources
) -> RolloutRawResult:
    """Run the agent's method for the rollout's mode; one that is not async gets a thread."""
    is_training = rollout.mode == "train"
    if agent.is_async():
        method = agent.training_rollout_async if is_training else agent.validation_rollout_async
        return await method(rollout.input, resources, rollout)
    function = agent.training_rollout if is_training else agent.validation_rollout
    return await asyncio.to_thread(function, rollout.input, resources, rollout)


def record_result(trace: Trace, result: RolloutRawResult) -> None:
    """Add the result of an agent to its trace: a reward, or spans."""
    if result is None:
        return
    if isinstance(result, (int, float)):
        emit_reward(float(result))
        return
    for each in result:
        if isinstance(each, SpanCoreFields):
            trace.add(Span.from_core_fields(each))
        else:
            is_converted = isinstance(cast(object, each), Span)
            trace.add(each if is_converted else Span.from_opentelemetry(each, "", "", 0))
