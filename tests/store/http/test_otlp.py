"""Traces as exporters of OpenTelemetry send them, over both encodings, to a served store."""

import base64
import gzip
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio import to_thread
from google.protobuf.json_format import ParseDict
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode
from pydantic import ValidationError

from support.store.served_store import TOKEN
from whet.errors import RequestError
from whet.gateway import auth
from whet.io.otlp import ATTEMPT, Encoding, parse_export
from whet.io.otlp_protobuf import MAX_MESSAGES, MESSAGES, read_message, write_bytes
from whet.store.http.server import StoreServer
from whet.store.sqlite import SQLiteStore
from whet.types import AttemptId, Outcome, Rollout

pytestmark = pytest.mark.anyio

Json = dict[str, Any]
RECORDED = Path(__file__).parents[2] / "support" / "recordings" / "spans"
TRACE, SPAN = "ab" * 16, "cd" * 8
BEARER = {"Authorization": f"Bearer {TOKEN}"}


def read_key(key: str, run: str) -> AttemptId | None:
    return auth.read_key(key, auth.derive_secret(TOKEN, run))


def mint(attempt: AttemptId, run: str = "default") -> str:
    return auth.mint_key(attempt, auth.derive_secret(TOKEN, run))


@pytest.fixture
async def store(tmp_path: Path) -> AsyncGenerator[SQLiteStore]:
    async with SQLiteStore(tmp_path / "store.db") as store:
        yield store


@pytest.fixture
async def url(store: SQLiteStore) -> AsyncGenerator[str]:
    server = StoreServer(store, token=TOKEN, read_key=read_key)
    yield server.url
    await to_thread.run_sync(server.close)


@pytest.fixture
async def attempts(store: SQLiteStore) -> list[AttemptId]:
    return [await begin(store, id_) for id_ in ("a", "b")]


async def begin(store: SQLiteStore, id_: str) -> AttemptId:
    await store.enqueue([Rollout(id=id_, task=1, group="g")])
    attempt = await store.claim("w", lease_s=60, wait_s=0)
    assert attempt is not None
    return attempt.id


def attribute(key: str, value: object) -> Json:
    match value:
        case bool():
            return {"key": key, "value": {"boolValue": value}}
        case int():
            return {"key": key, "value": {"intValue": str(value)}}
        case float():
            return {"key": key, "value": {"doubleValue": value}}
        case list():
            values = [attribute("", each)["value"] for each in value]
            return {"key": key, "value": {"arrayValue": {"values": values}}}
        case _:
            return {"key": key, "value": {"stringValue": value}}


def attributes(values: Json) -> list[Json]:
    return [attribute(key, value) for key, value in values.items()]


def export(*spans: Json, resource: Json | None = None, scope: str = "tests") -> Json:
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": attributes(resource or {})},
                "scopeSpans": [{"scope": {"name": scope}, "spans": list(spans)}],
            }
        ]
    }


def span(trace: str = TRACE, id_: str = SPAN, **values: object) -> Json:
    return {
        "traceId": trace,
        "spanId": id_,
        "name": "chat",
        "kind": 3,
        "startTimeUnixNano": "5",
        "endTimeUnixNano": "9",
        "attributes": attributes(values),
    }


def in_protobuf(request: Json) -> bytes:
    """As exporters write it; protobuf's own JSON has base64 where OTLP has hex."""
    request = json.loads(json.dumps(request))
    for group in request["resourceSpans"]:
        for scope in group["scopeSpans"]:
            for each in scope["spans"]:
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in each:
                        raw = bytes.fromhex(each[name])
                        each[name] = base64.b64encode(raw).decode()
    return ParseDict(request, ExportTraceServiceRequest()).SerializeToString()


Send = Callable[..., Any]


@pytest.fixture(params=["json", "protobuf", "json, gzip", "protobuf, gzip"])
async def send(request: pytest.FixtureRequest, url: str) -> Send:
    """Send an export, and understand the answer: how many spans were rejected, and why."""
    is_json = "json" in request.param

    async def send(what: Json, path: str = "/v1/traces", key: str = TOKEN) -> tuple[int, str]:
        body = json.dumps(what).encode() if is_json else in_protobuf(what)
        kind = Encoding.JSON if is_json else Encoding.PROTOBUF
        headers = {"Content-Type": kind, "Authorization": f"Bearer {key}"}
        if "gzip" in request.param:
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
        async with httpx.AsyncClient(base_url=url) as http:
            reply = await http.post(path, content=body, headers=headers)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == kind
        if is_json:
            partial = reply.json().get("partialSuccess", {})
            return int(partial.get("rejectedSpans", 0)), partial.get("errorMessage", "")
        answer = ExportTraceServiceResponse.FromString(reply.content).partial_success
        return answer.rejected_spans, answer.error_message

    return send


async def test_a_span_is_kept_as_it_came_whatever_it_was_written_in(
    send: Send, store: SQLiteStore, attempts: Sequence[AttemptId]
) -> None:
    values: Any = {
        "gen_ai.response.id": "chatcmpl-1",
        "n": -3,
        "x": 0.5,
        "b": True,
        "l": [1, "zwei"],
    }
    sent = span(**values) | {
        "parentSpanId": "ef" * 8,
        "status": {"code": 2, "message": "it broke"},
        "events": [{"timeUnixNano": "7", "name": "e", "attributes": attributes({"k": "ü"})}],
    }
    resource = {ATTEMPT: attempts[1], "service.name": "s"}
    assert await send(export(sent, resource=resource, scope="strands")) == (0, "")
    [kept] = await store.spans(attempts[1])
    assert kept.model_dump() == {
        "trace_id": TRACE,
        "span_id": SPAN,
        "parent_id": "ef" * 8,
        "name": "chat",
        "kind": "client",
        "start": 5,
        "end": 9,
        "status": "error",
        "message": "it broke",
        "attributes": values,
        "events": ({"name": "e", "time": 7, "attributes": {"k": "ü"}},),
        "scope": "strands",
        "resource": resource,
    }
    assert await store.spans(attempts[0]) == []


async def test_a_span_belongs_to_the_attempt_that_it_or_its_sender_names(
    send: Send, store: SQLiteStore, attempts: Sequence[AttemptId]
) -> None:
    a, b = attempts
    await send(export(span(id_="01" * 8, **{ATTEMPT: a}), span(id_="02" * 8, **{ATTEMPT: b})))
    await send(export(span(id_="03" * 8)), f"/v1/runs/default/attempts/{a}/v1/traces")
    await send(export(span("12" * 16, "04" * 8)), key=mint(b))
    kept = [[each.span_id[:2] for each in await store.spans(attempt)] for attempt in attempts]
    assert kept == [["01", "03"], ["02", "04"]]


async def test_a_span_that_names_nobody_belongs_where_its_trace_does(
    send: Send, store: SQLiteStore, attempts: Sequence[AttemptId]
) -> None:
    a, b = attempts
    await send(export(span(id_="01" * 8, **{ATTEMPT: a}), span(id_="02" * 8)))
    assert await send(export(span(id_="03" * 8))) == (0, "")
    assert len(await store.spans(a)) == 3
    await send(export(span(id_="04" * 8, **{ATTEMPT: b})))
    rejected, why = await send(export(span(id_="05" * 8)))
    assert (rejected, "names no attempt" in why) == (1, True), "the trace is of two by now"


async def test_spans_that_belong_nowhere_are_counted_and_the_others_kept(
    send: Send, store: SQLiteStore, attempts: Sequence[AttemptId]
) -> None:
    a, b = attempts
    spans = [
        span("11" * 16, "01" * 8),
        span("12" * 16, "02" * 8, **{ATTEMPT: "nobody.1"}),
        span("00" * 3, "03" * 8, **{ATTEMPT: a}),
        span("13" * 16, "04" * 8, **{ATTEMPT: a}),
    ]
    rejected, why = await send(export(*spans))
    assert rejected == 3
    for reason in ("names no attempt", "there is no attempt 'nobody.1'", "trace_id"):
        assert reason in why
    assert [each.span_id for each in await store.spans(a)] == ["04" * 8]
    rejected, why = await send(export(span(**{ATTEMPT: b})), key=mint(a))
    assert (rejected, why) == (1, f"this API key does not belong to attempt {b!r}")


async def test_spans_are_taken_late_and_once(
    send: Send, store: SQLiteStore, attempts: Sequence[AttemptId]
) -> None:
    await store.finish(attempts[0], Outcome(reward=1))
    for _ in range(2):
        await send(export(span(**{ATTEMPT: attempts[0]})))
    assert len(await store.spans(attempts[0])) == 1


async def test_runs_have_paths_of_their_own(send: Send, store: SQLiteStore) -> None:
    other = store.for_run("other")
    await begin(store, "a")
    await other.enqueue([Rollout(id="a", task=1, group="g")])
    theirs = await other.claim("w", lease_s=60, wait_s=0)
    assert theirs is not None
    key = mint(theirs.id, "other")
    assert await send(export(span()), "/v1/runs/other/v1/traces", key) == (0, "")
    assert len(await other.spans(theirs.id)) == 1
    assert await store.spans(theirs.id) == []


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("body", "kind", "status", "says"),
    [
        (b"{", Encoding.JSON, 400, "not valid JSON"),
        (b'{"resourceSpans": 5}', Encoding.JSON, 400, "resourceSpans"),
        (b"[" * 100_000, Encoding.JSON, 400, "not valid JSON"),
        (b"\x0a\xff", Encoding.PROTOBUF, 400, "cut off"),
        (b"\x0b", Encoding.PROTOBUF, 400, "wire type 3"),
        (b"\xff" * 20, Encoding.PROTOBUF, 400, "more than 64 bits"),
        (b"", "text/plain", 415, "application/x-protobuf"),
    ],
)
async def test_an_invalid_export_is_refused_in_its_own_encoding(
    url: str, body: bytes, kind: str, status: int, says: str
) -> None:
    async with httpx.AsyncClient(base_url=url, headers=BEARER) as http:
        reply = await http.post("/v1/traces", content=body, headers={"Content-Type": kind})
    assert (reply.status_code, says in reply.text) == (status, True), reply.text


async def test_nobody_sends_traces_without_a_key(url: str, attempts: Sequence[AttemptId]) -> None:
    path = f"/v1/runs/default/attempts/{attempts[0]}/v1/traces"
    async with httpx.AsyncClient(base_url=url) as http:
        for key in ("none", "wrong", mint(attempts[1]), mint(attempts[0], "other")):
            headers = {"Content-Type": Encoding.JSON, "Authorization": f"Bearer {key}"}
            assert (await http.post(path, json={}, headers=headers)).status_code == 401


async def test_an_agent_cannot_occupy_the_store_with_a_huge_export(
    url: str, attempts: Sequence[AttemptId]
) -> None:
    blanks = gzip.compress(b"{" + b" " * 21 * 2**20 + b"}", compresslevel=1)
    headers = {"Content-Type": Encoding.JSON, "Content-Encoding": "gzip"}
    async with httpx.AsyncClient(base_url=url) as http:
        for token, status in ((mint(attempts[0]), 413), (TOKEN, 200)):
            key = {"Authorization": f"Bearer {token}"}
            reply = await http.post("/v1/traces", content=blanks, headers=headers | key)
            assert reply.status_code == status


# ------------------------------------------------------------------ real exporters and SDKs


async def test_the_exporter_of_opentelemetrys_sdk_is_understood(
    url: str, store: SQLiteStore, attempts: Sequence[AttemptId]
) -> None:
    def trace() -> None:
        exporter = OTLPSpanExporter(
            endpoint=f"{url}/v1/traces", headers={"authorization": f"Bearer {mint(attempts[0])}"}
        )
        provider = TracerProvider(resource=Resource({"service.name": "weather"}))
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("an.agent")
        with (
            tracer.start_as_current_span("invoke_agent"),
            tracer.start_as_current_span("chat", kind=SpanKind.CLIENT) as chat,
        ):
            chat.set_attribute("gen_ai.response.id", "chatcmpl-7")
            chat.set_attribute("gen_ai.response.finish_reasons", ["stop"])
            chat.add_event("gen_ai.choice", {"index": 0})
            chat.set_status(StatusCode.OK)
        provider.shutdown()

    await to_thread.run_sync(trace)
    agent, chat = await store.spans(attempts[0])
    assert (agent.name, agent.kind, agent.parent_id) == ("invoke_agent", "internal", None)
    assert (chat.parent_id, chat.kind, chat.status) == (agent.span_id, "client", "ok")
    assert chat.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert [event.name for event in chat.events] == ["gen_ai.choice"]
    assert (chat.scope, chat.resource["service.name"]) == ("an.agent", "weather")
    assert agent.start <= chat.start <= chat.end <= agent.end


@pytest.mark.parametrize("sdk", ["agent-framework", "pydantic-ai", "strands-vllm"])
async def test_what_sdks_were_recorded_to_send_is_kept_as_it_was(
    sdk: str, send: Send, store: SQLiteStore, attempts: Sequence[AttemptId]
) -> None:
    with gzip.open(RECORDED / f"otel-{sdk}.jsonl.gz", "rt") as lines:
        records = [json.loads(line) for line in lines]
    records = [record for record in records if "dur_ms" in record][:60]
    spans = [
        span(each["trace_id"], each["span_id"], **each["attributes"])
        | {"name": each["name"], "kind": each["kind"], "status": {"code": each["status"]}}
        | ({"parentSpanId": each["parent"]} if each["parent"] else {})
        | {
            "events": [
                {"name": event["name"], "attributes": attributes(event["attributes"])}
                for event in each["events"]
            ]
        }
        for each in records
    ]
    path = f"/v1/runs/default/attempts/{attempts[0]}/v1/traces"
    assert await send(export(*spans, resource=records[0]["resource"]), path) == (0, "")
    kept = {each.span_id: each for each in await store.spans(attempts[0])}
    assert len(kept) == len(records)
    for record in records:
        found = kept[record["span_id"]]
        assert (found.name, found.attributes) == (record["name"], record["attributes"])
        assert [event.attributes for event in found.events] == [
            event["attributes"] for event in record["events"]
        ]
    assert any(name.startswith("gen_ai.") for each in kept.values() for name in each.attributes)


# ------------------------------------------------------------------ the decoder


VALUES: st.SearchStrategy[Json] = st.recursive(
    st.one_of(
        st.text().map(lambda text: {"stringValue": text}),
        st.booleans().map(lambda value: {"boolValue": value}),
        st.integers(-(2**63), 2**63 - 1).map(lambda n: {"intValue": str(n)}),
        st.floats(allow_nan=False, allow_infinity=False).map(lambda x: {"doubleValue": x}),
        st.binary().map(lambda raw: {"bytesValue": base64.b64encode(raw).decode()}),
        st.just({}),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda each: {"arrayValue": {"values": each}}),
        st.lists(st.tuples(st.text(), inner), max_size=3).map(
            lambda pairs: {"kvlistValue": {"values": [{"key": k, "value": v} for k, v in pairs]}}
        ),
    ),
    max_leaves=8,
)
NANOSECONDS = st.integers(0, 2**63 - 1)
SPANS = st.builds(
    lambda trace, id_, name, kind, start, values, code: {
        "traceId": trace.hex(),
        "spanId": id_.hex(),
        "name": name,
        "kind": kind,
        "startTimeUnixNano": str(start),
        "endTimeUnixNano": str(start),
        "attributes": [{"key": key, "value": value} for key, value in values],
        "status": {"code": code},
    },
    st.binary(min_size=16, max_size=16),
    st.binary(min_size=8, max_size=8),
    st.text(),
    st.integers(0, 5),
    NANOSECONDS,
    st.lists(st.tuples(st.text(), VALUES), max_size=4),
    st.integers(0, 2),
)


@settings(max_examples=80)
@given(st.lists(SPANS, max_size=4))
def test_both_encodings_are_read_as_the_same(spans: list[Json]) -> None:
    request = export(*spans)
    ours = parse_export(in_protobuf(request), Encoding.PROTOBUF)
    assert ours == parse_export(json.dumps(request).encode(), Encoding.JSON)
    assert len(ours.spans) == len(spans)


@settings(max_examples=80)
@given(st.binary(max_size=200))
def test_whatever_the_bytes_they_are_read_or_refused(body: bytes) -> None:
    for encoding in Encoding:
        with suppress(RequestError):
            parse_export(body, encoding)


def test_messages_inside_each_other_without_end_are_refused() -> None:
    message = b""
    for n in range(400):
        field = b"\x2a" if n % 2 else b"\x0a"
        size = len(message)
        length = bytes([size]) if size < 128 else bytes([size & 0x7F | 0x80, size >> 7])
        message = field + length + message
    with pytest.raises(RequestError, match="deep"):
        read_message("AnyValue", message)


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (write_bytes(1, write_bytes(1, b"\x0a\x00" * MAX_MESSAGES)), Encoding.PROTOBUF),
        (b'{"resourceSpans": [' + b"{}," * MAX_MESSAGES, Encoding.JSON),
    ],
    ids=["protobuf", "json"],
)
def test_a_small_export_of_very_many_messages_is_refused(body: bytes, encoding: Encoding) -> None:
    with pytest.raises(RequestError, match="more than 1,000,000 attributes"):
        parse_export(body, encoding)


def test_of_many_invalid_items_of_an_export_the_first_alone_is_reported() -> None:
    attributes = b'{"scopeSpans": [{"spans": [{"attributes": [1, 2, 3]}, 4]}, 5]}'
    with pytest.raises(RequestError, match=r"resourceSpans\.0\.scopeSpans\.0\.spans\.0") as error:
        parse_export(b'{"resourceSpans": [' + attributes + b", 6]}", Encoding.JSON)
    assert isinstance(error.value.__cause__, ValidationError)
    assert error.value.__cause__.error_count() == 1


def test_the_table_of_fields_is_that_of_opentelemetry() -> None:
    renamed = {"Scope": "InstrumentationScope"}
    known = {}

    def visit(descriptor: Any) -> None:
        if descriptor.name not in known:
            known[descriptor.name] = {f.number: f for f in descriptor.fields}
            for field in descriptor.fields:
                if field.message_type is not None:
                    visit(field.message_type)

    visit(ExportTraceServiceRequest.DESCRIPTOR)
    for name, fields in MESSAGES.items():
        theirs = known[renamed.get(name, name)]
        for number, field in fields.items():
            assert theirs[number].json_name == field.name
