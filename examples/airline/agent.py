"""An assistant at the desk of an airline, and the customer it talks to. Nothing here knows of whet.

Both are models. The customer is another agent of the same attempt, named by a header, so that
only the assistant is trained. CUSTOMER_MODEL names its model, which is otherwise the assistant's;
with CUSTOMER_BASE_URL and CUSTOMER_API_KEY it is one of any OpenAI-compatible endpoint.
"""

import os
from typing import Any

from desk import POLICY, TOOLS, Desk, check
from openai import AsyncOpenAI

GREETING = "Hello, how can I help?"
TURNS, CALLS = 5, 6
"""Turns of a conversation, and model calls in one turn of the assistant."""
MAX_TOKENS = 96


class AirlineDesk:
    """An attempt is one conversation; its reward is 1 if state and communication are right."""

    def __init__(self) -> None:
        self._client = AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0)

    async def rollout(self, task, llm) -> float:
        desk = Desk(task)
        customer = self._client.with_options(
            base_url=os.environ.get("CUSTOMER_BASE_URL", llm.base_url),
            api_key=os.environ.get("CUSTOMER_API_KEY", llm.api_key),
            default_headers={"x-whet-agent": "customer"},
        )
        assistant = self._client.with_options(
            base_url=llm.base_url,
            api_key=llm.api_key,
            default_headers={"x-whet-agent": "assistant"},
        )
        seen: list[Any] = [
            {"role": "system", "content": task["customer"]},
            {"role": "user", "content": GREETING},
        ]
        messages: list[Any] = [{"role": "system", "content": POLICY}]
        answers: list[str] = []
        model = os.environ.get("CUSTOMER_MODEL") or str(llm.model)
        for _ in range(TURNS):
            wish = await speak(customer, model, seen)
            if "bye" in wish.lower():
                break
            messages.append({"role": "user", "content": wish})
            answer = await serve(assistant, llm.model, messages, desk)
            if answer is None:
                return 0.0
            answers.append(answer)
            seen.append({"role": "user", "content": answer})
        return float(all(check(task, desk.state, answers).values()))


async def speak(client: AsyncOpenAI, model: str, seen: list[Any]) -> str:
    """Sample the customer's next message."""
    reply = await client.chat.completions.create(model=model, messages=seen, max_tokens=MAX_TOKENS)
    text = reply.choices[0].message.content or ""
    seen.append({"role": "assistant", "content": text})
    return text


async def serve(client: AsyncOpenAI, model: str, messages: list[Any], desk: Desk) -> str | None:
    """The assistant's turn: tool calls, then its answer; None if it never answers."""
    for _ in range(CALLS):
        reply = await client.chat.completions.create(
            model=model, messages=messages, tools=TOOLS, max_tokens=MAX_TOKENS
        )
        message = reply.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        if not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls:
            assert call.type == "function"  # no other kind of tool was offered
            result = desk.use(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return None
