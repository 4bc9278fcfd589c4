"""Coding agents as they are published do a task through the gateway, with a scripted model.

$WHET_CODING_AGENTS is the folder with their programs: `make test-agents` installs it.
"""

import json
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from anyio import to_thread

from integrations.coding_agents.agents import AGENTS, FIXED, CodingAgent, write_workspace
from support.gateway.scripted_gateway import MODEL, SECRET
from support.models.real_templates import template_of, trl_templates
from whet.config import GatewayConfig
from whet.gateway import auth
from whet.gateway.app import build_app
from whet.gateway.messages import Message, ToolCall
from whet.gateway.pipeline import CallPipeline
from whet.gateway.templates.chat_template import QUESTION
from whet.gateway.templates.renderer import Renderer
from whet.gateway.templates.suffix import TOOL
from whet.io.attempt_url import build_attempt_url
from whet.io.server import AppServer
from whet.protocols import Engine
from whet.runners.executors.external_agents import build_environment
from whet.store.sqlite import SQLiteStore
from whet.training.rows import build_rows
from whet.types import Credit, Endpoint, Outcome, Rollout, Sampling, TokenChunk, Trajectory

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
    """Engine that plays turns; a prompt without tools gets a title, if there is one."""

    def __init__(
        self, renderer: Renderer, turns: Sequence[Sequence[int]], title: Sequence[int] = ()
    ) -> None:
        self._template = renderer.template
        self._turns = deque(turns)
        self._title = title

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
        is_side_call = self._title and "<tools>" not in self._template.decode_all(prompt)
        ids = self._title if is_side_call else self._turns.popleft()
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


def run_program(
    command: Sequence[str], extra: Mapping[str, str], llm: Endpoint, work: Path, home: Path
) -> str:
    """Run an agent in its workspace, with extra variables; return what it printed."""
    inherited = {name: os.environ[name] for name in PASSED if name in os.environ}
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), NOWHERE)
    environment = {
        **inherited,
        **build_environment(llm, posts_rewards=False),
        **proxies,
        **dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost"),
        **extra,
        "HOME": str(home),
        "TMPDIR": str(home),
    }
    program = subprocess.Popen(
        [str(Path(FOLDER).resolve() / command[0]), *command[1:]],
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


async def record(
    engine: TaskEngine, renderer: Renderer, folder: Path, run: Callable[[Endpoint], str]
) -> tuple[Trajectory, str]:
    """Serve an agent; return its trajectory and what it printed."""
    async with SQLiteStore(folder / "store.db") as store:
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
            output = await to_thread.run_sync(run, llm)
        finally:
            server.close()
        await store.finish(attempt.id, Outcome(reward=1.0))
        [trajectory] = await store.trajectories(["r0"])
    return trajectory, output


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
    turns = write_turns(agent, work)
    title = renderer.render_turn([QUESTION], Message("assistant", "A sum"), ())[1]
    played = [renderer.render_turn([QUESTION], turn, (TOOL,))[1] for turn in turns]
    engine = TaskEngine(renderer, played, title)

    def run(llm: Endpoint) -> str:
        command = [agent.program, *agent.arguments(llm, home)]
        return run_program(command, agent.environment, llm, work, home)

    trajectory, output = await record(engine, renderer, tmp_path, run)
    assert engine.is_finished, output[-4000:]
    assert FIXED in (work / "sums.py").read_text(), output[-4000:]
    assert await to_thread.run_sync(run_tests, work) == 0
    forks = [(call.origin.fork, len(call.origin.tools)) for call in trajectory.calls]
    rows = build_rows([Credit.even(trajectory, 1.0)])
    assert not rows.unproven
    [row] = [row for row in rows.rows if len(row.segments) > 1]
    assert len(row.segments) == len(turns), forks
    assert len(rows.rows) == 1 + agent.side_calls, forks


CODE_AGENT = """
import os
from smolagents import CodeAgent, OpenAIServerModel

model = OpenAIServerModel(
    os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
print("answer:", CodeAgent(tools=[], model=model).run("What is 2 + 3?"))
"""


async def test_a_code_agent_of_smolagents_runs_in_one_row(tmp_path: Path) -> None:
    """It sends the sampled text back with a closing tag and the call as text behind it."""
    home = tmp_path / "home"
    home.mkdir()
    name = "qwen3_instruct_2507"
    renderer = Renderer(template_of(tmp_path / "model", name, trl_templates()[name]))
    steps = ["print(2 + 3)", "x = 5\nprint(x)", "final_answer(5)"]
    texts = [f"Thought: I compute.\n<code>\n{step}\n</code>" for step in steps]
    engine = TaskEngine(renderer, [renderer.template.encode(text) for text in texts])

    def run(llm: Endpoint) -> str:
        return run_program(["bin/python", "-c", CODE_AGENT], {}, llm, tmp_path, home)

    trajectory, output = await record(engine, renderer, tmp_path, run)
    assert "answer: 5" in output, output[-4000:]
    rows = build_rows([Credit.even(trajectory, 1.0)])
    [row] = rows.rows
    assert len(row.segments) == len(steps)
    assert not rows.unproven
