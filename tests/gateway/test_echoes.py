"""Turns that agents send back: with text of their own, or one of two that read the same."""

import pytest

from support.gateway.scripted_gateway import CHAT_TOOL, Gateway, Json, NewGateway
from whet.gateway.templates.renderer import Renderer
from whet.training.rows import build_rows
from whet.types import Credit, Fork, Outcome

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
STOPS = ["Observation:", "Calling tools:", "</code>"]
THOUGHT = "Thought: I add.\n<code>\nprint(2 + 3)\n"
ADDED = "</code>\nCalling tools:\n[{'id': 'call_1', 'type': 'function'}]"
TASK: Json = {"role": "user", "content": "What is 2 + 3?"}
OBSERVED: Json = {"role": "user", "content": "Observation:\n5"}


def say(content: str) -> Json:
    return {"role": "assistant", "content": [{"type": "text", "text": content}]}


async def ask(gateway: Gateway, *messages: Json) -> str:
    body: Json = {"model": "policy", "messages": list(messages), "stop": STOPS}
    return (await gateway.post(CHAT, body))["choices"][0]["message"]["content"]


@pytest.mark.parametrize("restarts", [False, True])
async def test_text_appended_to_a_turn_that_a_stop_string_ended_is_context_in_the_same_row(
    restarts: bool, new_gateway: NewGateway, renderer: Renderer
) -> None:
    """CodeAgent of smolagents sends the code's closing tag, then the call as text."""
    sampled = renderer.template.encode(THOUGHT + "</code>")
    gateway = await new_gateway(sampled, sampled, "It is 5.")
    dialogue = [TASK]
    for _ in range(2):
        content = await ask(gateway, *dialogue)
        assert content == THOUGHT
        dialogue += [say(content.strip() + "\n" + ADDED), OBSERVED]
        if restarts:
            gateway.restart()
    await ask(gateway, *dialogue)
    expected = await gateway.post("/v1/tokenize", {"model": "policy", "messages": dialogue})
    assert gateway.text(gateway.engine.prompts[-1]) == gateway.text(expected["tokens"])
    calls = await gateway.calls()
    assert [call.origin.fork for call in calls] == [None] * 3
    assert not any(call.origin.lossy for call in calls)
    await gateway.store.finish(gateway.attempt.id, Outcome(reward=1.0))
    [trajectory] = await gateway.store.trajectories([gateway.attempt.rollout.id])
    rows = build_rows([Credit.even(trajectory, 1.0)])
    [row] = rows.rows
    assert len(row.segments) == 3
    assert not rows.unproven


async def test_text_appended_to_a_turn_that_was_ended_is_an_edit(
    new_gateway: NewGateway,
) -> None:
    gateway = await new_gateway("It is five.", "yes")
    content = await ask(gateway, TASK)
    await ask(gateway, TASK, say(content + ADDED), OBSERVED)
    assert [call.origin.fork for call in await gateway.calls()] == [None, Fork.EDITED_HISTORY]


async def test_text_appended_to_a_truncated_turn_is_context(
    new_gateway: NewGateway, renderer: Renderer
) -> None:
    gateway = await new_gateway(renderer.template.encode("It is fi"), "yes")
    content = await ask(gateway, TASK)
    await ask(gateway, TASK, say(content + "ve, I guess."), OBSERVED)
    first, second = await gateway.calls()
    assert second.parent == first.generation_id(0)
    assert gateway.text(second.prompt_suffix).startswith("ve, I guess.<|im_end|>")


async def test_a_token_beyond_the_stop_string_forks(
    new_gateway: NewGateway, renderer: Renderer
) -> None:
    gateway = await new_gateway(renderer.template.encode(THOUGHT + "</code> and more"), "yes")
    content = await ask(gateway, TASK)
    await ask(gateway, TASK, say(content.strip() + "\n" + ADDED), OBSERVED)
    assert [call.origin.fork for call in await gateway.calls()] == [None, Fork.EDITED_HISTORY]


async def check_first_is_continued(gateway: Gateway) -> None:
    first, second, third = await gateway.calls()
    assert second.parent is None
    assert third.parent == first.generation_id(0)


@pytest.mark.parametrize("names", ["previous_response_id", "item ids"])
async def test_of_two_responses_that_read_the_same_the_named_one_is_continued(
    new_gateway: NewGateway, names: str
) -> None:
    gateway = await new_gateway("five", "five", "yes")
    body: Json = {"model": "policy", "input": "hi"}
    first, _ = [await gateway.post("/v1/responses", body) for _ in range(2)]
    sure = {"role": "user", "content": "sure?"}
    if names == "item ids":
        body |= {"input": [{"role": "user", "content": "hi"}, *first["output"], sure]}
    else:
        body |= {"input": [sure], "previous_response_id": first["id"]}
    await gateway.post("/v1/responses", body)
    await check_first_is_continued(gateway)


async def test_of_two_messages_that_read_the_same_the_one_that_was_signed_is_continued(
    new_gateway: NewGateway, thinking_renderer: Renderer
) -> None:
    thoughts = ("<think>\none\n</think>\n\nfive", "<think>\ntwo\n</think>\n\nfive", "yes")
    gateway = await new_gateway(*thoughts, renderer=thinking_renderer)
    hi: Json = {"role": "user", "content": "hi"}
    body: Json = {"model": "policy", "max_tokens": 99, "messages": [hi]}
    body |= {"thinking": {"type": "adaptive", "display": "omitted"}}
    first, _ = [await gateway.post("/v1/messages", body) for _ in range(2)]
    turn = {"role": "assistant", "content": first["content"]}
    await gateway.post("/v1/messages", body | {"messages": [hi, turn, hi]})
    await check_first_is_continued(gateway)


@pytest.mark.parametrize("tries", [("five", "five\n"), ("five\n", "five")])
async def test_of_two_turns_that_differ_in_white_space_the_one_sent_back_unchanged_is_continued(
    new_gateway: NewGateway, tries: tuple[str, str]
) -> None:
    gateway = await new_gateway(*tries, "yes")
    for _ in tries:
        await ask(gateway, TASK)
    await ask(gateway, TASK, say(tries[0]), OBSERVED)
    await check_first_is_continued(gateway)


@pytest.mark.parametrize(
    ("echoed", "is_edited"),
    [
        ('{"n": [1, true]}', False),
        ('{"n":[1.0,true]}', False),  # JavaScript writes no other number for 1.0
        ('{"n": [true, true]}', True),
        ('{"n": [1, 1]}', True),
    ],
)
async def test_a_call_whose_argument_became_true_instead_of_1_is_an_edit(
    new_gateway: NewGateway, echoed: str, is_edited: bool
) -> None:
    written = '<tool_call>\n{"name": "calculator", "arguments": {"n": [1, true]}}\n</tool_call>'
    gateway = await new_gateway(written, "yes")
    body: Json = {"model": "policy", "tools": [CHAT_TOOL], "messages": [TASK]}
    turn = (await gateway.post(CHAT, body))["choices"][0]["message"]
    turn["tool_calls"][0]["function"]["arguments"] = echoed
    result = {"role": "tool", "tool_call_id": turn["tool_calls"][0]["id"], "content": "5"}
    await gateway.post(CHAT, body | {"messages": [TASK, turn, result]})
    fork = Fork.EDITED_HISTORY if is_edited else None
    assert [call.origin.fork for call in await gateway.calls()] == [None, fork]
