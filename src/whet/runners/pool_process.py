"""A process that runs agents for `pool.py`: an attempt on a line of stdin, what comes of it on
lines of stdout.

What an agent prints goes to stderr instead.
"""

import asyncio
import json
import os
import signal
import sys
import threading
from queue import SimpleQueue
from typing import Any, TextIO

from pydantic import JsonValue

from whet.errors import BadReward, ConfigError
from whet.runners.agent import ReadAgent, awaited, read_agent
from whet.runners.environment import guard_environment, restore_environment
from whet.runners.given import given_to
from whet.runners.loading import load_function
from whet.runners.running import Running, failure_of, final_reward, running
from whet.runners.tracers import install_tracer
from whet.types import Attempt, Endpoint, Reward, Span

Message = dict[str, JsonValue]


class Told(Running):
    """An attempt whose runner is another process: it is told as things happen."""

    def __init__(self, attempt: Attempt, llm: Endpoint, answers: "Answers") -> None:
        super().__init__(attempt, llm, is_alone=True)
        self._answers = answers

    def add_reward(self, reward: Reward) -> None:
        super().add_reward(reward)
        self._answers.send({"reward": reward.model_dump(mode="json")})

    def add_span(self, span: Span) -> None:
        self._answers.send({"span": span.model_dump(mode="json")})


class Answers:
    """Lines to the runner, from any thread."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()

    def send(self, message: Message) -> None:
        """Say one thing."""
        with self._lock:
            self._out.write(json.dumps(message) + "\n")
            self._out.flush()


def main() -> None:
    """Load the agent, then run it as often as asked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this ends it
    requests, answers = _take_streams()
    first = requests.get()
    sys.path[:] = first["path"]
    try:
        agent = read_agent(load_function(first["spec"]))
        install_tracer(first["tracer"])
    except ConfigError as error:
        answers.send({"error": str(error)})
        return
    guard_environment()
    answers.send({"ready": True})
    while True:
        _run(agent, requests.get(), answers)


def _run(agent: ReadAgent, request: dict[str, Any], answers: Answers) -> None:
    attempt = Attempt.model_validate(request["attempt"])
    now = Told(attempt, Endpoint.model_validate(request["llm"]), answers)
    entry = agent.entries[attempt.rollout.mode]
    token = running.set(now)
    try:
        given = given_to(entry.names, attempt, now.llm, request["resources"])
        returned = entry.call(given)
        if asyncio.iscoroutine(returned):
            returned = asyncio.run(awaited(returned))
        earned = final_reward(returned, now.rewards)
    except BaseException as raised:  # noqa: BLE001 - also SystemExit: it is the agent's only
        error = failure_of(raised)
        kind = "reward" if isinstance(error, BadReward) else "agent"
        answers.send({"failed": kind, "why": str(error)})
    else:
        answers.send({"earned": earned})
    finally:
        now.has_ended = True
        restore_environment(now)
        running.reset(token)


def _take_streams() -> tuple[SimpleQueue[dict[str, Any]], Answers]:
    """Stdin and stdout for ourselves: an agent finds them empty, and prints to stderr."""
    source = os.fdopen(os.dup(0), "r", encoding="utf-8")
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    requests = SimpleQueue[dict[str, Any]]()

    def read() -> None:
        for line in source:
            requests.put(json.loads(line))
        os.killpg(0, signal.SIGKILL)  # the runner is gone, whatever the agent is at

    threading.Thread(target=read, name="whet-requests", daemon=True).start()
    return requests, Answers(out)


if __name__ == "__main__":
    main()
