"""Coding agents as they are published do a task through the gateway, with a scripted model.

$WHET_CODING_AGENTS is the folder with their programs: `make test-agents` installs it.
"""

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from anyio import to_thread

from coding_agents.agents import AGENTS, FIXED, CodingAgent, write_workspace
from support.real_templates import template_of, trl_templates
from support.scripted_gateway import MODEL, SECRET
from whet.config import GatewayConfig
from whet.gateway import auth
from whet.gateway.app import build_app
from whet.gateway.messages import Message, ToolCall
from whet.gateway.pipeline import CallPipeline
from whet.gateway.templates.renderer import Renderer
from whet.gateway.templates.suffix import QUESTION, TOOL
from whet.io.attempt_url import build_attempt_url
from whet.io.server import AppServer
from whet.protocols import Engine
from whet.runners.executors.remote import build_environment
from whet.store.sqlite import SQLiteStore
from whet.training.rows import build_rows
from whet.types import Credit, Endpoint, Outcome, Rollout, Sampling, TokenChunk

FOLDER = os.environ.get("WHET_CODING_AGENTS", "")
TIME_LIMIT_S = 300
PASSED = ("PATH", "LANG", "TERM", "SSL_CERT_FILE")
"""Variables of this process that agents inherit."""
NOWHERE = "http://127.0.0.1:9"
"""A proxy that is not there: agents reach nothing but the gateway."""

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="set WHET_CODING_AGENTS: run `make test-agents`"),
]


class TaskEngine(Engine):
    """Engine that plays turns to prompts with tools; a prompt without tools gets a title."""

    def __init__(self, renderer: Renderer, turns: Sequence[Message]) -> None:
        self._template = renderer.template
        written = [renderer.render_turn([QUESTION], turn, (TOOL,))[1] for turn in turns]
        self._turns = deque(written)
        self._title = renderer.render_turn([QUESTION], Message("assistant", "A sum"), ())[1]

    @property
    def is_finished(self) -> bool:
        """Whether every turn was played."""
        return not self._turns

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[TokenChunk]:
        has_tools = "<tools>" in self._template.decode_all(prompt)
        ids = self._turns.popleft() if has_tools else self._title
        for id in ids[:-1] if stream else ():
            yield TokenChunk((id,), (-0.5,), (0,))
        last = ids[-1:] if stream else ids
        yield TokenChunk(tuple(last), (-0.5,) * len(last), (0,) * len(last), stop="stop")

    async def close(self) -> None:
        pass


def write_turns(agent: CodingAgent, work: Path) -> list[Message]:
    """The turns of the model: the calls of the task, the first beside text, then an answer."""
    calls = [
        ToolCall(f"call_{number}", name, json.dumps(arguments))
        for number, (name, arguments) in enumerate(agent.steps(work))
    ]
    turns = [Message("assistant", "", (call,)) for call in calls]
    turns[0] = turns[0]._replace(content="I will look first.")
    return [*turns, Message("assistant", "It adds now.")] if agent.answers else turns


def run_program(agent: CodingAgent, llm: Endpoint, work: Path, home: Path) -> str:
    """Run an agent in its workspace; return what it printed."""
    inherited = {name: os.environ[name] for name in PASSED if name in os.environ}
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE)
    environment = {
        **inherited,
        **build_environment(llm, posts_rewards=False),
        **proxies,
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
        **agent.environment,
        "HOME": str(home),
        "TMPDIR": str(home),
    }
    program = subprocess.Popen(
        [str(Path(FOLDER).resolve() / agent.program), *agent.arguments(llm, home)],
        cwd=work,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = program.communicate(timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        output = f"no end after {TIME_LIMIT_S} s: {error.output!r}"
    with suppress(ProcessLookupError):
        os.killpg(program.pid, signal.SIGKILL)
    program.wait()
    return output


def run_tests(work: Path) -> int:
    tests = [sys.executable, "-m", "unittest", "-q", "test_sums"]
    return subprocess.run(tests, cwd=work, check=False).returncode


@pytest.mark.parametrize("template", ["qwen3_instruct_2507", "qwen3_5_nothink"])
@pytest.mark.parametrize("name", AGENTS)
async def test_a_coding_agent_does_a_task_in_one_row(
    name: str, template: str, tmp_path: Path
) -> None:
    agent = AGENTS[name]
    work, home = tmp_path / "work", tmp_path / "home"
    write_workspace(work)
    home.mkdir()
    renderer = Renderer(template_of(tmp_path / "model", template, trl_templates()[template]))
    engine = TaskEngine(renderer, write_turns(agent, work))
    async with SQLiteStore(tmp_path / "store.db") as store:
        await store.enqueue([Rollout(id="r0", task={}, group="g", timeout_s=3600)])
        attempt = await store.claim("worker", lease_s=3600, wait_s=0)
        assert attempt is not None
        pipeline = CallPipeline(engine=engine, log=store, renderer=renderer, models=(MODEL,))
        server = AppServer(build_app(pipeline, SECRET, GatewayConfig()))
        try:
            llm = Endpoint(
                base_url=build_attempt_url(server.url, attempt),
                api_key=auth.mint_key(attempt.id, SECRET),
                model=MODEL,
            )
            output = await to_thread.run_sync(run_program, agent, llm, work, home)
        finally:
            server.close()
        await store.finish(attempt.id, Outcome(reward=1.0))
        [trajectory] = await store.trajectories(["r0"])

    assert engine.is_finished, output[-4000:]
    assert FIXED in (work / "sums.py").read_text(), output[-4000:]
    assert await to_thread.run_sync(run_tests, work) == 0
    forks = [(call.origin.fork, len(call.origin.tools)) for call in trajectory.calls]
    rows = build_rows([Credit.even(trajectory, 1.0)])
    assert not rows.unproven
    [row] = [row for row in rows.rows if len(row.segments) > 1]
    assert len(row.segments) == len(write_turns(agent, work)), forks
    assert len(rows.rows) == 1 + agent.side_calls, forks
