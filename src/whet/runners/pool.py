"""Agents in processes of their own, for those that keep a core busy or must be killed."""

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
from whet.runners.in_process import Workplace
from whet.runners.running import Running
from whet.types import Reward, Span

logger = logging.getLogger(__name__)

LONGEST_LINE = 64 * 2**20
START_S = 60.0
"""How long a process may take to import the agent."""

FAILURES: dict[str, type[AttemptError]] = {"agent": AgentFailed, "reward": BadReward}


class Pool(Workplace):
    """A number of processes, each with one attempt at a time.

    They are told what to do as JSON on stdin and answer as JSON; nothing is unpickled. A process
    that dies fails its attempt only, and another takes its place.
    """

    def __init__(
        self, spec: str, processes: int, tracer: TracerName | None, first: "_Worker"
    ) -> None:
        self._spec = spec
        self._tracer: TracerName | None = tracer
        self._free = [first]
        self._places = anyio.CapacityLimiter(processes)

    @classmethod
    async def start(cls, spec: str, processes: int, tracer: TracerName | None) -> "Pool":
        """Start one process, the others when they are needed. `spec` names the agent.

        Raises:
            ConfigError: the agent cannot be loaded there.
        """
        return cls(spec, processes, tracer, await _Worker.start(spec, tracer))

    async def reward(self, now: Running, resources: Mapping[str, JsonValue]) -> float:
        limit = now.attempt.rollout.timeout_s
        async with self._places:
            worker = await self._take()
            is_free = False
            try:
                with move_on_after(limit):
                    reward = await worker.run(now, resources)
                    is_free = True
                    return reward
            except (AgentFailed, BadReward):
                is_free = worker.is_alive
                raise
            finally:
                now.has_ended = True
                if is_free:
                    self._free.append(worker)
                else:
                    with CancelScope(shield=True):
                        await worker.kill()
        raise AttemptTimeout(f"the attempt ran longer than {limit:g} s; its process was killed")

    async def close(self) -> None:
        for worker in self._free:
            await worker.kill()

    async def _take(self) -> "_Worker":
        while self._free:
            worker = self._free.pop()
            if worker.is_alive:
                return worker
            await worker.kill()  # it died while it had nothing to do
        try:
            return await _Worker.start(self._spec, self._tracer)
        except ConfigError as error:
            raise AgentFailed(str(error)) from error


class _Worker:
    """One process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        assert process.stdout is not None
        self._answers = BufferedByteReceiveStream(process.stdout)

    @classmethod
    async def start(cls, spec: str, tracer: TracerName | None) -> "_Worker":
        process = await anyio.open_process(
            [sys.executable, "-m", "whet.runners.pool_process"],
            stdout=-1,
            stderr=None,
            start_new_session=True,
        )
        worker = cls(process)
        try:
            with fail_after(START_S):
                await worker._send({"spec": spec, "tracer": tracer, "path": list(sys.path)})
                answer = await worker._receive()
        except (TimeoutError, AgentFailed, anyio.BrokenResourceError) as error:
            await worker.kill()
            raise ConfigError(
                f"a process for the agent {spec!r} does not start: {error}"
            ) from error
        except BaseException:
            with CancelScope(shield=True):
                await worker.kill()
            raise
        if "error" in answer:
            await worker.kill()
            raise ConfigError(str(answer["error"]))
        return worker

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None

    async def run(self, now: Running, resources: Mapping[str, JsonValue]) -> float:
        await self._send(
            {
                "attempt": now.attempt.model_dump(mode="json"),
                "llm": now.llm.model_dump(mode="json"),
                "resources": dict(resources),
            }
        )
        while True:
            match await self._receive():
                case {"reward": dict(reward)}:
                    now.add_reward(Reward.model_validate(reward))
                case {"span": dict(span)}:
                    now.add_span(Span.model_validate(span))
                case {"failed": str(kind), "why": str(why)}:
                    raise FAILURES[kind](why)
                case {"earned": float(earned)}:
                    return earned
                case other:
                    raise AgentFailed(f"its process answers what is none: {other!r:.80}")

    async def kill(self) -> None:
        """End the process and all it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.aclose()

    async def _send(self, message: dict[str, JsonValue]) -> None:
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send(json.dumps(message).encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise AgentFailed(await self._how_it_died()) from None

    async def _receive(self) -> dict[str, JsonValue]:
        try:
            return json.loads(await self._answers.receive_until(b"\n", LONGEST_LINE))
        except (anyio.IncompleteRead, anyio.EndOfStream):
            raise AgentFailed(await self._how_it_died()) from None
        except (ValueError, anyio.DelimiterNotFound) as error:
            raise AgentFailed(f"its process answers what is not JSON: {error}") from error

    async def _how_it_died(self) -> str:
        code = await self._process.wait()
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process ended by itself, with exit code {code}"
