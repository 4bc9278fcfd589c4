"""Demo agent that answers arithmetic word problems with a calculator tool.

It is written with the `openai` package alone, and nothing in it knows about training.
"""

import re
from typing import Any

from openai import AsyncOpenAI

from whet.demos.problems import CALCULATOR, SYSTEM, Task, calculate, problems, use_tool
from whet.types import Endpoint

__all__ = ["CALCULATOR", "SYSTEM", "calculate", "problems", "solve"]

TURNS = 3
NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?")


async def solve(task: Task, llm: Endpoint) -> float:
    """Answer the question of `task`; 1.0 if the answer is right, else 0.0."""
    messages: list[Any] = [  # Any: the SDK's own replies are appended as they are
        {"role": "system", "content": SYSTEM},
        *task.get("examples", []),
        {"role": "user", "content": task["question"]},
    ]
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        for _ in range(TURNS):
            reply = await client.chat.completions.create(
                model=llm.model,
                messages=messages,
                tools=[CALCULATOR],  # pyright: ignore[reportArgumentType]  # plain JSON will do
                max_tokens=64,
            )
            message = reply.choices[0].message
            if not message.tool_calls:
                return float(_find_last_number(message.content or "") == task["answer"])
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls:
                assert call.type == "function"  # no other kind of tool was offered
                result = use_tool(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def _find_last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
