"""Omissions of templates are reported at start-up and marked on the calls."""

import logging
from pathlib import Path

import pytest

from support.gateway.scripted_gateway import CHAT_TOOL, Gateway, Json, NewGateway
from support.models.real_templates import template_of, trl_templates
from whet.gateway.messages import Message, ToolCall, find_omissions
from whet.gateway.templates.renderer import Renderer
from whet.types import Omission

CHAT = "/v1/chat/completions"
HI: Json = {"role": "user", "content": "hi"}
FIRST = (
    "{% for m in messages %}{% if m.role != 'system' or loop.first %}<|im_start|>"
    "{{ m.name or m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = FIRST.replace("or loop.first", "")


@pytest.mark.parametrize(
    ("name", "omissions"),
    [
        ("qwen3_instruct_2507", set[Omission]()),
        ("llama3_1", {Omission.CALL_TEXT}),
        ("gptoss", {Omission.SECOND_CALL}),
        ("gemma4_v5", {Omission.LONE_RESULT}),
    ],
)
def test_what_a_template_leaves_out_is_reported_once_at_start_up(
    name: str, omissions: set[Omission], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        renderer = Renderer(template_of(tmp_path, name, trl_templates()[name]))
    assert set(renderer.report.omissions) == omissions | {Omission.NAME}
    warnings = [r.getMessage() for r in caplog.records if "leaves out parts" in r.getMessage()]
    assert len(warnings) == bool(omissions)
    assert all(omission in warnings[0] for omission in omissions)


def test_system_messages_that_are_moved_are_not_left_out(tmp_path: Path) -> None:
    renderer = Renderer(template_of(tmp_path, "own", FIRST))
    assert renderer.report.omissions == ()
    assert "later ones are shown as the user's" in renderer.report.system


@pytest.mark.parametrize(
    ("messages", "omitted"),
    [
        ([Message("system", "a"), Message("user", "b")], (Omission.SYSTEM,)),
        ([Message("user", "a"), Message("system", "b")], (Omission.LATE_SYSTEM,)),
        ([Message("user", "a")], ()),
    ],
)
def test_system_messages_that_no_rule_can_save_are_marked(
    messages: list[Message], omitted: tuple[Omission, ...], tmp_path: Path
) -> None:
    renderer = Renderer(template_of(tmp_path, "own", NO_SYSTEM))
    assert find_omissions(renderer.omissions, messages, messages) == omitted


def test_only_messages_that_are_rendered_again_are_marked(tmp_path: Path) -> None:
    renderer = Renderer(template_of(tmp_path, "llama3_1", trl_templates()["llama3_1"]))
    call = ToolCall("call_1", "calculator", "{}")
    turn = Message("assistant", "Let me see.", (call,))
    result = Message("tool", "5", tool_call_id="call_1")
    request = [Message("user", "a"), turn, result]
    assert find_omissions(renderer.omissions, request, request) == (Omission.CALL_TEXT,)
    assert find_omissions(renderer.omissions, [result], request) == ()


def test_a_lone_result_and_a_second_call_are_marked(tmp_path: Path) -> None:
    gemma = Renderer(template_of(tmp_path / "gemma", "gemma4_v5", trl_templates()["gemma4_v5"]))
    calls = tuple(ToolCall(f"call_{n}", "calculator", "{}") for n in (1, 2))
    turn = Message("assistant", "", calls)
    result = Message("tool", "5", tool_call_id="call_1")
    assert find_omissions(gemma.omissions, [result], [turn, result]) == ()
    assert find_omissions(gemma.omissions, [result], [result]) == (Omission.LONE_RESULT,)
    gptoss = Renderer(template_of(tmp_path / "oss", "gptoss", trl_templates()["gptoss"]))
    assert find_omissions(gptoss.omissions, [turn], [turn]) == (Omission.SECOND_CALL,)


@pytest.mark.anyio
async def test_a_name_is_shown_where_the_template_shows_it_and_marked_elsewhere(
    gateway: Gateway, new_gateway: NewGateway, tmp_path: Path
) -> None:
    body: Json = {"model": "policy", "messages": [HI | {"name": "critic"}]}
    await gateway.post(CHAT, body | {"tools": [CHAT_TOOL]})
    [call] = await gateway.calls()
    assert call.origin.omitted == (Omission.NAME,)
    showing = await new_gateway("ok", renderer=Renderer(template_of(tmp_path, "own", FIRST)))
    turn = (await showing.post(CHAT, body))["choices"][0]["message"]
    await showing.post(CHAT, body | {"messages": [*body["messages"], turn, HI]})
    named = turn | {"name": "writer"}
    await showing.post(CHAT, body | {"messages": [*body["messages"], named, HI]})
    first, second, third = await showing.calls()
    assert "<|im_start|>critic\nhi" in showing.text(first.prompt_suffix)
    assert (first.origin.omitted, second.origin.omitted) == ((), ())
    assert second.parent == third.parent == first.generation_id(0)
    assert third.origin.omitted == (Omission.NAME,)
