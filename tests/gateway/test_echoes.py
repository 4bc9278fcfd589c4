"""Turns that agents send back with text of their own behind the sampled text."""

import pytest

from support.scripted_gateway import Gateway, Json, NewGateway
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
    """What CodeAgent of smolagents sends: the code's closing tag, then the call as text."""
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
    assert gateway.text(second.context).startswith("ve, I guess.<|im_end|>")


async def test_a_token_beyond_the_stop_string_forks(
    new_gateway: NewGateway, renderer: Renderer
) -> None:
    gateway = await new_gateway(renderer.template.encode(THOUGHT + "</code> and more"), "yes")
    content = await ask(gateway, TASK)
    await ask(gateway, TASK, say(content.strip() + "\n" + ADDED), OBSERVED)
    assert [call.origin.fork for call in await gateway.calls()] == [None, Fork.EDITED_HISTORY]
