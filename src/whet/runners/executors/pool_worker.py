"""A process of `process_pool.py`: reads attempts from stdin, writes what happens to stdout.

Both are lines of JSON. What an agent prints goes to stderr instead.
"""

import gc
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from typing import Any, TextIO

import anyio
from anyio import CancelScope, to_thread
from pydantic import JsonValue

from whet.errors import AttemptError, AttemptTimeout, BadReward, ConfigError
from whet.io.process import MessageWriter
from whet.runners.agent import inspect_agent
from whet.runners.context import AttemptContext
from whet.runners.executors.executor import Evicted
from whet.runners.executors.in_process import InProcessExecutor, UserCodeRunner
from whet.runners.loading import load_agent
from whet.runners.tracers import install_tracer
from whet.types import Attempt, AttemptId, Endpoint, Reward, Span

PipeMessage = dict[str, JsonValue]


class PipedAttempt(AttemptContext):
    """An attempt that sends its rewards and spans to the runner's process as they are emitted."""

    def __init__(
        self, attempt: Attempt, llm: Endpoint, responses: MessageWriter, *, is_alone: bool
    ) -> None:
        super().__init__(attempt, llm, is_alone=is_alone)
        self._responses = responses

    def add_reward(self, reward: Reward, line: str = "") -> None:
        super().add_reward(reward, line)
        self.send({"emitted": reward.model_dump(mode="json"), "line": line})

    def add_span(self, span: Span) -> None:
        self.send({"span": span.model_dump(mode="json")})

    def send(self, message: PipeMessage) -> None:
        """Send a message of this attempt."""
        self._responses.send({"id": self.attempt.id, **message})


def main() -> None:
    """Load the agent, then run it on each attempt that comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner ends this process
    requests, responses = _take_over_stdin(), MessageWriter()
    settings = json.loads(requests.readline())
    if settings["path"] is not None:
        sys.path[:] = settings["path"]
    try:
        agent = inspect_agent(load_agent(settings["spec"]))
        if settings["tracer"]:
            install_tracer(settings["tracer"])
    except ConfigError as error:
        responses.send({"error": str(error)})
        return
    gc.freeze()  # what is loaded by now stays
    responses.send({"ready": True})
    executor = InProcessExecutor(agent, UserCodeRunner(settings["attempts"]))
    anyio.run(_serve, executor, requests, responses)


async def _serve(executor: InProcessExecutor, requests: TextIO, responses: MessageWriter) -> None:
    scopes: dict[AttemptId, CancelScope] = {}

    async def run(request: dict[str, Any]) -> None:
        attempt = Attempt.model_validate(request["attempt"])
        llm = Endpoint.model_validate(request["llm"])
        context = PipedAttempt(attempt, llm, responses, is_alone=request["is_alone"])
        outcome: PipeMessage = {"failed": "agent", "reason": "the attempt was canceled"}
        with CancelScope() as scopes[attempt.id]:
            outcome = await _run(executor, context, request["resources"])
        context.send(outcome)
        del scopes[attempt.id]

    async with anyio.create_task_group() as tasks:
        async for request in _read(requests):
            if "cancel" in request:
                if scope := scopes.get(request["cancel"]):
                    scope.cancel()
            else:
                tasks.start_soon(run, request)


async def _run(
    executor: InProcessExecutor, context: PipedAttempt, resources: dict[str, JsonValue]
) -> PipeMessage:
    """Run one attempt and return the message of its outcome."""
    try:
        return {"result": await executor.run(context, resources)}
    except Evicted as error:
        return {"failed": "evicted", "reason": str(error)}
    except BadReward as error:
        return {"failed": "bad_reward", "reason": str(error)}
    except AttemptTimeout as error:
        return {"failed": "timeout", "reason": str(error)}
    except AttemptError as error:
        return {"failed": "agent", "reason": str(error), "traceback": error.traceback}


async def _read(requests: TextIO) -> AsyncGenerator[dict[str, Any]]:
    while True:
        yield json.loads(await to_thread.run_sync(_read_line, requests))


def _read_line(requests: TextIO) -> str:
    """Read a line; without one the runner is gone, and the loop may be blocked by an agent."""
    line = requests.readline()
    if not line:
        os.killpg(0, signal.SIGKILL)
    return line


def _take_over_stdin() -> TextIO:
    """Take stdin for ourselves: an agent's is empty."""
    source = os.fdopen(os.dup(0), "r", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return source


if __name__ == "__main__":
    main()
