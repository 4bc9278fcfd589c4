"""An agent with everything a dashboard shows: tools, forks, named rewards, spans, failures."""

from typing import Any

from openai import AsyncOpenAI

import whet
from whet.demos.problems import CALCULATOR, SYSTEM, problems, use_tool
from whet.types import Endpoint


def tasks(count: int, seed: int) -> list[Any]:
    """Word problems, every fourth of which breaks its agent."""
    return [
        {**task, "broken": n % 4 == 3, "note": "<img src=x onerror=alert(1)>"}
        for n, task in enumerate(problems("train", count, seed))
    ]


@whet.operation
def check(answer: str, expected: object) -> float:
    return float(answer == str(expected))


async def solve(task: Any, llm: Endpoint) -> float:
    """Call the tool twice with the same prompt, edit the history, then answer."""
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:

        async def ask() -> Any:
            reply = await client.chat.completions.create(
                model=llm.model,
                messages=messages,
                tools=[CALCULATOR],  # pyright: ignore[reportArgumentType]  # plain JSON will do
                max_tokens=48,
            )
            return reply.choices[0].message

        first = await ask()
        if task["broken"]:
            raise ValueError(f"no answer to {task['question']!r}")
        calls = first.tool_calls or []
        results = [use_tool(call.function.name, call.function.arguments) for call in calls]
        whet.emit_reward(float(bool(calls)), key="used_tool")
        messages.append(first.model_dump(exclude_none=True))
        for call, result in zip(calls, results, strict=True):
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if not calls:
            messages.append({"role": "user", "content": "Use the calculator."})
        await ask()
        messages[1] = {"role": "user", "content": f"{task['question']} Be brief."}
        await ask()  # an edited history: a fork
        answer = results[0] if results else ""
        whet.emit_reward(check(answer, task["answer"]), key="right")
        return 0.8 * check(answer, task["answer"]) + 0.2 * float(bool(calls))
