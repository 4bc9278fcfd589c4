"""Agents of Agent Lightning that whet runs, as it does for `VERL` and `APO`."""

from typing import Any

import anyio
import pytest

import whet.agl as agl
from whet.agl.native import build_agent
from whet.runners.context import AttemptContext, active_attempt
from whet.types import Attempt, AttemptedRollout, AttemptId, Endpoint, Rollout

ATTEMPT = Attempt(id=AttemptId("a"), rollout=Rollout(id="r", task=1, group="g"), number=1)
LLM = Endpoint(base_url="http://localhost/v1", api_key="k", model="m")


@agl.rollout
def agent(task: str, llm: agl.LLM) -> float:
    agl.emit_message("began")
    if task == "fails":
        raise OSError("of the agent")
    return 0.5


class Recorder(agl.Hook):
    """Records the spans of rollouts that have ended; its other callbacks may fail."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.fails = fails
        self.spans: list[list[str]] = []

    async def on_rollout_start(self, **arguments: Any) -> None:
        if self.fails:
            raise OSError("of the hook")

    async def on_rollout_end(self, *, spans: list[agl.Span], **arguments: Any) -> None:
        self.spans.append([span.name for span in spans])


def run(task: str, hook: Recorder) -> tuple[float | None, list[str]]:
    """Run the agent; returns its reward and the spans that the runner stores."""
    function = build_agent(agent, agl.OtelTracer(), (hook,), {})
    context = AttemptContext(ATTEMPT, LLM)

    async def call() -> float | None:
        active_attempt.set(context)
        return await function(task, LLM, AttemptedRollout.from_attempt(ATTEMPT), {})

    try:
        reward = anyio.run(call)
    except OSError:
        reward = None
    return reward, [span.name for span in context.spans]


def test_a_hook_that_fails_does_not_fail_the_rollout(caplog: pytest.LogCaptureFixture) -> None:
    reward, _ = run("works", Recorder(fails=True))
    assert reward == 0.5
    assert "the hook on_rollout_start failed" in caplog.text


def test_the_spans_of_an_agent_that_fails_are_kept() -> None:
    hook = Recorder()
    reward, stored = run("fails", hook)
    assert reward is None
    assert stored == ["agentlightning.message"]
    assert hook.spans == [stored]
