"""Whatever agents do, over any wire format: what is trained is what was sampled, where it was.

Random agents talk to a gateway over a real store. Every token their engine sampled must then stand
in the rows exactly once, after exactly the prompt that the engine received.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import cast

import anyio
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.gateway.conversations import FORMATS, TOOL_SETS, Item, Result, Style, System, User
from support.gateway.wire import Json, WireTurn, read_events, read_reply
from support.models.recording_engine import Answer, RecordingEngine, prove
from whet.config import GatewayConfig
from whet.gateway import auth
from whet.gateway.app import build_app
from whet.gateway.pipeline import CallPipeline
from whet.gateway.templates.renderer import Renderer
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, Call, Outcome, Rollout

SECRET = b"properties"
MODEL = "policy"
COMPLETIONS = "/v1/completions"

# --------------------------------------------------------------------------- what may happen

words = st.sampled_from(
    ["hi", "2 + 3", " ", "\n", "\n\n", "Zürich", "日本", "🙂", '"', "{", "}", "\\", "\t", "\u00a0",
     "<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_start|>", "[blank text]", "null"]
)  # fmt: skip
texts = st.lists(words, max_size=5).map("".join)
arguments = st.sampled_from(
    ['{"city": "Zürich",  "days": 3}', '{"days": 1.50, "city": "R\\u00f6m"}', "{}", '{"a": [1,2 ]}',
     '{ "city":"<tool_call>" }', '{"n": 1e2, "m": null}']
)  # fmt: skip
calls = st.builds(
    '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'.format,
    st.sampled_from(["get_weather", "look_up", "nobody"]),
    arguments,
)
broken = st.sampled_from(
    ["<tool_call>\n{", '<tool_call>{"name": 1}</tool_call>', "<tool_call></tool_call>", "<think>"]
)


@dataclass(frozen=True)
class EngineOutput:
    """Output of the engine for one choice."""

    text: str = ""
    ids: tuple[int, ...] = ()
    """Any ids, after the text: half characters, special tokens."""
    closes: bool = True
    piece: int = 1


outputs = st.builds(
    EngineOutput,
    text=st.one_of(
        texts,
        st.builds("{}{}".format, texts, calls),
        st.builds("<think>\n{}\n</think>\n\n{}{}".format, texts, texts, calls),
        st.builds("<think>{}</think>{}".format, texts, texts),
        st.builds("{}\n{}".format, calls, calls),
        st.builds("{}{}".format, texts, broken),
    ),
    ids=st.one_of(st.just(()), st.lists(st.integers(3, 1279), max_size=4).map(tuple)),
    closes=st.sampled_from([True, True, True, False]),
    piece=st.integers(1, 4),
)
styles = st.builds(
    Style,
    arguments=st.sampled_from(["same", "dumps", "compact", "sorted", "ascii"]),
    empty=st.sampled_from(["null", "text", "absent", "blank"]),
    parts=st.booleans(),
    drops_text=st.booleans(),
    drops_reasoning=st.booleans(),
    adds=st.booleans(),
    names_earlier=st.booleans(),
)


DOES = (
    *("begin", "branch", "edit", "resample", "retry", "restart", "retool", "at-once"),
    *("sum-up", "complete"),
    *("go on",) * 4,
)


@dataclass(frozen=True)
class Step:
    """One thing an agent does."""

    does: str
    which: int
    """Of the agents there are."""
    at: int
    """Where in the conversation, for what changes it."""
    text: str
    output: tuple[EngineOutput, ...]
    style: Style
    format: str | None
    """None for the one it used before."""
    n: int
    stream: bool
    limit: int | None


steps = st.builds(
    Step,
    does=st.sampled_from(DOES),
    which=st.integers(0, 3),
    at=st.integers(0, 7),
    text=texts,
    output=st.lists(outputs, min_size=3, max_size=3).map(tuple),
    style=styles,
    format=st.sampled_from([None, None, None, *FORMATS]),
    n=st.sampled_from([1, 1, 1, 2, 3]),
    stream=st.booleans(),
    limit=st.sampled_from([None, None, None, 1, 5, 20]),
)

# --------------------------------------------------------------------------- who does it


@dataclass
class Agent:
    """A conversation as its agent remembers it."""

    format: str
    tools: int
    style: Style
    items: list[Item] = field(default_factory=list[Item])
    steady: bool = True
    """Whether it kept to one wire format."""


@dataclass
class Raw:
    """A prompt that grows, for the format that knows no messages."""

    text: str = ""
    ids: list[int] = field(default_factory=list[int])


class World:
    """An attempt, its agents and the gateway they talk to."""

    def __init__(self, store: SQLiteStore, renderer: Renderer, attempt: Attempt) -> None:
        self._store = store
        self._renderer = renderer
        self._attempt = attempt
        self._script: Iterator[EngineOutput] = iter(())
        self.engine = RecordingEngine(lambda: self._answer(next(self._script)))
        self._agents: list[Agent] = []
        self._raw = Raw()
        self._last: tuple[str, Json, list[WireTurn]] | None = None
        self.restart()

    def restart(self) -> None:
        """All that was in memory is gone."""
        pipeline = CallPipeline(
            engine=self.engine, log=self._store, renderer=self._renderer, models=(MODEL,)
        )
        app = build_app(pipeline, SECRET, GatewayConfig())
        self._client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://g")

    async def do(self, step: Step) -> None:
        if step.does == "restart":
            self.restart()
        elif step.does == "retry":
            await self._retry(step)
        elif step.does == "complete":
            await self._complete(step)
        elif step.does == "begin" or not self._agents:
            path = step.format or list(FORMATS)[step.at % len(FORMATS)]
            agent = Agent(path, step.which % len(TOOL_SETS), step.style)
            self._agents.append(agent)
            agent.items = [System(step.text)] if step.at % 2 and step.text else []
            agent.items.append(User("Begin. " + step.text))
            await self._ask(agent, step)
        else:
            agent = self._agents[step.which % len(self._agents)]
            agent.steady = agent.steady and step.format in (None, agent.format)
            agent.format = step.format or agent.format
            await self._continue(agent, step)

    async def _continue(self, agent: Agent, step: Step) -> None:
        if step.does == "resample":
            await self._ask(replace(agent, items=self._last_request(agent)), step)
            return
        if step.does == "retool":
            agent.tools = (agent.tools + 1) % len(TOOL_SETS)
        elif step.does == "branch":
            turns = [at for at, item in enumerate(agent.items) if isinstance(item, WireTurn)]
            agent.items = agent.items[: turns[step.at % len(turns)] + 1]
        elif step.does == "edit":
            self._edit(agent, step)
        elif step.does == "sum-up":
            agent.items = [*agent.items[:1], User("So far: " + step.text)]
        self._answer_calls(agent, step)
        if step.does == "at-once":
            other = replace(agent, items=[*agent.items, User("another thing")])
            agent.items.append(User(step.text))
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._ask, other, step)
                tasks.start_soon(self._ask, agent, step)
            return
        if not isinstance(agent.items[-1], Result) or step.at % 3 == 0:
            agent.items.append(User(step.text))
        await self._ask(agent, step, honest=step.does == "go on" and agent.steady)

    def _last_request(self, agent: Agent) -> list[Item]:
        """The request of the last turn."""
        turns = [at for at, item in enumerate(agent.items) if isinstance(item, WireTurn)]
        return agent.items[: turns[-1]]

    def _answer_calls(self, agent: Agent, step: Step) -> None:
        last = agent.items[-1]
        if isinstance(last, WireTurn):
            agent.items += [
                Result(call.id, f"{step.text} {at}") for at, call in enumerate(last.calls)
            ]

    def _edit(self, agent: Agent, step: Step) -> None:
        at = step.at % len(agent.items)
        item = agent.items[at]
        match item:
            case WireTurn():
                agent.items[at] = WireTurn(text=item.text + "!", calls=item.calls)
            case Result(call, _):
                agent.items[at] = Result(call, "edited")
            case System() | User():
                agent.items[at] = type(item)("edited " + step.text)

    async def _ask(self, agent: Agent, step: Step, *, honest: bool = False) -> None:
        body = FORMATS[agent.format](agent.items, TOOL_SETS[agent.tools], agent.style)
        body["model"] = MODEL
        if step.stream:
            body["stream"] = True
        if agent.format == "/v1/chat/completions":
            body["n"] = step.n
        if step.limit:
            key = "max_output_tokens" if agent.format == "/v1/responses" else "max_tokens"
            body[key] = step.limit
        before = len(await self._store.calls(self._attempt.id))
        turns = await self._send(agent.format, body, step)
        new = (await self._store.calls(self._attempt.id))[before:]
        if len(new) == 1:
            check_shown(new[0], turns)
        if honest:
            check_merged(new[0], agent)
        agent.items = [*agent.items, turns[step.at % len(turns)]]

    async def _complete(self, step: Step) -> None:
        """Raw prompts, as text or as ids, that go on with what was sampled."""
        as_ids = step.at % 2 == 1
        self._raw.text += step.text or "x"
        self._raw.ids += self._renderer.template.encode(step.text or "x")
        prompt = self._raw.ids if as_ids else self._raw.text
        body: Json = {"model": MODEL, "prompt": prompt, "n": step.n, "max_tokens": 64}
        before = len(self.engine.samples)
        turns = await self._send(COMPLETIONS, body, step)
        if as_ids:
            self._raw.ids = [*self._raw.ids, *self.engine.samples[before].tokens]
        else:
            self._raw.text += turns[step.at % len(turns)].text

    async def _retry(self, step: Step) -> None:
        """The client did not hear the answer, and asks again: it gets the same."""
        if self._last is None:
            return
        path, body, turns = self._last
        sampled = len(self.engine.samples)
        again = await self._send(path, body, step, retry=True)
        assert again == turns
        assert len(self.engine.samples) == sampled

    async def _send(
        self, path: str, body: Json, step: Step, *, retry: bool = False
    ) -> list[WireTurn]:
        self._script = iter(step.output * 2)
        headers = {
            "authorization": f"Bearer {auth.mint_key(self._attempt.id, SECRET)}",
            "x-stainless-retry-count": "1" if retry else "0",
        }
        reply = await self._client.post(path, json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        events = read_events(reply.text) if body.get("stream") else reply.json()
        turns = read_reply(path, events)
        self._last = path, body, turns
        return turns

    def _answer(self, output: EngineOutput) -> Answer:
        ids = [*self._renderer.template.encode(output.text), *output.ids]
        closing = [self._renderer.end_of_turn_id] if output.closes or not ids else []
        tokens = [id for id in [*ids, *closing] if id is not None]
        return Answer(tuple(tokens), "stop" if output.closes else "length", piece=output.piece)


def check_shown(call: Call, turns: Sequence[WireTurn]) -> None:
    """Whole or streamed, a client reads the turn that is recorded."""
    for turn, generation in zip(turns, call.generations, strict=True):
        message = generation.message
        assert turn.text == message["content"]
        made = cast(list[dict[str, str]], message.get("tool_calls", []))
        assert [call.id for call in turn.calls] == [call["id"] for call in made]


def check_merged(call: Call, agent: Agent) -> None:
    """A conversation that simply goes on is served from what was sampled."""
    turn = next(item for item in reversed(agent.items) if isinstance(item, WireTurn))
    if turn.text or turn.calls:  # else there may be nothing to echo
        assert call.parent is not None, call.origin.fork


numbers = count()


async def live(store: SQLiteStore, renderer: Renderer, steps: Sequence[Step]) -> None:
    """Let agents do all that, and prove what training would see of it."""
    rollout = f"r{next(numbers)}"
    await store.enqueue([Rollout(id=rollout, task=None, group="g")])
    attempt = await store.claim("test", lease_s=600, wait_s=0)
    assert attempt is not None
    world = World(store, renderer, attempt)
    with anyio.fail_after(60):
        for step in steps:
            await world.do(step)
    await store.finish(attempt.id, Outcome(reward=1.0))
    [trajectory] = await store.trajectories([rollout])
    prove(trajectory, world.engine.samples)


@pytest.fixture(scope="module")
def store() -> Iterator[SQLiteStore]:
    with tempfile.TemporaryDirectory() as folder:
        store = SQLiteStore(Path(folder) / "store.db")
        yield store
        anyio.run(store.close)


MANY = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)


@pytest.mark.slow
@settings(MANY, max_examples=60)
@given(did=st.lists(steps, min_size=1, max_size=9))
def test_what_is_trained_is_what_was_sampled(
    store: SQLiteStore, thinking_renderer: Renderer, did: list[Step]
) -> None:
    anyio.run(live, store, thinking_renderer, did)


@pytest.mark.slow
@settings(MANY, max_examples=1500)
@given(did=st.lists(steps, min_size=1, max_size=16))
def test_what_is_trained_is_what_was_sampled_over_many_long_conversations(
    store: SQLiteStore, thinking_renderer: Renderer, did: list[Step]
) -> None:
    anyio.run(live, store, thinking_renderer, did)
