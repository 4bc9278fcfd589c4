"""Thinking in every format: shown, streamed, sent back and recognized."""

import pytest
from anthropic.types import Message
from openai.types.responses import Response

from support.gateway.scripted_gateway import (
    CALLING,
    CHAT_TOOL,
    CLAUDE_TOOL,
    FLAT_TOOL,
    Gateway,
    Json,
    NewGateway,
)
from whet.gateway.templates.renderer import Renderer

pytestmark = pytest.mark.anyio

HI: Json = {"role": "user", "content": "hi"}
ANSWER = f"<think>\nhm, a sum\n</think>\n\nlet me see\n{CALLING}"
THOUGHT = "hm, a sum"


@pytest.fixture
async def gateway(new_gateway: NewGateway, thinking_renderer: Renderer) -> Gateway:
    return await new_gateway(ANSWER, renderer=thinking_renderer)


async def check_continued(gateway: Gateway, *, lossy: bool) -> None:
    one, two = (await gateway.calls())[-2:]
    assert two.parent == one.generation_id(0)
    assert two.origin.lossy is lossy


async def test_chat_gives_it_under_both_names_and_does_without_it(gateway: Gateway) -> None:
    body: Json = {"model": "policy", "messages": [HI], "tools": [CHAT_TOOL]}
    reply = await gateway.post("/v1/chat/completions", body)
    message = reply["choices"][0]["message"]
    assert message["reasoning"].strip() == message["reasoning_content"].strip() == THOUGHT
    assert message["content"].strip() == "let me see"
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "5"}
    await gateway.post("/v1/chat/completions", body | {"messages": [HI, message, result]})
    await check_continued(gateway, lossy=False)
    bare = {name: message[name] for name in ("role", "content", "tool_calls")}
    await gateway.post("/v1/chat/completions", body | {"messages": [HI, bare, result]})
    calls = await gateway.calls()
    assert calls[2].parent == calls[0].generation_id(0)
    assert calls[2].origin.lossy


async def test_chat_streams_it_apart_from_the_text(gateway: Gateway) -> None:
    body: Json = {"model": "policy", "messages": [HI], "tools": [CHAT_TOOL]}
    events = await gateway.events("/v1/chat/completions", body)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(d.get("reasoning", "") for d in deltas).strip() == THOUGHT
    assert "".join(d.get("content", "") for d in deltas).strip() == "let me see"


async def test_responses_give_it_as_an_item_that_may_come_back(gateway: Gateway) -> None:
    body: Json = {"model": "policy", "input": "hi", "tools": [FLAT_TOOL]}
    reply = await gateway.post("/v1/responses", body)
    assert [item["type"] for item in reply["output"]] == ["reasoning", "message", "function_call"]
    assert reply["output"][0]["content"][0]["text"].strip() == THOUGHT
    assert reply["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    Response.model_validate(reply, strict=True)
    result = {"type": "function_call_output", "output": "5"}
    result["call_id"] = reply["output"][2]["call_id"]
    history = [HI, *reply["output"], result]
    await gateway.post("/v1/responses", body | {"input": history})
    await check_continued(gateway, lossy=False)
    by_reference = [{"type": "item_reference", "id": item["id"]} for item in reply["output"]]
    await gateway.post("/v1/responses", body | {"input": [HI, *by_reference, result]})
    one, _, three = await gateway.calls()
    assert three.parent == one.generation_id(0)
    assert not three.origin.lossy


async def test_responses_stream_it_as_its_own_item(gateway: Gateway) -> None:
    body: Json = {"model": "policy", "input": "hi", "tools": [FLAT_TOOL]}
    events = await gateway.events("/v1/responses", body)
    added = [e["item"]["type"] for e in events if e["type"] == "response.output_item.added"]
    assert added == ["reasoning", "message", "function_call"]
    thought = [e["delta"] for e in events if e["type"] == "response.reasoning_text.delta"]
    assert "".join(thought).strip() == THOUGHT
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    assert final == (await gateway.send("GET", f"/v1/responses/{final['id']}")).json()


async def test_messages_give_it_as_a_signed_block_that_may_come_back(gateway: Gateway) -> None:
    body: Json = {"model": "policy", "max_tokens": 99, "messages": [HI], "tools": [CLAUDE_TOOL]}
    reply = await gateway.post("/v1/messages", body)
    Message.model_validate(reply, strict=True)
    thinking, text, used = reply["content"]
    assert thinking["thinking"].strip() == THOUGHT
    assert thinking["signature"]
    assert text["text"].strip() == "let me see"
    result = {"type": "tool_result", "tool_use_id": used["id"], "content": "5"}
    turns = [HI, {"role": "assistant", "content": reply["content"]}]
    messages = [*turns, {"role": "user", "content": [result]}]
    await gateway.post("/v1/messages", body | {"messages": messages})
    await check_continued(gateway, lossy=False)


async def test_messages_stream_it_and_hide_it_when_it_is_not_wanted(gateway: Gateway) -> None:
    body: Json = {"model": "policy", "max_tokens": 99, "messages": [HI], "tools": [CLAUDE_TOOL]}
    events = await gateway.events("/v1/messages", body)
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use"]
    deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas).strip() == THOUGHT
    assert [d["type"] for d in deltas].count("signature_delta") == 1
    hidden = body | {"thinking": {"type": "disabled"}}
    events = await gateway.events("/v1/messages", hidden)
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["text", "tool_use"]
    omitted = body | {"thinking": {"type": "adaptive", "display": "omitted"}}
    reply = await gateway.post("/v1/messages", omitted)
    assert reply["content"][0]["thinking"] == ""


async def test_a_raw_completion_shows_the_marks(gateway: Gateway) -> None:
    body: Json = {"model": "policy", "prompt": "a", "max_tokens": 99}
    reply = await gateway.post("/v1/completions", body)
    assert reply["choices"][0]["text"].startswith("<think>")
