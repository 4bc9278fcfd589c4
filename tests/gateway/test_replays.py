"""Real SDK traffic, recorded once, against the gateway: what was sampled is reused, or it says why.

Each recorded request is sent as the SDK sent it, while the engine samples the recorded answer.
Where the SDK echoes an id or a text of the stub it was recorded against, it would echo ours: so
those are put in their place. What the SDK itself made of them is left as it is.
"""

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from support.gateway.wire import Json, WireToolCall, WireTurn, read_events, read_reply
from support.models.recording_engine import Answer, RecordingEngine, prove
from whet.config import GatewayConfig
from whet.errors import EngineError
from whet.gateway import auth
from whet.gateway.app import build_app
from whet.gateway.pipeline import CallPipeline
from whet.gateway.templates.renderer import Renderer
from whet.store.sqlite import SQLiteStore
from whet.types import Call, Fork, Outcome, Rollout

RECORDINGS = Path(__file__).parents[1] / "support" / "recordings"
TABLE = Path(__file__).parent.parent.parent / "docs" / "internals" / "exactness.md"
MODEL = "policy"
SECRET = b"replay"

ODD = '{"min_temp": 1.50,  "days": 3,  "city": "Zürich"}'
"""What the recorded model wrote, where a format shows arguments only as an object."""


@dataclass(frozen=True)
class Run:
    """The recorded requests and replies of one agent."""

    sdk: str
    name: str
    records: Sequence[Json]


def read_runs() -> Iterator[Run]:
    for file in sorted(RECORDINGS.glob("*.jsonl.gz")):
        runs: dict[tuple[str, str], list[Json]] = {}
        for line in gzip.decompress(file.read_bytes()).decode().splitlines():
            record = json.loads(line)
            runs.setdefault((record["sdk"], record["run"]), []).append(record)
        for (sdk, name), records in runs.items():
            yield Run(sdk, name, records)


@dataclass
class Replayed:
    """The outcome of a replayed run."""

    calls: list[Call] = field(default_factory=list[Call])
    echoes: int = 0
    """Calls that carry an earlier turn of their attempt."""
    merged: int = 0
    refused: Counter[str] = field(default_factory=Counter[str])
    forks: Counter[str] = field(default_factory=Counter[str])
    lossy: int = 0


def sampled_text(recorded: Json) -> str:
    """The turn as the model would have written it."""
    text = f"<think>{recorded['reasoning']}</think>\n\n" if "reasoning" in recorded else ""
    text += recorded.get("text", "")
    for call in recorded.get("calls", ()):
        arguments = call["arguments"] or "{}"
        if json_or_none(arguments) == json.loads(ODD):
            arguments = ODD
        text += (
            f'<tool_call>\n{{"name": "{call["name"]}", "arguments": {arguments}}}\n</tool_call>\n'
        )
    return text.rstrip("\n") if recorded.get("calls") else text


def json_or_none(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


class Replacement:
    """Map of what the SDK echoes of the stub's replies to the same parts of ours."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._texts: dict[str, str] = {}

    def learn(self, theirs: WireTurn, ours: WireTurn) -> None:
        self._ids |= {t: o for t, o in zip(theirs.ids(), ours.ids(), strict=False) if t and o}
        for text, mine in ((theirs.text, ours.text), (theirs.reasoning, ours.reasoning)):
            if text.strip():
                self._texts[text] = mine

    def put(self, value: Any, key: str = "") -> Any:
        if isinstance(value, dict):
            return {name: self.put(each, name) for name, each in value.items()}
        if isinstance(value, list):
            return [self.put(each) for each in value]
        if not isinstance(value, str):
            return value
        if key == "arguments" and value == "":
            return "{}"
        return self._ids.get(value) or self._texts.get(value, value)


class Replay:
    """A gateway and the agent of one recorded run."""

    def __init__(self, store: SQLiteStore, renderer: Renderer, *, restarts: bool) -> None:
        self._store = store
        self._renderer = renderer
        self._restarts = restarts
        self._answer: Answer | EngineError = EngineError("nothing to say")
        self.engine = RecordingEngine(lambda: self._answer)
        self._start()

    def _start(self) -> None:
        pipeline = CallPipeline(
            engine=self.engine, log=self._store, renderer=self._renderer, models=(MODEL,)
        )
        app = build_app(pipeline, SECRET, GatewayConfig())
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://gateway"
        )

    async def run(self, run: Run, rollout: str) -> Replayed:
        await self._store.enqueue([Rollout(id=rollout, task=None, group="g")])
        attempt = await self._store.claim("replay", lease_s=600, wait_s=0)
        assert attempt is not None
        key = auth.mint_key(attempt.id, SECRET)
        replayed, known = Replayed(), Replacement()
        for record in run.records:
            if not await self._one(record, key, known, replayed):
                break
        calls = await self._store.calls(attempt.id)
        replayed.calls = calls
        replayed.merged = sum(call.parent is not None for call in calls)
        replayed.forks = Counter(call.origin.fork for call in calls if call.origin.fork)
        replayed.lossy = sum(call.origin.lossy for call in calls)
        await self._store.finish(attempt.id, Outcome(reward=1.0))
        [trajectory] = await self._store.trajectories([rollout])
        prove(trajectory, self.engine.samples)
        return replayed

    async def _one(self, record: Json, key: str, known: Replacement, replayed: Replayed) -> bool:
        """Send a recorded request; whether the SDK would have gone on as recorded."""
        if self._restarts:
            self._start()
        theirs = record["turns"][0] if record["turns"] else None
        self._answer = EngineError("as recorded")
        if record["status"] in (200, 0) and (theirs or record["status"] == 0):
            self._answer = self._sampled(theirs or {"text": "too late", "stop": "stop"})
        body = known.put(record["body"]) | {"model": MODEL}
        name = record["key"]
        auth = {name: f"Bearer {key}" if name == "authorization" else key}
        reply = await self._client.request(
            record["method"], record["path"], json=body, headers=record["headers"] | auth
        )
        if record["status"] in (429, 500):
            assert reply.status_code == 503, reply.text
            return True
        if reply.status_code != 200:
            replayed.refused[refusal(reply)] += 1
            return record["status"] not in (200, 0)
        if record["path"].endswith("/count_tokens"):
            return True
        replayed.echoes += echoes(body)
        if theirs is None:
            return True
        streamed = reply.headers["content-type"].startswith("text/event-stream")
        ours = read_reply(record["path"], read_events(reply.text) if streamed else reply.json())[0]
        wrote = [WireToolCall(**call) for call in theirs.get("calls", ())]
        known.learn(WireTurn(**(theirs | {"calls": tuple(wrote)})), ours)
        # A call that cannot be read comes back as text, and the agent would have gone another way.
        return len(ours.calls) == len(wrote)

    def _sampled(self, recorded: Json) -> Answer:
        ids = tuple(self._renderer.template.encode(sampled_text(recorded)))
        if recorded["stop"] in ("length", "max_tokens", "incomplete"):
            return Answer(ids, "length", piece=3, whole=True)
        assert self._renderer.end_of_turn_id is not None
        return Answer((*ids, self._renderer.end_of_turn_id), piece=3, whole=True)


def refusal(reply: httpx.Response) -> str:
    error = reply.json()["error"]
    return f"{reply.status_code} {error.get('code') or error['type']}: {error['message']}"


def echoes(body: Json) -> bool:
    if body.get("previous_response_id"):
        return True
    items = body.get("messages") or body.get("input")
    if not isinstance(items, list):
        return False
    kinds = ("function_call", "reasoning", "item_reference")
    return any(m.get("role") == "assistant" or m.get("type") in kinds for m in items)


@dataclass(frozen=True)
class Known:
    """A known reason for a run's forks."""

    forks: Counter[str]
    why: str


def known(why: str, *forks: Fork) -> Known:
    return Known(Counter(forks), why)


NOT_INHERITED = "the second request leaves `instructions` out, and Responses do not inherit them"
TWO_CLIENTS = "the same request is sent twice, by two clients"
DOCUMENTED = {
    ("anthropic", "env"): known(TWO_CLIENTS, Fork.RESAMPLED),
    ("crewai", "structured"): known(
        "a call of its own, with a fresh prompt, turns the answer into the output type",
        Fork.NEW_CONVERSATION,
    ),
    ("openai", "responses.content.reason"): known(NOT_INHERITED, Fork.EDITED_HISTORY),
    ("openai", "responses-prev"): known(NOT_INHERITED, Fork.EDITED_HISTORY),
    ("openai", "responses-stream.content.reason"): known(TWO_CLIENTS, Fork.RESAMPLED),
    ("openai-agents", "chat.handoff"): known(
        "the agent that takes over has another system prompt and other tools",
        Fork.NEW_CONVERSATION,
    ),
    ("openai-agents", "default-env"): known(
        "a second agent, with the same system prompt, gets another question",
        Fork.NEW_CONVERSATION,
    ),
    ("pydantic-ai", "env"): known(TWO_CLIENTS, Fork.RESAMPLED),
}
"""Every fork of the recorded runs."""

THREADS = "400 invalid_request_error: thread: send the whole conversation instead"
PROMPT_IDS = "400 invalid_request: the field 'prompt_token_ids' is not supported"
REFUSED = {
    ("anthropic", "tool-runner.content"): THREADS,
    ("anthropic", "tool-runner.content.nothread"): THREADS,
    ("anthropic", "tool-runner.content.lostthread"): THREADS,
    ("strands-vllm", "prompt-ids"): PROMPT_IDS,
}
"""Every refusal. The client of Anthropic goes on with the whole history, as `nothread` shows."""


async def replay_all(
    renderer: Renderer, folder: Path, *, restarts: bool = False
) -> dict[tuple[str, str], Replayed]:
    results: dict[tuple[str, str], Replayed] = {}
    async with SQLiteStore(folder / "store.db") as store:
        for at, run in enumerate(read_runs()):
            replay = Replay(store, renderer, restarts=restarts)
            results[run.sdk, run.name] = await replay.run(run, f"r{at}")
    return results


Results = dict[tuple[str, str], Replayed]


@pytest.fixture(scope="module")
def results(thinking_renderer: Renderer, tmp_path_factory: pytest.TempPathFactory) -> Results:
    return anyio.run(replay_all, thinking_renderer, tmp_path_factory.mktemp("replays"))


def test_every_turn_an_sdk_echoes_is_served_from_its_sampled_tokens(results: Results) -> None:
    for name, run in results.items():
        if name not in DOCUMENTED:
            assert run.merged == run.echoes == len(run.calls) - bool(run.calls), name


def test_every_fork_has_its_documented_cause(results: Results) -> None:
    forks = {name: run.forks for name, run in results.items() if run.forks}
    assert forks == {name: documented.forks for name, documented in DOCUMENTED.items()}


def test_every_request_is_served_or_refused_for_a_documented_reason(results: Results) -> None:
    refused = {name: run.refused for name, run in results.items() if run.refused}
    assert refused == {name: Counter([reason]) for name, reason in REFUSED.items()}


def test_a_call_that_cannot_be_read_comes_back_as_text(results: Results) -> None:
    bad = [run for (_, name), run in results.items() if "badargs" in name]
    assert len(bad) == 7
    for run in bad:
        [call] = run.calls
        [generation] = call.generations
        assert "tool_calls" not in generation.message
        assert "<tool_call>" in str(generation.message["content"])


def test_a_request_that_is_sent_again_is_sampled_once(results: Results) -> None:
    assert len(results["openai", "hang"].calls) == 1


@pytest.mark.slow
def test_a_gateway_that_restarts_before_every_request_serves_the_same(
    results: Results, thinking_renderer: Renderer, tmp_path: Path
) -> None:
    again = anyio.run(lambda: replay_all(thinking_renderer, tmp_path, restarts=True))
    for name, run in results.items():
        shape = [(c.prompt_length, c.parent is None, c.origin.fork) for c in run.calls]
        other = [(c.prompt_length, c.parent is None, c.origin.fork) for c in again[name].calls]
        assert other == shape, name


def test_the_table_in_the_docs_is_the_one_measured(results: Results) -> None:
    measured = table(results)
    assert measured in TABLE.read_text(), f"{TABLE.name} should have this table:\n{measured}"


def table(results: Results) -> str:
    """Each SDK's runs in one line."""
    lines = [
        "| SDK | runs | calls | carry earlier turns | served from sampled tokens | ratio "
        "| came back with text missing | forks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for sdk in dict.fromkeys(sdk for sdk, _ in results):
        runs = [run for (name, _), run in results.items() if name == sdk]
        echoes = sum(run.echoes for run in runs)
        merged = sum(run.merged for run in runs)
        forks = sum((run.forks for run in runs), Counter[str]())
        shown = "twelve SDKs, by environment variables" if sdk == "_env" else sdk
        calls = sum(len(run.calls) for run in runs)
        lines.append(
            f"| {shown} | {len(runs)} | {calls} | {echoes} | {merged} "
            f"| {f'{merged / echoes:.2f}' if echoes else '-'} | {sum(run.lossy for run in runs)} "
            f"| {', '.join(f'{n} {cause}' for cause, n in sorted(forks.items())) or '-'} |"
        )
    return "\n".join(lines)
