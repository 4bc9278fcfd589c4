"""Whatever is sent: a clear refusal, never a failure of ours, and nothing half recorded."""

import json
import random
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from typing import Any, cast

import anyio
import httpx
import pytest
from anyio import to_thread
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from support.gateway.scripted_gateway import (
    CALLING,
    CHAT_TOOL,
    CLAUDE_TOOL,
    FLAT_TOOL,
    Gateway,
    Json,
    NewGateway,
)
from whet.errors import NotFound, RequestError
from whet.gateway import http
from whet.gateway.app import DIALECTS
from whet.gateway.dialects.anthropic import AnthropicRequest
from whet.gateway.dialects.chat import ChatRequest
from whet.gateway.dialects.responses import ResponsesRequest
from whet.gateway.dialects.tokenize import DetokenizeRequest, TokenizeRequest
from whet.gateway.dialects.wire import Wire
from whet.gateway.graph import Graph
from whet.io.server import AppServer

pytestmark = pytest.mark.anyio

CALL = {"id": "c1", "type": "function"}
CALL["function"] = cast(Any, {"name": "calculator", "arguments": '{"expression": "2"}'})
BODIES: dict[str, Json] = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
        ],
        "tools": [CHAT_TOOL],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.9,
        "n": 1,
        "stop": ["x"],
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "max_tokens": 9,
        "metadata": {"a": "b"},
        "response_format": {"type": "text"},
        "parallel_tool_calls": False,
        "return_token_ids": True,
    },
    "/v1/completions": {
        "model": "policy",
        "prompt": [1, 2, 3],
        "max_tokens": 5,
        "logprobs": 1,
        "stop": "x",
        "echo": False,
        "return_token_ids": True,
    },
    "/v1/responses": {
        "model": "policy",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": []},
            {"type": "message", "role": "assistant", "id": "msg_1", "content": "so"},
            {"type": "function_call", "call_id": "c1", "name": "calculator", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "2"},
        ],
        "instructions": "be brief",
        "tools": [FLAT_TOOL],
        "tool_choice": "auto",
        "include": ["message.output_text.logprobs"],
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
        "store": True,
        "stream": True,
        "temperature": 1.0,
    },
    "/v1/messages": {
        "model": "policy",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "be brief"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "c1", "name": "calculator", "input": {"a": [1]}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": "2", "is_error": True}
                ],
            },
        ],
        "tools": [CLAUDE_TOOL],
        "tool_choice": {"type": "auto"},
        "stop_sequences": ["x"],
        "thinking": {"type": "enabled", "budget_tokens": 9},
        "stream": True,
    },
    "/tokenize": {"messages": [{"role": "user", "content": "hi"}], "tools": [CHAT_TOOL]},
    "/detokenize": {"tokens": [1, 2, 3]},
}
BODIES["/v1/messages/count_tokens"] = {
    name: BODIES["/v1/messages"][name] for name in ("model", "messages", "system", "tools")
}


def error_of(response: httpx.Response) -> str:
    return cast(str, response.json()["error"]["message"])


@pytest.mark.parametrize("path", BODIES)
async def test_the_bodies_that_are_broken_below_are_good(gateway: Gateway, path: str) -> None:
    response = await gateway.send("POST", path, BODIES[path])
    assert response.status_code == 200, response.text


DEEP = b'{"model":"policy","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BROKEN = {
    "nothing": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "null": b"null",
    "trailing": b'{"model":"policy"} x',
    "invalid UTF-8": b'{"model":"policy","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "a lone surrogate": b'{"model":"policy","messages":[{"role":"user","content":"\\ud800"}]}',
    "deep nesting": DEEP,
    "NaN": b'{"model":"policy","temperature":NaN,"messages":[{"role":"user","content":"a"}]}',
    "infinity": b'{"model":"policy","metadata":{"a":1e999},"messages":[]}',
    "a huge number": b'{"model":"policy","seed":' + b"9" * 5000 + b',"messages":[]}',
    "NUL": b"\x00\x00\x00",
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("broken", BROKEN)
async def test_a_body_that_is_no_request_is_refused(
    gateway: Gateway, path: str, broken: str
) -> None:
    response = await gateway.send("POST", path, BROKEN[broken])
    assert response.status_code == 400
    assert error_of(response)
    assert await gateway.calls() == []


@pytest.mark.parametrize("number", ["1e999", "-1E+0400", "1" * 250 + "e99", "1" * 400 + ".5"])
async def test_a_number_that_no_float_holds_is_refused(gateway: Gateway, number: str) -> None:
    messages = '[{"role":"user","content":"a"}]'
    body = f'{{"model":"policy","metadata":{{"a":{number}}},"messages":{messages}}}'
    response = await gateway.send("POST", "/v1/chat/completions", body.encode())
    assert response.status_code == 400
    assert "a number is too large" in error_of(response)


async def test_the_body_may_be_large_but_not_larger_than_the_limit(gateway: Gateway) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "a b " * 3 * 2**20}]}
    response = await gateway.send("POST", "/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    huge = b" " * (http.MAX_BODY_BYTES + 1)
    assert (await gateway.send("POST", "/v1/chat/completions", huge)).status_code == 413

    async def chunks() -> AsyncGenerator[bytes]:
        for _ in range(http.MAX_BODY_BYTES // 2**20 + 1):
            yield b" " * 2**20

    headers = {"authorization": f"Bearer {gateway.key}"}
    endless = await gateway.client.post("/v1/messages", content=chunks(), headers=headers)
    assert endless.status_code == 413
    assert endless.json()["error"]["type"] == "request_too_large"


@pytest.mark.parametrize(
    ("path", "tool"),
    [
        ("/v1/chat/completions", CHAT_TOOL),
        ("/v1/responses", FLAT_TOOL),
        ("/v1/messages", CLAUDE_TOOL),
    ],
)
async def test_too_many_tools_are_refused(gateway: Gateway, path: str, tool: Json) -> None:
    response = await gateway.send("POST", path, BODIES[path] | {"tools": [tool] * 20_000})
    assert response.status_code == 400
    assert "tools" in error_of(response)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "critic", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages.0.content.0"),
        ({"messages": []}, "messages"),
        ({"model": 7}, "model"),
        ({"n": "3"}, "n"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"stop": [7]}, "stop"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"unknown_field": 1}, "unknown_field"),
    ],
)
async def test_a_wrong_type_is_named(gateway: Gateway, change: Json, named: str) -> None:
    good: Json = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
    response = await gateway.send("POST", "/v1/chat/completions", good | change)
    assert response.status_code == 400
    assert named in error_of(response)


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (ChatRequest, "messages"),
        (ChatRequest, "tools"),
        (AnthropicRequest, "messages"),
        (AnthropicRequest, "tools"),
        (ResponsesRequest, "tools"),
        (ResponsesRequest, "include"),
        (TokenizeRequest, "messages"),
        (DetokenizeRequest, "tokens"),
    ],
)
def test_of_a_list_of_invalid_items_the_first_alone_is_reported(
    kind: type[Wire], field: str
) -> None:
    with pytest.raises(ValidationError) as error:
        kind.model_validate({"model": "policy", "max_tokens": 1, field: [None] * 9})
    found = [each["loc"] for each in error.value.errors() if each["loc"][0] == field]
    assert found == [(field, 0)]


async def test_arguments_no_template_could_print_are_taken_as_they_are(gateway: Gateway) -> None:
    for arguments in ('{"a": NaN}', '{"a": "\\ud800"}', "[" * 900, "{}", "7", "", "\x00"):
        call = {"id": "c", "type": "function"}
        function = {"name": "calculator", "arguments": arguments}
        turn = {"role": "assistant", "tool_calls": [call | {"function": function}]}
        messages = [{"role": "user", "content": "a"}, turn, {"role": "user", "content": "b"}]
        body = {"model": "policy", "messages": messages}
        response = await gateway.send("POST", "/v1/chat/completions", body)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("value", ["NaN", '"\\ud800"', "1e999", "[" * 900 + "]" * 900])
async def test_odd_values_the_model_samples_are_shown_in_every_format(
    new_gateway: NewGateway, value: str
) -> None:
    call = CALLING.replace('"2 + 3"', value)
    gateway = await new_gateway(call)
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
        for stream in (False, True):
            body = BODIES[path] | {"stream": stream}
            body.pop("max_tokens", None)
            body.pop("return_token_ids", None)
            body |= {"max_tokens": 4000} if path == "/v1/messages" else {}
            response = await gateway.send("POST", path, body)
            assert response.status_code == 200, response.text


# ------------------------------------------------------------------- slow and vanishing clients


@pytest.fixture
def served(gateway: Gateway) -> Generator[str]:
    server = AppServer(gateway.app)
    yield server.url
    server.close()


async def test_a_body_that_never_ends_is_given_up(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.05)

    async def drip() -> AsyncGenerator[bytes]:
        yield b"{"
        await anyio.sleep_forever()

    headers = {"authorization": f"Bearer {gateway.key}"}
    response = await gateway.client.post("/v1/messages", content=drip(), headers=headers)
    assert response.status_code == 408
    assert response.json()["error"]["type"] == "timeout_error"


async def test_clients_that_break_off_leave_the_server_well(gateway: Gateway, served: str) -> None:
    host, port = served.removeprefix("http://").split(":")
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {gateway.key}\r\n"
    ).encode()
    body = json.dumps(BODIES["/v1/chat/completions"]).encode()
    for sent in (
        head,
        head + b"content-length: 100\r\n\r\n{",
        head + b"content-length: nonsense\r\n\r\n{",
        head + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        head + f"content-length: {len(body)}\r\n\r\n".encode() + body[:50],
        b"\x00\xff" * 100,
    ):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(sent)
    async with httpx.AsyncClient(base_url=served, timeout=10) as client:
        headers = {"authorization": f"Bearer {gateway.key}"}
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
    assert await gateway.calls() == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_a_served_gateway_ends_its_sampling(
    gateway: Gateway, served: str, stream: bool
) -> None:
    gateway.engine.gate = anyio.Event()
    headers = {"authorization": f"Bearer {gateway.key}"}
    body = BODIES["/v1/chat/completions"] | {"stream": stream}
    async with httpx.AsyncClient(base_url=served, timeout=10) as client:
        if stream:
            request = client.stream("POST", "/v1/chat/completions", json=body, headers=headers)
            async with request as response:
                assert await anext(response.aiter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/v1/chat/completions", json=body, headers=headers, timeout=0.2)
    assert await to_thread.run_sync(gateway.engine.left.wait, 10)
    assert gateway.engine.active == 0
    assert await gateway.calls() == []


# ------------------------------------------------------------------- fuzzing

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 0.5, -0.0, 1e308, "", "a", " ", "\x00"),
    *("auto", "required", "function", "text", "é" * 9, "<|im_end|>", "<tool_call>", "{", "[1]"),
    *([], [[]], [None], {}, {"type": "text"}, {"type": "function"}, {"role": "user"}, {"a": {}}),
    *("resp_000000000000000000000000", "msg_1", "json_schema", "user", "assistant", "tool"),
]


ODD_TEXTS = [json.dumps(value) for value in ODD]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for key, below in cast(Json, value).items():
            found += places(below, (*path, key))
    if isinstance(value, list):
        for index, below in enumerate(cast(list[Any], value)):
            found += places(below, (*path, index))
    return found


SOURCES = {path: (json.dumps(body), places(body)) for path, body in BODIES.items()}


def mutated(path: str, dice: random.Random) -> Json:
    """A valid body with a few of its parts replaced, dropped, doubled or renamed."""
    text, spots = SOURCES[path]
    body: Json = json.loads(text)
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        *above, last = dice.choice(spots)
        parent: Any = body
        try:
            for step in above:
                parent = parent[step]
            old = parent[last]
        except (LookupError, TypeError):
            continue  # an earlier change has taken this place away
        if not isinstance(parent, (dict, list)):
            continue
        match dice.randrange(5):
            case 0:
                del parent[last]
            case 1 if isinstance(parent, list):
                cast(list[Any], parent).append(old)
            case 2 if isinstance(parent, dict):
                parent[dice.choice(("type", "content", "id", "x", "text", "name"))] = old
            case _:
                parent[last] = json.loads(dice.choice(ODD_TEXTS))
    return body


@pytest.mark.parametrize("cases", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
async def test_no_mutated_body_is_more_than_refused_by_its_dialect(cases: int) -> None:
    dice = random.Random(cases)
    graph = Graph()
    taken = 0
    for case in range(cases):
        dialect = DIALECTS[case % len(DIALECTS)]
        body = json.dumps(mutated(f"/v1{dialect.path}", dice)).encode()
        if case % 10 == 0:
            at = dice.randrange(len(body))
            body = body[:at] + bytes([dice.randrange(256)]) + body[at + 1 :]
        with suppress(RequestError, NotFound):
            dialect.parse(body).to_model_request(graph)
            taken += 1
    assert cases / 10 < taken < cases


@settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)
@given(path=st.sampled_from(list(BODIES)), seed=st.integers(0, 2**32))
async def test_no_mutated_body_makes_the_gateway_fail(
    gateway: Gateway, path: str, seed: int
) -> None:
    body = mutated(path, random.Random(seed))
    response = await gateway.send("POST", path, body)
    assert response.status_code in (200, 400, 404), (body, response.text)
    if response.status_code != 200:
        assert error_of(response)


@settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    database=None,
)
@given(path=st.sampled_from(list(BODIES)), body=st.binary(max_size=200))
async def test_no_bytes_make_the_gateway_fail(gateway: Gateway, path: str, body: bytes) -> None:
    response = await gateway.send("POST", path, body)
    assert response.status_code == 400
