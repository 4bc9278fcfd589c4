"""How the events of a stream leave: at once, together, and never after the record they wait for."""

import anyio
import pytest
from anyio.abc import TaskGroup
from asgi_client import BODY, PATH, Client, until

from conftest import Gateway, Json, NewGateway, read_events
from whet.gateway import asgi
from whet.gateway import events as sent_events

pytestmark = pytest.mark.anyio

STREAM = BODY | {"stream": True, "return_token_ids": True}


def said(client: Client) -> str:
    return b"".join(m.get("body", b"") for m in client.sent).decode()


def tokens(client: Client) -> list[list[int]]:
    choices = [c for event in read_events(said(client)) for c in event["choices"]]
    return [choice["token_ids"] for choice in choices if "token_ids" in choice]


def start(tasks: TaskGroup, gateway: Gateway, body: Json = STREAM) -> Client:
    client = Client(gateway, body)
    tasks.start_soon(client.run)
    return client


async def test_the_first_token_leaves_at_once_and_those_sampled_together_leave_together(
    new_gateway: NewGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent_events, "WINDOW_S", 600.0)
    gateway = await new_gateway("a longer answer of several words")
    client = Client(gateway, STREAM)
    await client.run()
    [call] = await gateway.calls()
    [generation] = call.generations
    first, rest = tokens(client)
    assert (*first, *rest) == generation.tokens
    assert len(first) <= 2  # what was sampled before the event loop came to write
    # The start, the first token, and all the rest with the end: three messages in all.
    assert len(client.sent) == 3


async def test_no_token_waits_longer_than_the_window(new_gateway: NewGateway) -> None:
    gateway = await new_gateway("a longer answer of several words")
    gateway.engine.gate = anyio.Event()  # before the last token
    async with anyio.create_task_group() as tasks:
        client = start(tasks, gateway)
        ids = [*gateway.engine.script[0]]
        await until(lambda: sum(map(len, tokens(client))) == len(ids) - 1)
        assert await gateway.calls() == []
        gateway.engine.gate.set()
    assert [id for some in tokens(client) for id in some] == ids


async def run_with_a_slow_record(gateway: Gateway) -> Client:
    """The record waits until every token has left, and the end has not."""
    seen: list[bool] = []
    client = Client(gateway, STREAM)

    async def look() -> None:
        await until(lambda: sum(map(len, tokens(client))) == len(gateway.engine.script[0]))
        seen.append("[DONE]" in said(client))

    gateway.store.before_append = look
    await client.run()
    assert seen == [False]
    assert said(client).endswith("data: [DONE]\n\n")
    return client


async def test_tokens_leave_while_the_record_is_slow_but_the_end_waits(
    gateway: Gateway,
) -> None:
    client = await run_with_a_slow_record(gateway)
    # What left before the record and what left with it are the recorded message, nothing twice.
    [call] = await gateway.calls()
    deltas = [c["delta"] for event in read_events(said(client)) for c in event["choices"]]
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == call.generations[0].message["content"]


async def test_a_stream_that_is_whole_at_once_leaves_in_one_go(gateway: Gateway) -> None:
    gateway.engine.at_once = True
    client = Client(gateway, STREAM)
    await client.run()
    head, body = client.sent
    assert (b"content-type", b"text/event-stream") in head["headers"]
    assert (b"content-length", str(len(body["body"])).encode()) in head["headers"]
    assert said(client).endswith("data: [DONE]\n\n")
    [call] = await gateway.calls()
    assert [id for some in tokens(client) for id in some] == [*call.generations[0].tokens]


async def test_a_stream_that_is_whole_at_once_waits_a_while_for_its_record(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent_events, "RECORD_S", 600.0)
    gateway.engine.at_once = True

    async def outlast_patience() -> None:
        await anyio.sleep(3 * asgi.PATIENCE_S)

    gateway.store.before_append = outlast_patience
    client = Client(gateway, STREAM)
    await client.run()
    assert len(client.sent) == 2
    assert said(client).endswith("data: [DONE]\n\n")


async def test_a_stream_that_is_whole_at_once_does_not_wait_long_for_its_record(
    gateway: Gateway,
) -> None:
    gateway.engine.at_once = True
    client = await run_with_a_slow_record(gateway)
    [call] = await gateway.calls()
    assert [id for some in tokens(client) for id in some] == [*call.generations[0].tokens]


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 1}, {"n": 2}])
async def test_it_reads_the_same_however_the_engine_hands_it_over(
    new_gateway: NewGateway, more: Json
) -> None:
    texts: list[list[str]] = []
    for at_once in (False, True):
        gateway = await new_gateway("one answer", "and another one")
        gateway.engine.at_once = at_once
        events = await gateway.events(PATH, BODY | {"stream": True} | more)
        choices = [choice for event in events for choice in event["choices"]]
        assert choices[0]["delta"]["role"] == "assistant"
        of = [[c for c in choices if c["index"] == index] for index in range(more.get("n", 1))]
        assert [parts[-1]["finish_reason"] for parts in of] == ["stop"] * len(of)
        texts.append(["".join(c["delta"].get("content", "") for c in parts) for parts in of])
    assert texts[0] == texts[1]


async def test_every_choice_is_whole_when_pieces_are_joined(
    new_gateway: NewGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent_events, "WINDOW_S", 600.0)
    gateway = await new_gateway("one answer", "and another one")
    wanted = {"n": 2, "logprobs": True, "top_logprobs": 2}
    events = await gateway.events(PATH, BODY | {"return_token_ids": True} | wanted)
    [call] = await gateway.calls()
    for index, generation in enumerate(call.generations):
        parts = [c for e in events for c in e["choices"] if c["index"] == index]
        ids = [id for part in parts for id in part.get("token_ids", [])]
        text = "".join(part["delta"].get("content", "") for part in parts)
        logprobs = [
            p for part in parts if part.get("logprobs") for p in part["logprobs"]["content"]
        ]
        assert tuple(ids) == generation.tokens
        assert text == generation.message["content"]
        assert [len(entry["top_logprobs"]) for entry in logprobs] == [2] * len(ids)


async def test_a_stream_without_tokens_says_that_it_is_there(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent_events, "KEEP_ALIVE_S", 0.01)
    gateway.engine.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        client = start(tasks, gateway)
        await until(lambda: said(client).count(": keep-alive\n\n") > 1)
        gateway.engine.gate.set()
    assert said(client).endswith("data: [DONE]\n\n")


async def test_what_no_error_foresaw_is_a_500_in_json(gateway: Gateway) -> None:
    gateway.engine.breaks = ZeroDivisionError("of the engine's own making")
    response = await gateway.send("POST", PATH, BODY)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "ZeroDivisionError" not in response.text


async def test_paths_are_found_with_and_without_a_version_and_a_last_slash(
    gateway: Gateway,
) -> None:
    for path in ("/v1/v1/models", "/v1/models", "/models", "/v1/models/", "/v1/models/policy"):
        assert (await gateway.send("GET", path)).status_code == 200, path
    assert (await gateway.send("POST", "/v1/chat/completions/", BODY)).status_code == 200
    for method, path in (("GET", "/v1"), ("GET", PATH), ("POST", "/v1/models"), ("GET", "/v2/x")):
        response = await gateway.send(method, path)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"
