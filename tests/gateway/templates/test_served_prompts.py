"""The served prompt is what the model's template writes for the request, up to sampled turns."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from support.gateway.prompt_fuzz import PromptFuzz, make_fuzz
from support.gateway.scripted_gateway import CALLING, CHAT_TOOL, Gateway, Json, NewGateway
from support.models.real_templates import all_templates, template_of, trl_templates
from whet.gateway.templates.renderer import Renderer
from whet.types import Call, Fork

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
ASK: Json = {"role": "user", "content": "What is 2 + 3?"}
MORE: Json = {"role": "user", "content": "And 4 + 4?"}
FRENCH: Json = {"role": "system", "content": "From now on answer in French."}
HISTORY: list[Json] = [
    ASK,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I need the calculator.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "calculator", "arguments": '{"expression": "2 + 3"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "5"},
]
SWITCHED_BY_SYSTEM_TEXT = (
    "{% set quiet = messages[0].role == 'system' and '/no_think' in messages[0].content %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if quiet %}<think>\n\n</think>\n{% endif %}{% endif %}"
)
"""As SmolLM3's template: a word in the system message switches thinking off."""

Named = Callable[[str], Renderer]


@pytest.fixture
def named(tmp_path: Path) -> Named:
    sources = {**trl_templates(), "switched": SWITCHED_BY_SYSTEM_TEXT}
    return lambda name: Renderer(template_of(tmp_path / name, name, sources[name]))


async def talk(gateway: Gateway, *requests: Sequence[Json], **more: Any) -> list[str]:
    """Send requests that each add to the conversation; returns the prompts that were served."""
    messages: list[Json] = []
    for added in requests:
        messages += added
        reply = await gateway.post(PATH, {"model": "policy", "messages": messages, **more})
        messages.append(reply["choices"][0]["message"])
    return [gateway.text(prompt) for prompt in gateway.engine.prompts]


def forks(calls: Sequence[Call]) -> list[Fork | None]:
    return [call.origin.fork for call in calls]


async def test_a_late_system_message_is_in_the_prompt(
    new_gateway: NewGateway, named: Named
) -> None:
    gateway = await new_gateway("Hello.", renderer=named("cohere2"))
    for first in ([ASK], [{"role": "system", "content": "Be brief."}, ASK]):
        prompts = await talk(gateway, first, [FRENCH, MORE])
        assert "French" in prompts[-1]


@pytest.mark.parametrize("name", ["qwen3_5_think", "gptoss", "qwen3_vl", "deepseek_r1_distill"])
async def test_system_messages_that_the_template_would_lose_are_shown(
    name: str, new_gateway: NewGateway, named: Named
) -> None:
    """As Claude Code and Codex send them: two at the beginning, others later."""
    renderer = named(name)
    assert renderer.report.system != "as sent"
    gateway = await new_gateway("5", renderer=renderer)
    brief: Json = {"role": "system", "content": "Be brief."}
    polite: Json = {"role": "system", "content": "Be polite."}
    for first in ([brief, polite, ASK], [brief, ASK, polite]):
        prompts = await talk(gateway, first, [FRENCH, MORE])
        for text in ("Be brief.", "Be polite.", "French"):
            assert prompts[-1].count(text) == 1


async def test_a_word_in_the_system_message_counts_in_every_turn(
    new_gateway: NewGateway, named: Named
) -> None:
    gateway = await new_gateway("5", renderer=named("switched"))
    quiet: Json = {"role": "system", "content": "Be brief. /no_think"}
    prompts = await talk(gateway, [quiet, ASK], [MORE], [ASK])
    assert all(prompt.endswith("<think>\n\n</think>\n") for prompt in prompts)
    assert set(forks(await gateway.calls())) == {None, Fork.THINKING_DROPPED}


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "lfm2_2_5"])
async def test_thinking_in_a_history_of_the_client_is_dropped_as_the_template_does(
    name: str, new_gateway: NewGateway, named: Named
) -> None:
    gateway = await new_gateway("5", renderer=named(name))
    prompts = await talk(gateway, HISTORY, [MORE], tools=[CHAT_TOOL])
    assert "I need the calculator." in prompts[0]
    assert "I need the calculator." not in prompts[1]
    assert forks(await gateway.calls()) == [None, Fork.THINKING_DROPPED]


async def test_a_default_header_that_a_late_system_message_removes_is_a_fork(
    new_gateway: NewGateway, named: Named
) -> None:
    gateway = await new_gateway(" to=user<|message|>5", renderer=named("muse_glimmer"))
    await talk(gateway, [ASK], [FRENCH, MORE])
    assert forks(await gateway.calls()) == [None, Fork.TEMPLATE]


async def test_a_prompt_that_the_template_no_longer_writes_is_not_continued(
    new_gateway: NewGateway, named: Named
) -> None:
    """After a restart with another template, of which only the beginning is another."""
    gateway = await new_gateway("5", renderer=named("switched"))
    await talk(gateway, [ASK])
    gateway.renderer = named("qwen2_5")
    gateway.restart()
    [call] = await gateway.calls()
    echo = call.generations[0].message
    await gateway.post(PATH, {"model": "policy", "messages": [ASK, echo, MORE]})
    assert forks(await gateway.calls()) == [None, Fork.TEMPLATE]


NINE = (
    "{{ tools | tojson if tools }}{% for m in messages %}{% if m.role == 'tool' %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}={{ m.content }}[/TOOL_RESULTS]{% elif m.tool_calls %}"
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}</s>{% elif m.role == 'assistant' %}"
    "{{ m.content }}</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
CALLED = '[TOOL_CALLS]calculator[CALL_ID]aB3dE5fG7[ARGS]{"expression": "2 + 3"}'


async def test_results_carry_the_id_of_the_model_also_after_forks_and_restarts(
    new_gateway: NewGateway, tmp_path: Path
) -> None:
    renderer = Renderer(template_of(tmp_path, "mistral", NINE))
    gateway = await new_gateway(CALLED, "It is 5.", renderer=renderer)
    body: Json = {"model": "policy", "messages": [ASK], "tools": [CHAT_TOOL]}
    turn = (await gateway.post(PATH, body))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "5"}
    assert turn["tool_calls"][0]["id"].startswith("call_")
    for first in (ASK, MORE):  # continued, and as a new conversation
        gateway.restart()
        await gateway.post(PATH, body | {"messages": [first, turn, result]})
        prompt = gateway.text(gateway.engine.prompts[-1])
        assert "[TOOL_RESULTS]aB3dE5fG7=5[/TOOL_RESULTS]" in prompt
        assert "[CALL_ID]aB3dE5fG7" in prompt


async def test_an_edited_tool_name_is_an_edited_history(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(CALLING, "It is 5.")
    body: Json = {"model": "policy", "messages": [ASK], "tools": [CHAT_TOOL]}
    turn = (await gateway.post(PATH, body))["choices"][0]["message"]
    call = turn["tool_calls"][0]
    call["function"]["name"] = "repaired"
    result = {"role": "tool", "tool_call_id": call["id"], "content": "5"}
    await gateway.post(PATH, body | {"messages": [ASK, turn, result]})
    assert forks(await gateway.calls()) == [None, Fork.EDITED_HISTORY]
    assert "repaired" in gateway.text(gateway.engine.prompts[-1])


async def test_white_space_that_an_agent_strips_is_no_edit(new_gateway: NewGateway) -> None:
    gateway = await new_gateway("\n It is 5.\n\n")
    await gateway.post(PATH, {"model": "policy", "messages": [ASK]})
    echo = {"role": "assistant", "content": "It is 5."}
    await gateway.post(PATH, {"model": "policy", "messages": [ASK, echo, MORE]})
    first, second = await gateway.calls()
    assert second.parent == first.generation_id(0)
    assert second.origin.lossy


async def test_the_time_in_a_prompt_is_that_of_its_conversation(
    new_gateway: NewGateway, tmp_path: Path
) -> None:
    source = "{{ strftime_now('%H:%M:%S.%f') }}" + SWITCHED_BY_SYSTEM_TEXT
    gateway = await new_gateway("5", renderer=Renderer(template_of(tmp_path, "own", source)))
    first, second = await talk(gateway, [ASK], [MORE])
    assert second.startswith(first)
    gateway.restart()
    third = (await talk(gateway, [ASK]))[-1]
    assert not third.startswith(first[:15])


def check(fuzz: PromptFuzz, continuations: int) -> None:
    logging.disable(logging.WARNING)
    anyio.run(fuzz.run, continuations)
    logging.disable(logging.NOTSET)
    assert not fuzz.differences, fuzz.differences[0]


@pytest.mark.parametrize("name", ["qwen3", "cohere2", "gemma4_v5", "muse_glimmer", "lfm2"])
def test_random_dialogues_are_served_as_apply_chat_template_writes_them(
    name: str, tmp_path: Path
) -> None:
    check(make_fuzz(tmp_path, name, trl_templates()[name], seed=1), 40)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(all_templates()))
def test_many_random_dialogues_are_served_as_apply_chat_template_writes_them(
    name: str, tmp_path: Path
) -> None:
    check(make_fuzz(tmp_path, name, all_templates()[name], seed=2), 115)
