"""Anthropic Messages on the wire."""

import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from support.gateway.scripted_gateway import (
    CALLING,
    CLAUDE_TOOL,
    TWO_CALLS,
    Gateway,
    Json,
    NewGateway,
)

pytestmark = pytest.mark.anyio

PATH = "/v1/messages"
HI: Json = {"role": "user", "content": "hi"}
EVENT: TypeAdapter[RawMessageStreamEvent] = TypeAdapter(RawMessageStreamEvent)


def ask(*messages: Json, **more: object) -> Json:
    return {"model": "claude-stub", "max_tokens": 100, "messages": [*messages] or [HI], **more}


def blocks(reply: Json, kind: str) -> list[Json]:
    return [block for block in reply["content"] if block["type"] == kind]


async def test_a_message_is_what_anthropics_own_model_takes(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(f"let me see\n{CALLING}")
    reply = await gateway.post(PATH, ask(system="be brief", tools=[CLAUDE_TOOL]))
    message = Message.model_validate(reply, strict=True)
    assert message.stop_reason == "tool_use"
    assert blocks(reply, "text")[0]["text"] == "let me see"
    assert blocks(reply, "tool_use")[0]["input"] == {"expression": "2 + 3"}
    [call] = await gateway.calls()
    assert message.usage.input_tokens == call.prompt_length
    assert message.usage.output_tokens == len(call.generations[0].tokens)
    assert call.messages[0] == {"role": "system", "content": "be brief"}


async def test_a_tool_loop_continues_from_its_sampled_tokens(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(f"let me see\n{CALLING}", "it is 5")
    first = await gateway.post(PATH, ask(HI, tools=[CLAUDE_TOOL]))
    [used] = blocks(first, "tool_use")
    turn = {"role": "assistant", "content": first["content"]}
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": "5"}
    await gateway.post(
        PATH, ask(HI, turn, {"role": "user", "content": [result]}, tools=[CLAUDE_TOOL])
    )
    one, two = await gateway.calls()
    assert two.parent == one.generation_id(0)
    assert two.origin.fork is None
    assert not two.origin.lossy


async def test_results_are_messages_of_their_own_and_text_after_them_the_users(
    new_gateway: NewGateway,
) -> None:
    gateway = await new_gateway(TWO_CALLS, "both are 5")
    first = await gateway.post(PATH, ask(HI, tools=[CLAUDE_TOOL]))
    one, two = blocks(first, "tool_use")
    content = [
        {"type": "tool_result", "tool_use_id": one["id"], "content": "5", "is_error": False},
        {"type": "tool_result", "tool_use_id": two["id"], "is_error": True}
        | {"content": [{"type": "text", "text": "too hard"}]},
        {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
    ]
    turn = {"role": "assistant", "content": first["content"]}
    await gateway.post(
        PATH, ask(HI, turn, {"role": "user", "content": content}, tools=[CLAUDE_TOOL])
    )
    [_, call] = await gateway.calls()
    assert [m["role"] for m in call.messages] == ["tool", "tool", "user"]
    assert [m["content"] for m in call.messages] == ["5", "Error: too hard", "go on"]


async def test_a_system_prompt_is_shown_without_claude_codes_billing_line(
    gateway: Gateway,
) -> None:
    texts = ["x-anthropic-billing-header: cc_version=1; cch=abc", "be brief", "be kind"]
    await gateway.post(PATH, ask(system=[{"type": "text", "text": text} for text in texts]))
    await gateway.post(PATH, ask(system="\n".join(texts)))  # as proxies send it
    blocks, text = await gateway.calls()
    assert blocks.messages[0]["content"] == text.messages[0]["content"] == "be brief\nbe kind"


async def test_thinking_comes_back_with_its_signature(gateway: Gateway) -> None:
    turn = {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "whet-1"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "so", "citations": None},
        ],
    }
    await gateway.post(PATH, ask(HI, turn, HI))
    [call] = await gateway.calls()
    assert call.messages[1] == {"role": "assistant", "content": "so", "reasoning": "hm"}


async def test_events_come_in_anthropics_order(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(f"let me see\n{CALLING}")
    events = await gateway.events(PATH, ask(tools=[CLAUDE_TOOL]))
    for event in events:
        EVENT.validate_python(event)
    kinds = [event["type"] for event in events]
    assert [k for at, k in enumerate(kinds) if kinds[at - 1] != k or at == 0] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [(e["index"], e["content_block"]["type"]) for e in starts] == [
        (0, "text"),
        (1, "tool_use"),
    ]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["output_tokens"] > 0


async def test_stop_reasons(new_gateway: NewGateway) -> None:
    gateway = await new_gateway()
    assert (await gateway.post(PATH, ask()))["stop_reason"] == "end_turn"
    assert (await gateway.post(PATH, ask(max_tokens=1)))["stop_reason"] == "max_tokens"
    gateway.engine.script[0] = gateway.renderer.template.encode("one END")
    reply = await gateway.post(PATH, ask(stop_sequences=["END"]))
    assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "END")
    assert reply["content"][0]["text"] == "one "


async def test_counting_tokens_counts_what_would_be_served(gateway: Gateway) -> None:
    first = await gateway.post(PATH, ask(HI))
    turn = {"role": "assistant", "content": first["content"]}
    more = {"model": "claude-stub", "messages": [HI, turn, HI]}
    counted = await gateway.post(f"{PATH}/count_tokens", more)
    assert len(await gateway.calls()) == 1
    await gateway.post(PATH, ask(HI, turn, HI))
    [_, call] = await gateway.calls()
    assert counted == {"input_tokens": call.prompt_length}


async def test_threads_are_refused_in_the_way_the_client_recovers_from(gateway: Gateway) -> None:
    response = await gateway.send("POST", PATH, ask(thread={"type": "create"}))
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


async def test_a_doubled_version_in_the_path_is_understood(gateway: Gateway) -> None:
    await gateway.post("/v1/v1/messages", ask())
    await gateway.post("/messages", ask(), anthropic_version="1999-01-01", x_api_key="sk-ant-other")


async def test_tool_calls_may_be_forbidden_or_kept_to_one(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(TWO_CALLS)
    none = await gateway.post(PATH, ask(tools=[CLAUDE_TOOL], tool_choice={"type": "none"}))
    assert blocks(none, "tool_use") == []
    one = await gateway.post(
        PATH,
        ask(tools=[CLAUDE_TOOL])
        | {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
    )
    assert len(blocks(one, "tool_use")) == 1


async def test_a_forced_tool_is_a_grammar(gateway: Gateway) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "calculator"}):
        await gateway.post(PATH, ask(tools=[CLAUDE_TOOL], tool_choice=choice))
    assert all(sampling.grammar for sampling in gateway.engine.samplings)
    missing = ask(tools=[CLAUDE_TOOL], tool_choice={"type": "tool", "name": "other"})
    assert (await gateway.send("POST", PATH, missing)).status_code == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", None),
        ("max_tokens", 0),
        ("messages", []),
        ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "document", "source": {}}]}]),
        ("messages", [{"role": "user", "content": [{"type": "tool_use", "id": "x"}]}]),
        ("messages", [{"role": "user", "content": [{"type": "tool_result"}]}]),
        ("messages", [{"role": "critic", "content": "x"}]),
        ("messages", [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]),
        ("tools", [{"type": "bash_20250124", "name": "bash"}]),
        ("context_management", {"edits": [{"type": "clear_tool_uses_20250919"}]}),
        ("container", "x"),
        ("mcp_servers", []),
        ("system", [{"type": "image"}]),
        ("thinking", {"type": "sometimes"}),
    ],
)
async def test_what_we_cannot_honor_is_refused_by_name(
    gateway: Gateway, field: str, value: object
) -> None:
    response = await gateway.send("POST", PATH, ask() | {field: value})
    assert response.status_code == 400
    assert response.json()["type"] == "error"
    assert field in response.json()["error"]["message"]
    assert await gateway.calls() == []


async def test_bookkeeping_is_taken(gateway: Gateway) -> None:
    fields = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "cache_control": {"type": "ephemeral"},
        "temperature": 0.5,
        "top_k": 5,
        "top_p": 0.9,
    }
    await gateway.post(PATH, ask(**fields))
    [sampling] = gateway.engine.samplings
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 5, 0.9)
