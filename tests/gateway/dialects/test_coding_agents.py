"""Fields of Claude Code and Codex beyond those of a plain request."""

import logging

import pytest

from support.gateway.scripted_gateway import (
    CALLING,
    CHAT_TOOL,
    CLAUDE_TOOL,
    CONTEXT,
    FLAT_TOOL,
    Gateway,
    Json,
    NewGateway,
)
from whet.engines.request import compute_remaining_context
from whet.errors import PromptTooLong
from whet.gateway.dialects.wire import omit_tool
from whet.gateway.messages import OMITTED_IMAGE
from whet.runners.executors.external_agents import build_environment
from whet.types import Endpoint, Fork

pytestmark = pytest.mark.anyio

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
HI: Json = {"role": "user", "content": "hi"}


async def test_fields_that_change_no_prompt_are_accepted(gateway: Gateway) -> None:
    body: Json = {"model": "policy", "messages": [HI], "max_tokens": 9}
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    reply = await gateway.post(MESSAGES, body | {"context_management": keep})
    assert "citations" not in reply["content"][0]
    ids = {"session_id": "s", "turn_id": "t"}
    await gateway.post(RESPONSES, {"model": "policy", "input": "hi", "client_metadata": ids})


async def test_tools_of_a_provider_are_left_out_with_one_warning(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    omit_tool.cache_clear()
    hosted = {"type": "web_search", "external_web_access": False}
    group = {"type": "namespace", "name": "multi_agent", "tools": []}
    body: Json = {"model": "policy", "input": "hi", "tools": [hosted, FLAT_TOOL, group]}
    with caplog.at_level(logging.WARNING):
        reply = await gateway.post(RESPONSES, body)
        await gateway.post(RESPONSES, body)
    assert [tool["name"] for tool in reply["tools"]] == ["calculator"]
    assert caplog.text.count("'web_search'") == caplog.text.count("'namespace'") == 1
    search = {"type": "web_search_20250305", "name": "web_search"}
    tools = {"tools": [CLAUDE_TOOL, search]}
    await gateway.post(MESSAGES, {"model": "policy", "messages": [HI], "max_tokens": 9} | tools)
    for call in await gateway.calls():
        assert call.origin.tools == ("calculator",)


async def test_an_image_in_a_tool_result_is_named_in_the_prompt(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(CALLING, "a dog")
    body: Json = {"model": "policy", "messages": [HI], "tools": [CHAT_TOOL]}
    turn = (await gateway.post(CHAT, body))["choices"][0]["message"]
    id = turn["tool_calls"][0]["id"]
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}
    result = {"role": "tool", "tool_call_id": id, "content": [image]}
    await gateway.post(CHAT, body | {"messages": [HI, turn, result]})
    assert OMITTED_IMAGE in gateway.text(gateway.engine.prompts[-1])
    assert (await gateway.calls())[-1].origin.lossy
    refused = await gateway.send("POST", CHAT, body | {"messages": [HI | {"content": [image]}]})
    assert refused.status_code == 400
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    use = {"type": "tool_use", "id": id, "name": "calculator", "input": {"expression": "2 + 3"}}
    answer = {"type": "tool_result", "tool_use_id": id, "content": [block]}
    dialogue = [HI, {"role": "assistant", "content": [use]}, {"role": "user", "content": [answer]}]
    claude: Json = {"model": "policy", "max_tokens": 9, "tools": [CLAUDE_TOOL]}
    await gateway.post(MESSAGES, claude | {"messages": dialogue})
    output = {"type": "function_call_output", "call_id": id, "output": [{"type": "input_image"}]}
    made = {"type": "function_call", "call_id": id, "name": "calculator", "arguments": "{}"}
    codex: Json = {"model": "policy", "input": [HI, made, output], "tools": [FLAT_TOOL]}
    await gateway.post(RESPONSES, codex)
    assert all(OMITTED_IMAGE in gateway.text(p) for p in gateway.engine.prompts[1:])


@pytest.mark.parametrize(("precise", "fork"), [(False, None), (True, Fork.EDITED_HISTORY)])
async def test_arguments_that_a_client_fills_in_are_no_edit_if_they_are_defaults(
    new_gateway: NewGateway, precise: bool, fork: Fork | None
) -> None:
    gateway = await new_gateway(CALLING, "five")
    properties = {"expression": {"type": "string"}, "precise": {"default": False}}
    tool = CLAUDE_TOOL | {"input_schema": {"type": "object", "properties": properties}}
    body: Json = {"model": "policy", "max_tokens": 99, "tools": [tool]}
    [use] = (await gateway.post(MESSAGES, body | {"messages": [HI]}))["content"]
    echo = use | {"input": {"precise": precise, **use["input"]}}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "5"}
    turns = [{"role": "assistant", "content": [echo]}, {"role": "user", "content": [result]}]
    await gateway.post(MESSAGES, body | {"messages": [HI, *turns]})
    first, second = await gateway.calls()
    assert second.origin.fork == fork
    assert (second.parent == first.generation_id(0)) == (fork is None)


async def test_a_full_context_is_reported_in_the_words_that_clients_look_for(
    new_gateway: NewGateway,
) -> None:
    with pytest.raises(PromptTooLong) as caught:
        compute_remaining_context([1] * CONTEXT, CONTEXT)
    gateway = await new_gateway(caught.value)
    body: Json = {"model": "policy", "messages": [HI], "max_tokens": 9}
    openai = (await gateway.send("POST", CHAT, body)).json()["error"]
    assert openai["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens")
    assert openai["code"] == "context_length_exceeded"
    claude = (await gateway.send("POST", MESSAGES, body)).json()["error"]
    assert claude["message"] == f"prompt is too long: {CONTEXT} tokens > {CONTEXT} maximum"


def test_helper_models_of_claude_code_have_the_served_name() -> None:
    url = "http://gateway/rollout/r/attempt/r.1/v1"
    variables = build_environment(
        Endpoint(base_url=url, api_key="k", model="policy"), posts_rewards=False
    )
    helpers = [name for name in variables if name.startswith("ANTHROPIC_DEFAULT_")]
    assert len(helpers) == 3
    assert {variables[name] for name in (*helpers, "ANTHROPIC_SMALL_FAST_MODEL")} == {"policy"}
