"""A pool of processes for agents, each with one or many attempts at once."""

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress

import anyio
from anyio import CancelScope, fail_after, move_on_after
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream
from pydantic import JsonValue

from whet.config import TracerName
from whet.errors import AgentFailed, AttemptError, AttemptTimeout, BadReward, ConfigError
from whet.runners.context import AttemptContext
from whet.runners.executors.executor import Evicted, Executor
from whet.runners.executors.in_process import CANCEL_GRACE_S
from whet.types import AttemptId, Reward, Span

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 64 * 2**20
SEND_TIMEOUT_S = 10.0
START_TIMEOUT_S = 60.0
"""Seconds that a process may take to import the agent."""
REPORT_GRACE_S = 5.0
"""Seconds beyond its limit that a process has to report the timeout of an attempt among others."""
CANCEL_REPORT_S = CANCEL_GRACE_S + 1.0
"""Seconds that a process has to report the end of a canceled attempt."""

PipeMessage = dict[str, JsonValue]

FAILURES: dict[str, type[AttemptError | Evicted]] = {
    "agent": AgentFailed,
    "bad_reward": BadReward,
    "timeout": AttemptTimeout,
    "evicted": Evicted,
}


class ProcessPool(Executor):
    """A fixed number of processes, each of which runs up to `attempts_each` attempts at once.

    Requests and responses are lines of JSON on stdin and stdout; nothing is unpickled. An attempt
    that exceeded its limit or was canceled is canceled in its process, where it has a moment to
    clean up. Then the process is killed, since a plain function would continue in its thread: at
    once if the attempt was alone in it, else after its other attempts. It gets no new ones.

    A process that dies fails an attempt that was alone in it. If there were several, one of them is
    at fault: each of them runs again, alone.
    """

    def __init__(
        self,
        spec: str,
        processes: int,
        attempts_each: int,
        tracer: TracerName | None,
        python: str | None,
    ) -> None:
        self._spec = spec
        self._python = python
        self._processes = processes
        self._attempts_each = attempts_each
        self._tracer: TracerName | None = tracer
        self._workers: list[_Worker] = []
        self._choosing = asyncio.Lock()
        self._suspects = set[str]()
        """Rollouts with an attempt in a process that died while others were in it."""

    @classmethod
    async def start(
        cls,
        spec: str,
        processes: int,
        attempts_each: int,
        tracer: TracerName | None,
        python: str | None = None,
    ) -> "ProcessPool":
        """Start one process, the others on demand. `spec` names the agent.

        `python` is the interpreter of another environment, which has `whet[runner]` itself.

        Raises:
            ConfigError: the agent cannot be loaded in a process.
        """
        pool = cls(spec, processes, attempts_each, tracer, python)
        try:
            worker = await pool._add_worker()
            await worker.wait_ready()
        except BaseException:
            with CancelScope(shield=True):
                await pool.close()
            raise
        return pool

    async def run(self, context: AttemptContext, resources: Mapping[str, JsonValue]) -> float:
        attempt = context.attempt
        is_alone = self._attempts_each == 1 or attempt.rollout.id in self._suspects
        worker = await self._reserve(attempt.id, is_alone=is_alone)
        has_ended = True  # it has not begun
        try:
            await worker.wait_ready()
            has_ended = False
            # Among others, the process itself cancels an attempt at its limit.
            with move_on_after(attempt.rollout.timeout_s + REPORT_GRACE_S * (not is_alone)):
                try:
                    return await worker.run(context, resources)
                finally:
                    has_ended = worker.has_reported(attempt.id)
        except ConfigError as error:
            raise AgentFailed(str(error)) from error
        except _ProcessDied as died:
            if died.attempts == 1:
                raise AgentFailed(str(died)) from died
            self._suspects.add(attempt.rollout.id)
            raise Evicted(f"{died}, with {died.attempts} attempts in it") from died
        except AttemptTimeout:
            has_ended = False  # a plain function runs on in its thread
            raise
        finally:
            context.has_ended = True
            if is_alone:
                self._suspects.discard(attempt.rollout.id)
            await self._release(worker, attempt.id, retire=not has_ended, kill=is_alone)
        raise AttemptTimeout(f"the attempt ran longer than {attempt.rollout.timeout_s:g} s")

    async def close(self) -> None:
        for worker in self._workers:
            await worker.kill()

    async def _reserve(self, attempt: AttemptId, *, is_alone: bool) -> "_Worker":
        """Choose the process with the fewest attempts, or begin to start one."""
        async with self._choosing:
            usable = [worker for worker in self._workers if worker.is_usable]
            best = min(usable, key=lambda worker: len(worker.running), default=None)
            # A suspect may need a process beyond their number.
            may_start = is_alone or len(usable) < self._processes
            if best is None or (best.running and may_start):
                best = await self._add_worker()
            best.reserve(attempt, is_alone=is_alone)
            return best

    async def _add_worker(self) -> "_Worker":
        worker = await _Worker.start(self._spec, self._attempts_each, self._tracer, self._python)
        self._workers.append(worker)
        return worker

    async def _release(
        self, worker: "_Worker", attempt: AttemptId, *, retire: bool, kill: bool
    ) -> None:
        worker.release(attempt)
        worker.is_retired |= retire
        usable = sum(other.is_usable for other in self._workers)
        if (retire and kill) or (
            not worker.running and (not worker.is_usable or usable > self._processes)
        ):
            with suppress(ValueError):  # another attempt of a dead process was faster
                self._workers.remove(worker)
            with CancelScope(shield=True):
                await worker.kill()


class _ProcessDied(Exception):
    """The process of an attempt ended before the attempt did."""

    def __init__(self, reason: str, attempts: int) -> None:
        super().__init__(reason)
        self.attempts = attempts
        """How many were in the process."""


class _Worker:
    """One process of the pool."""

    def __init__(self, process: Process, settings: PipeMessage) -> None:
        """`settings` are sent to the process, which loads the agent they name."""
        self._process = process
        assert process.stdout is not None
        self._responses = BufferedByteReceiveStream(process.stdout)
        self._reader: asyncio.Task[None] | None = None
        self._unsent: list[bytes] = []
        self._reported = set[AttemptId]()
        self._is_exclusive = False
        self.running: dict[AttemptId, asyncio.Queue[PipeMessage]] = {}
        """Messages of each attempt that were not read yet."""
        self.is_retired = False
        self._loading = asyncio.create_task(self._load(settings))

    @classmethod
    async def start(
        cls, spec: str, attempts: int, tracer: TracerName | None, python: str | None
    ) -> "_Worker":
        """Start the process; it is ready later, so that several can load the agent at once."""
        process = await anyio.open_process(
            [python or sys.executable, "-m", "whet.runners.executors.pool_worker"],
            stdout=-1,
            stderr=None,
            start_new_session=True,
        )
        # Another interpreter has packages of its own.
        path: JsonValue = None if python else list(sys.path)
        return cls(process, {"spec": spec, "tracer": tracer, "attempts": attempts, "path": path})

    async def wait_ready(self) -> None:
        """Wait until the process has loaded the agent. Raises ConfigError if it cannot."""
        await asyncio.shield(self._loading)

    async def _load(self, settings: PipeMessage) -> None:
        try:
            with fail_after(START_TIMEOUT_S):
                await self._send(settings)
                response = await self._receive()
        except (TimeoutError, _ProcessDied, AgentFailed) as error:
            self.is_retired = True
            spec = settings["spec"]
            raise ConfigError(f"cannot start a process for the agent {spec!r}: {error}") from error
        if "error" in response:
            self.is_retired = True
            raise ConfigError(str(response["error"]))
        self._reader = asyncio.create_task(self._read())

    @property
    def is_usable(self) -> bool:
        """Whether it takes further attempts."""
        return not (self.is_retired or self._is_exclusive or self._process.returncode is not None)

    def reserve(self, attempt: AttemptId, *, is_alone: bool) -> None:
        self._is_exclusive = is_alone
        self.running[attempt] = asyncio.Queue()

    def release(self, attempt: AttemptId) -> None:
        self._is_exclusive = False
        self._reported.discard(attempt)
        del self.running[attempt]

    def has_reported(self, attempt: AttemptId) -> bool:
        """Whether the process has reported the end of the attempt."""
        return attempt in self._reported

    async def run(self, context: AttemptContext, resources: Mapping[str, JsonValue]) -> float:
        """Run a reserved attempt; canceling this call cancels the attempt in the process."""
        await self._send(
            {
                "attempt": context.attempt,
                "llm": context.llm,
                "resources": resources,
                "is_alone": self._is_exclusive,
            }
        )
        try:
            return await self._receive_reward(context)
        except asyncio.CancelledError:
            with CancelScope(shield=True):
                await self._cancel(context)
            raise

    async def _receive_reward(self, context: AttemptContext) -> float:
        """Take the messages of an attempt up to its last one."""
        attempt = context.attempt.id
        while True:
            match await self.running[attempt].get():
                case {"emitted": dict(reward), "line": str(line)}:
                    context.add_reward(Reward.model_validate(reward), line)
                case {"span": dict(span)}:
                    context.add_span(Span.model_validate(span))
                case {"failed": str(kind), "reason": str(reason), **rest}:
                    self._reported.add(attempt)
                    failed = FAILURES[kind](reason)
                    if isinstance(failed, AttemptError):
                        failed.traceback = str(rest.get("traceback", ""))
                    raise failed
                case {"result": float(reward)}:
                    self._reported.add(attempt)
                    return reward
                case {"died": str(reason), "attempts": int(attempts)}:
                    raise _ProcessDied(reason, attempts)
                case other:
                    raise AgentFailed(f"unexpected message from the agent process: {other!r:.80}")

    async def _cancel(self, context: AttemptContext) -> None:
        """Cancel an attempt in the process, and wait until it has cleaned up."""
        with suppress(_ProcessDied, AttemptError, Evicted), move_on_after(CANCEL_REPORT_S):
            await self._send({"cancel": context.attempt.id})
            await self._receive_reward(context)
        self._reported.discard(context.attempt.id)  # a plain function runs on in its thread

    async def kill(self) -> None:
        """Kill the process and all processes it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._loading.cancel()
        if self._reader is not None:
            self._reader.cancel()
        await self._process.aclose()
        self._report_death("the agent process was killed")

    async def _read(self) -> None:
        """Hand messages to their attempts until the process ends."""
        try:
            while True:
                message = await self._receive()
                queue = self.running.get(AttemptId(str(message.pop("id", ""))))
                if queue is not None:  # else it was given up
                    queue.put_nowait(message)
        except (_ProcessDied, AgentFailed) as error:
            self._report_death(str(error))

    def _report_death(self, reason: str) -> None:
        self.is_retired = True
        for queue in self.running.values():
            queue.put_nowait({"died": reason, "attempts": len(self.running)})

    async def _send(self, message: Mapping[str, object]) -> None:
        """Send a message; those of one turn of the event loop are written together."""
        assert self._process.stdin is not None
        # `vars` gives the fields of a model, without the copy that `model_dump` makes.
        self._unsent.append(json.dumps(message, default=vars).encode() + b"\n")
        if len(self._unsent) > 1:
            return  # another task sends it; if that fails, the reader reports that the process died
        try:
            # A cancellation of this task must not keep back the messages of others.
            with move_on_after(SEND_TIMEOUT_S, shield=True) as sending:
                await asyncio.sleep(0)
                unsent, self._unsent = self._unsent, []
                await self._process.stdin.send(b"".join(unsent))
            if sending.cancelled_caught:
                raise _ProcessDied("the agent process takes no more messages", len(self.running))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise _ProcessDied(await self._explain_exit(), len(self.running)) from None

    async def _receive(self) -> PipeMessage:
        try:
            return json.loads(await self._responses.receive_until(b"\n", MAX_LINE_BYTES))
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.ClosedResourceError):
            raise _ProcessDied(await self._explain_exit(), len(self.running)) from None
        except (ValueError, anyio.DelimiterNotFound) as error:
            raise AgentFailed(f"invalid JSON from the agent process: {error}") from error

    async def _explain_exit(self) -> str:
        code = await self._process.wait()
        if code < 0:
            return f"the agent process was killed by {signal.Signals(-code).name}"
        return f"the agent process exited with code {code}"
