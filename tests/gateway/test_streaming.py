"""Streams: every chunk is sent as it is sampled, the last event once the call is recorded."""

from collections.abc import Sequence

import anyio
import pytest
from anyio.abc import TaskGroup

from support.gateway.asgi_client import BODY, PATH, Client, until
from support.gateway.scripted_gateway import Gateway, Json, NewGateway, read_events
from whet.gateway import streaming

pytestmark = pytest.mark.anyio

STREAM = BODY | {"stream": True, "return_token_ids": True}


def body_text(client: Client) -> str:
    return b"".join(m.get("body", b"") for m in client.sent).decode()


def tokens(client: Client) -> list[list[int]]:
    choices = [c for event in read_events(body_text(client)) for c in event["choices"]]
    return [choice["token_ids"] for choice in choices if "token_ids" in choice]


def scripted_ids(gateway: Gateway) -> Sequence[int]:
    answer = gateway.engine.script[0]
    assert not isinstance(answer, Exception)
    return answer


def start(tasks: TaskGroup, gateway: Gateway, body: Json = STREAM) -> Client:
    client = Client(gateway, body)
    tasks.start_soon(client.run)
    return client


async def test_each_chunk_is_sent_at_once(new_gateway: NewGateway) -> None:
    gateway = await new_gateway("a longer answer of several words")
    gateway.engine.gate = anyio.Event()  # before the last token
    ids = scripted_ids(gateway)
    async with anyio.create_task_group() as tasks:
        client = start(tasks, gateway)
        await until(lambda: len(tokens(client)) == len(ids) - 1)
        assert await gateway.calls() == []
        gateway.engine.gate.set()
        await client.done.wait()
        assert tokens(client) == [[id] for id in ids]


@pytest.mark.parametrize("at_once", [False, True])
async def test_tokens_leave_while_the_record_is_slow_but_the_last_chunk_waits(
    gateway: Gateway, at_once: bool
) -> None:
    gateway.engine.at_once = at_once
    seen: list[int] = []
    client = Client(gateway, STREAM)

    async def look() -> None:
        seen.append(sum(map(len, tokens(client))))
        assert "[DONE]" not in body_text(client)

    gateway.store.before_append = look
    await client.run()
    assert seen == [0 if at_once else len(scripted_ids(gateway)) - 1]
    assert body_text(client).endswith("data: [DONE]\n\n")
    # What was sent before the record and after it is the recorded message, nothing twice.
    [call] = await gateway.calls()
    deltas = [c["delta"] for event in read_events(body_text(client)) for c in event["choices"]]
    text = "".join(delta.get("content", "") for delta in deltas)
    assert text == call.generations[0].message["content"]
    assert [id for some in tokens(client) for id in some] == [*call.generations[0].tokens]


async def test_a_choice_that_has_ended_does_not_wait_for_the_others(gateway: Gateway) -> None:
    gateway.engine.next = anyio.Event()
    ids = scripted_ids(gateway)
    with anyio.fail_after(5):
        async with anyio.create_task_group() as tasks:
            client = start(tasks, gateway, {**STREAM, "n": 2})
            await until(lambda: sum(map(len, tokens(client))) == len(ids))
            gateway.engine.next.set()
            await client.done.wait()
            assert sum(map(len, tokens(client))) == 2 * len(ids)


@pytest.mark.parametrize("more", [{}, {"logprobs": True, "top_logprobs": 1}, {"n": 2}])
async def test_the_text_is_the_same_for_any_size_of_chunks(
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


async def test_every_choice_is_sent_whole(new_gateway: NewGateway) -> None:
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


async def test_a_silent_stream_is_kept_alive(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_S", 0.01)
    gateway.engine.gate = anyio.Event()
    gateway.engine.at_once = True  # before the first token
    async with anyio.create_task_group() as tasks:
        client = start(tasks, gateway)
        await until(lambda: body_text(client).count(": keep-alive\n\n") > 1)
        gateway.engine.gate.set()
        await client.done.wait()
        assert read_events(body_text(client))[0]["prompt_token_ids"], (
            "the first event is sent first"
        )
        assert body_text(client).endswith("data: [DONE]\n\n")
