"""Spans of OpenTelemetry and of the OpenAI Agents SDK, kept with the attempt that makes them."""

import asyncio
import gzip
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import SpanKind, StatusCode

from support.agents import traced_agents
from support.agents.run_agents import run
from whet.config import RunnerConfig
from whet.errors import ConfigError
from whet.io.otlp import Encoding, parse_export
from whet.runners.attempt import check_runnable
from whet.runners.executors.command import command
from whet.runners.tracers import check_tracer, install_tracer
from whet.runners.tracers.openai_agents import convert_span as convert_agents_span
from whet.runners.tracers.otel import convert_span
from whet.store.sqlite import SQLiteStore
from whet.types import AttemptId, Span

pytestmark = pytest.mark.anyio

SPANS = Path(__file__).parents[2] / "support" / "recordings" / "spans"
RECORDED = SPANS / "trace-openai-agents.json.gz"


async def kept(store: SQLiteStore, attempt: str) -> dict[str, Span]:
    return {span.name: span for span in await store.spans(AttemptId(attempt))}


async def test_spans_of_attempts_that_run_at_once_are_kept_apart(store: SQLiteStore) -> None:
    both = asyncio.Barrier(2)
    tracer = trace.get_tracer("sdk", "1.0")

    def in_a_thread(task: str) -> None:
        with tracer.start_as_current_span(f"tool of {task}"):
            pass

    async def agent(task: str) -> float:
        with tracer.start_as_current_span(f"agent of {task}", attributes={"who": task}) as span:
            await both.wait()
            span.add_event("met", {"others": 1})
            await asyncio.gather(asyncio.to_thread(in_a_thread, task), both.wait())
        return 1.0

    await run(agent, ["a", "b"], store, tracer="otel")
    with tracer.start_as_current_span("of no attempt"):
        pass
    for number, task in enumerate("ab"):
        spans = await kept(store, f"r{number}.1")
        assert set(spans) == {f"agent of {task}", f"tool of {task}"}
        outer, inner = spans[f"agent of {task}"], spans[f"tool of {task}"]
        assert outer.attributes == {"who": task, "whet.attempt": f"r{number}.1"}
        assert [event.name for event in outer.events] == ["met"]
        assert inner.parent_id == outer.span_id
        assert inner.trace_id == outer.trace_id
        assert outer.scope == "sdk"
        assert outer.start <= inner.start <= inner.end <= outer.end


async def test_a_span_is_of_the_attempt_that_began_it_wherever_it_ends(store: SQLiteStore) -> None:
    begun = asyncio.Queue[trace.Span]()
    ended = asyncio.Event()

    async def agent(task: str) -> float:
        if task == "begins":
            begun.put_nowait(trace.get_tracer("sdk").start_span("left open"))
            await ended.wait()
        else:
            (await begun.get()).end()
            ended.set()
        return 1.0

    await run(agent, ["begins", "ends"], store, tracer="otel")
    assert set(await kept(store, "r0.1")) == {"left open"}
    assert not await kept(store, "r1.1")


async def test_a_process_of_a_pool_keeps_to_the_provider_of_the_program(store: SQLiteStore) -> None:
    groups = await run(
        traced_agents.solve, ["one", "two"], store, processes=1, concurrency=1, tracer="otel"
    )
    assert {group[0].reward for group in groups} == {1.0, 2.0}  # its own exporter has them too
    spans = [await kept(store, attempt) for attempt in ("r0.1", "r1.1")]
    assert sorted(name for found in spans for name in found) == ["one", "two"]


def test_a_kept_span_is_what_an_exporter_would_have_sent() -> None:
    finished: list[ReadableSpan] = []
    provider = TracerProvider(resource=Resource({"service.name": "it"}))
    tracer = provider.get_tracer("sdk")
    with (
        tracer.start_as_current_span("outer") as outer,
        tracer.start_as_current_span(
            "inner",
            kind=SpanKind.CLIENT,
            attributes={
                "text": "Zürich",
                "number": 3,
                "share": 0.5,
                "none": float("nan"),
                "is": True,
                "ids": [1, 2],
                "bytes": b"\x00\xff",
            },
        ) as inner,
    ):
        inner.add_event("output", {"gen_ai.output.messages": "[]"})
        inner.set_status(StatusCode.ERROR, "it broke")
    for span in (outer, inner):
        assert isinstance(span, ReadableSpan)
        finished.append(span)
    sent = parse_export(encode_spans(finished).SerializeToString(), Encoding.PROTOBUF)
    assert not sent.invalid
    assert [each.span for each in sent.spans] == [convert_span(span) for span in finished]


async def test_an_invalid_span_does_not_fail_its_agent(
    store: SQLiteStore, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(task: str) -> float:
        trace.get_tracer("sdk").start_span("before the epoch", start_time=-5).end()
        trace.get_tracer("sdk").start_span("fine").end()
        return 1.0

    [[trajectory]] = await run(agent, ["a"], store, tracer="otel")
    assert trajectory.reward == 1.0
    assert set(await kept(store, "r0.1")) == {"fine"}
    assert "cannot record a span of the agent's SDK: ValidationError" in caplog.text


def test_a_setting_that_keeps_spans_from_the_tracer_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with pytest.raises(ConfigError, match="found OTEL_SDK_DISABLED=true"):
        install_tracer("otel")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        check_runnable(command(["true"]), RunnerConfig(tracer="otel"))
    if find_spec("agents") is None:
        with pytest.raises(ConfigError, match="pip install 'openai-agents'"):
            check_tracer("openai-agents")


def test_spans_of_the_agents_sdk_have_the_names_of_the_conventions() -> None:
    recorded: list[tuple[str, Any]] = json.loads(gzip.decompress(RECORDED.read_bytes()))
    exported = [each for kind, each in recorded if kind == "span"]
    spans = [convert_agents_span(each) for each in exported]
    first = {span.name: span for span in spans if span.trace_id == spans[0].trace_id}
    tool, agent, turn = first["execute_tool get_weather"], first["invoke_agent Assistant"], "turn"
    assert tool.attributes["gen_ai.tool.call.result"] == exported[1]["span_data"]["output"]
    assert agent.attributes["gen_ai.agent.name"] == "Assistant"
    assert first[turn].attributes["openai_agents.turn"] == 2
    assert first[turn].parent_id == agent.span_id
    assert agent.parent_id == first["task"].span_id
    chat = spans[0]
    assert chat.kind == "client"
    assert chat.attributes["gen_ai.operation.name"] == "chat"
    assert chat.attributes["gen_ai.response.id"] == exported[0]["span_data"]["response_id"]
    assert chat.attributes["gen_ai.usage.output_tokens"] == 50
    assert chat.end - chat.start == 1_413_093_000
    assert len({span.span_id for span in spans}) == len(spans)
    assert {span.status for span in spans} <= {"ok", "error"}
