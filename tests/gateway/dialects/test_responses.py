"""Responses on the wire: items, state kept by the server, events."""

from typing import cast

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from support.gateway.scripted_gateway import (
    ARGUMENTS,
    CALLING,
    CHAT_TOOL,
    FLAT_TOOL,
    Gateway,
    Json,
    NewGateway,
)
from whet.training.rows import build_rows
from whet.types import Credit, Fork, Outcome

pytestmark = pytest.mark.anyio

PATH = "/v1/responses"
EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)


def ask(input: object, **more: object) -> Json:
    return {"model": "policy", "input": input, **more}


def outputs(reply: Json, kind: str) -> list[Json]:
    return [item for item in reply["output"] if item["type"] == kind]


async def two_turns(gateway: Gateway, **more: object) -> tuple[Json, Json]:
    """A tool call, and its result sent with `previous_response_id` alone."""
    first = await gateway.post(PATH, ask("what is 2 + 3?", tools=[FLAT_TOOL], **more))
    [made] = outputs(first, "function_call")
    result = {"type": "function_call_output", "call_id": made["call_id"], "output": "5"}
    second = await gateway.post(
        PATH, ask([result], previous_response_id=first["id"], tools=[FLAT_TOOL], **more)
    )
    return first, second


async def test_a_response_is_what_openais_own_model_takes(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(f"let me see\n{CALLING}")
    reply = await gateway.post(
        PATH, ask("hi", instructions="be brief", tools=[FLAT_TOOL], metadata={"a": "b"})
    )
    response = Response.model_validate(reply, strict=True)
    assert response.status == "completed"
    assert response.output_text == "let me see"
    assert response.instructions == "be brief"
    assert response.metadata == {"a": "b"}
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    [made] = outputs(reply, "function_call")
    assert made["arguments"] == ARGUMENTS


async def test_state_kept_here_and_a_full_echo_give_the_same_conversation(
    new_gateway: NewGateway,
) -> None:
    by_id = await new_gateway(f"let me see\n{CALLING}", "it is 5")
    await two_turns(by_id, instructions="be brief")
    by_echo = await new_gateway(f"let me see\n{CALLING}", "it is 5")
    first = await by_echo.post(
        PATH, ask("what is 2 + 3?", tools=[FLAT_TOOL], instructions="be brief")
    )
    result = {"type": "function_call_output", "output": "5"}
    result["call_id"] = outputs(first, "function_call")[0]["call_id"]
    history = [{"role": "user", "content": "what is 2 + 3?"}, *first["output"], result]
    await by_echo.post(PATH, ask(history, tools=[FLAT_TOOL], instructions="be brief"))
    for gateway in (by_id, by_echo):
        one, two = await gateway.calls()
        assert two.parent == one.generation_id(0)
        assert two.origin.fork is None
        assert not two.origin.lossy
    assert by_id.engine.prompts == by_echo.engine.prompts


async def test_items_may_be_named_instead_of_sent(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(f"let me see\n{CALLING}", "it is 5")
    first = await gateway.post(PATH, ask("what is 2 + 3?", tools=[FLAT_TOOL]))
    gateway.restart()
    [message] = outputs(first, "message")
    [made] = outputs(first, "function_call")
    # As Vercel's SDK does: the message by reference, the call in full and re-ordered.
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "what is 2 + 3?"}]},
        {"type": "item_reference", "id": message["id"]},
        {"type": "function_call", "name": "calculator", "call_id": made["call_id"]}
        | {"arguments": '{"expression":"2 + 3"}'},
        {"type": "function_call_output", "call_id": made["call_id"], "output": "5"},
    ]
    await gateway.post(PATH, ask(history, tools=[FLAT_TOOL]))
    one, two = await gateway.calls()
    assert two.parent == one.generation_id(0)
    assert two.origin.fork is None
    missing = [{"type": "item_reference", "id": "msg_000000000000000000000000"}]
    assert (await gateway.send("POST", PATH, ask(missing))).status_code == 404


async def test_state_outlives_the_gateway(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(CALLING, "it is 5", "bye")
    first, second = await two_turns(gateway, instructions="be brief")
    gateway.restart()
    shown = (await gateway.send("GET", f"{PATH}/{second['id']}")).json()
    assert shown == second
    assert (await gateway.send("GET", f"{PATH}/{first['id']}")).json() == first
    await gateway.post(
        PATH,
        ask("thanks", previous_response_id=second["id"], tools=[FLAT_TOOL])
        | {"instructions": "be brief"},
    )
    _, two, three = await gateway.calls()
    assert three.parent == two.generation_id(0)


async def test_instructions_are_not_inherited(new_gateway: NewGateway) -> None:
    gateway = await new_gateway()
    first = await gateway.post(PATH, ask("hi", instructions="be brief"))
    await gateway.post(PATH, ask("and?", previous_response_id=first["id"]))
    await gateway.post(PATH, ask("and?", previous_response_id=first["id"], instructions="be long"))
    _, without, other = await gateway.calls()
    assert without.parent is None
    assert [m["role"] for m in without.messages] == ["user", "assistant", "user"]
    assert [m["role"] for m in other.messages] == ["system", "user", "assistant", "user"]
    assert other.messages[0]["content"] == "be long"
    assert other.origin.fork is Fork.EDITED_HISTORY


async def test_what_is_not_stored_or_was_deleted_is_not_found(gateway: Gateway) -> None:
    kept = await gateway.post(PATH, ask("hi"))
    secret = await gateway.post(PATH, ask("hi", store=False))
    gone = await gateway.send("DELETE", f"{PATH}/{kept['id']}")
    assert gone.json() == {"id": kept["id"], "object": "response", "deleted": True}
    assert (await gateway.send("DELETE", f"{PATH}/{kept['id']}")).status_code == 404
    *_, deletion = await gateway.calls()
    for _ in range(2):
        for id in (kept["id"], secret["id"], f"resp_{deletion.id}", "resp_0", "chatcmpl-1"):
            assert (await gateway.send("GET", f"{PATH}/{id}")).status_code == 404
            again = await gateway.send("POST", PATH, ask("hi", previous_response_id=id))
            assert again.status_code == 404
            assert id in again.json()["error"]["message"]
        gateway.restart()


async def test_what_a_deleted_response_sampled_is_trained_all_the_same(gateway: Gateway) -> None:
    reply = await gateway.post(PATH, ask("hi"))
    await gateway.send("DELETE", f"{PATH}/{reply['id']}")
    await gateway.store.finish(gateway.attempt.id, Outcome(reward=1.0))
    [trajectory] = await gateway.store.trajectories([gateway.attempt.rollout.id])
    call, deletion = trajectory.calls
    assert deletion.generations == ()
    [row] = build_rows([Credit(trajectory, {call.generation_id(0): 1.0})]).rows
    assert row.tokens == (*call.prompt_suffix, *call.generations[0].tokens)
    late = await gateway.send("DELETE", f"{PATH}/{reply['id']}")
    assert late.status_code in (404, 409)


async def test_a_response_is_its_attempts_own(new_gateway: NewGateway) -> None:
    gateway, other = await new_gateway(), await new_gateway()
    reply = await gateway.post(PATH, ask("hi"))
    assert (await other.send("GET", f"{PATH}/{reply['id']}")).status_code == 404


async def test_input_items_can_be_listed(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(CALLING, "it is 5")
    _, second = await two_turns(gateway, instructions="be brief")
    page = (await gateway.send("GET", f"{PATH}/{second['id']}/input_items?order=asc")).json()
    kinds = [item["type"] for item in page["data"]]
    assert kinds == ["message", "function_call", "function_call_output"]
    assert page["data"][0]["content"] == [{"type": "input_text", "text": "what is 2 + 3?"}]
    back = (await gateway.send("GET", f"{PATH}/{second['id']}/input_items")).json()
    assert back["data"] == page["data"][::-1]


async def test_events_come_in_openais_order_with_their_numbers(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(f"let me see\n{CALLING}")
    events = await gateway.events(PATH, ask("hi", tools=[FLAT_TOOL]))
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    order = [kind for at, kind in enumerate(kinds) if kinds[:at].count(kind) == 0]
    assert order == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.completed",
    ]
    texts = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(texts) == "let me see"
    final = events[-1]["response"]
    assert final == (await gateway.send("GET", f"{PATH}/{final['id']}")).json()


async def test_an_answer_cut_short_is_incomplete(gateway: Gateway) -> None:
    whole = await gateway.post(PATH, ask("hi", max_output_tokens=2))
    events = await gateway.events(PATH, ask("hi", max_output_tokens=2))
    for response in (whole, events[-1]["response"]):
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"
    assert events[-1]["type"] == "response.incomplete"


async def test_logprobs_come_if_they_are_included(gateway: Gateway) -> None:
    more = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = await gateway.post(PATH, ask("hi", **more))
    events = await gateway.events(PATH, ask("hi", **more))
    [call, _] = await gateway.calls()
    logprobs = whole["output"][0]["content"][0]["logprobs"]
    assert len(logprobs) == len(call.generations[0].tokens)
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == logprobs


async def test_the_same_tools_render_alike_in_every_format(gateway: Gateway) -> None:
    user = [{"role": "user", "content": "hi"}]
    await gateway.post(PATH, ask("hi", tools=[FLAT_TOOL]))
    chat = {"model": "policy", "messages": user, "tools": [CHAT_TOOL]}
    await gateway.post("/v1/chat/completions", chat)
    claude = {
        "name": "calculator",
        "description": "Evaluate an expression.",
        "input_schema": cast(Json, CHAT_TOOL["function"])["parameters"],
    }
    body = {"model": "policy", "max_tokens": 9, "messages": user, "tools": [claude]}
    await gateway.post("/v1/messages", body)
    one, two, three = await gateway.calls()
    assert one.prompt_suffix == two.prompt_suffix == three.prompt_suffix
    assert one.root == two.root == three.root


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True),
        ("conversation", "conv_1"),
        ("prompt", {"id": "pmpt_1"}),
        ("truncation", "auto"),
        ("context_management", [{"type": "compaction"}]),
        ("tools", [{"type": "custom", "name": "apply_patch"}]),
        ("tools", [{"type": "file_search", "vector_store_ids": []}]),
        ("tools", [{"type": "mcp", "server_label": "x"}]),
        ("tool_choice", {"type": "allowed_tools", "mode": "auto", "tools": []}),
        ("text", {"format": {"type": "grammar"}}),
        ("input", []),
        ("input", ""),
        ("input", [{"type": "computer_call"}]),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}]),
        ("input", [{"role": "critic", "content": "x"}]),
        ("input", [{"type": "function_call", "name": "x"}]),
        ("input", [7]),
        ("moderation", {"model": "x"}),
    ],
)
async def test_what_we_cannot_honor_is_refused_by_name(
    gateway: Gateway, field: str, value: object
) -> None:
    response = await gateway.send("POST", PATH, ask("hi") | {field: value})
    assert response.status_code == 400
    assert field in response.json()["error"]["message"]


async def test_bookkeeping_and_hints_are_taken(gateway: Gateway) -> None:
    fields = {
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"effort": "none"},
        "text": {"verbosity": "low"},
        "user": "u",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "max_tool_calls": 3,
        "truncation": "disabled",
        "background": False,
        "tools": [],
    }
    reply = await gateway.post(PATH, ask("hi", **fields))
    Response.model_validate(reply, strict=True)
