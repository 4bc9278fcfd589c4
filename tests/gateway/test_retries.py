"""The same request again: a retry is answered with what was sampled, another sample is not."""

from typing import Any

import anyio
import pytest
from anyio.abc import TaskGroup

from support.gateway.asgi_client import BODY, PATH, Client, until
from support.gateway.scripted_gateway import FAILS, Gateway, Json, NewGateway

pytestmark = pytest.mark.anyio

RETRY: Any = {"x_stainless_retry_count": "1"}


def start(tasks: TaskGroup, gateway: Gateway, body: Json = BODY, **headers: str) -> Client:
    client = Client(gateway, body, **headers)
    tasks.start_soon(client.run)
    return client


async def test_a_marked_retry_is_answered_with_the_recorded_call(gateway: Gateway) -> None:
    first = await gateway.post(PATH, BODY)
    again = await gateway.post(PATH, BODY, **RETRY)
    assert again == first
    assert len(await gateway.calls()) == 1


async def test_a_marked_retry_after_a_restart_is_answered_so_too_and_in_a_stream(
    gateway: Gateway,
) -> None:
    first = await gateway.post(PATH, BODY)
    gateway.restart()
    assert await gateway.post(PATH, BODY, **RETRY) == first
    wanted = BODY | {"stream": True, "return_token_ids": True}
    streams: list[list[int]] = []
    for headers in ({}, RETRY):
        events = await gateway.events(PATH, wanted, **headers)
        choices = [choice for event in events for choice in event["choices"]]
        streams.append([id for choice in choices for id in choice.get("token_ids", [])])
        gateway.restart()
    [one, two] = await gateway.calls()
    assert streams == [[*two.generations[0].tokens]] * 2
    assert len(gateway.engine.prompts) == 2
    assert one.id != two.id


async def test_a_retry_of_a_request_never_seen_is_sampled(gateway: Gateway) -> None:
    await gateway.post(PATH, BODY, **RETRY)
    assert len(await gateway.calls()) == 1


async def test_a_retry_waits_for_the_first_while_it_runs(gateway: Gateway) -> None:
    gateway.engine.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        first = start(tasks, gateway)
        await until(lambda: gateway.engine.active == 1)
        second = start(tasks, gateway, **RETRY)
        await anyio.wait_all_tasks_blocked()
        assert gateway.engine.active == 1
        gateway.engine.gate.set()
        await first.done.wait()
        await second.done.wait()
        assert first.sent[1]["body"] == second.sent[1]["body"]
    assert len(await gateway.calls()) == 1


async def test_equal_requests_at_once_are_samples_of_their_own(gateway: Gateway) -> None:
    gateway.engine.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        clients = [start(tasks, gateway) for _ in range(3)]
        await until(lambda: gateway.engine.active == 3)
        gateway.engine.gate.set()
        for client in clients:
            await client.done.wait()
    assert len(await gateway.calls()) == 3
    await gateway.post(PATH, BODY)
    assert len(await gateway.calls()) == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_vanishes_ends_the_sampling_and_leaves_no_record(
    gateway: Gateway, stream: bool
) -> None:
    gateway.engine.gate = anyio.Event()
    async with anyio.create_task_group() as tasks:
        client = start(tasks, gateway, BODY | {"stream": stream})
        await until(lambda: gateway.engine.active == 1)
        if stream:
            await client.headed.wait()
        client.gone.set()
        await client.done.wait()
        assert gateway.engine.active == 0
    assert await gateway.calls() == []
    gateway.engine.gate = None
    await gateway.post(PATH, BODY | {"stream": False}, **RETRY)
    assert len(await gateway.calls()) == 1


async def test_a_reply_that_was_lost_answers_the_next_equal_request_once(
    gateway: Gateway,
) -> None:
    client = Client(gateway, BODY)

    async def leave() -> None:
        # The client goes while the call is being written: sampled, recorded, not delivered.
        client.gone.set()
        await anyio.wait_all_tasks_blocked()

    gateway.store.before_append = leave
    await client.run()
    gateway.store.before_append = None
    assert client.sent == []
    assert len(await gateway.calls()) == 1
    again = await gateway.post(PATH, BODY)
    [call] = await gateway.calls()
    assert again["id"] == f"chatcmpl-{call.id}"
    await gateway.post(PATH, BODY)
    assert len(await gateway.calls()) == 2


async def test_a_failed_request_can_be_tried_again_and_takes_no_others_answer(
    new_gateway: NewGateway,
) -> None:
    gateway = await new_gateway("first", FAILS, "second")
    first = await gateway.post(PATH, BODY)
    failed = await gateway.send("POST", PATH, BODY)
    assert failed.status_code == 503
    assert failed.headers["retry-after"] == "1"
    second = await gateway.post(PATH, BODY, **RETRY)
    assert second["id"] != first["id"]
    assert len(await gateway.calls()) == 2


async def test_an_error_in_a_stream_that_has_begun_is_an_event(gateway: Gateway) -> None:
    gateway.engine.breaks = FAILS
    paths: dict[str, Json] = {
        "/v1/chat/completions": BODY,
        "/v1/completions": {"model": "policy", "prompt": "a"},
        "/v1/responses": {"model": "policy", "input": "a"},
        "/v1/messages": {"max_tokens": 9, **BODY},
    }
    for path, body in paths.items():
        response = await gateway.send("POST", path, body | {"stream": True})
        assert response.status_code == 200
        assert "the device is on fire" in response.text
    assert await gateway.calls() == []
