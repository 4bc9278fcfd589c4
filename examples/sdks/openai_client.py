"""The `openai` package without a framework. Its streams work as well: see the helper."""

from openai import AsyncOpenAI
from sums import SYSTEM, grade

from whet.demos.problems import CALCULATOR, use_tool


async def solve(task, llm):
    # whet: begin
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    # whet: end
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    for _ in range(3):
        message = await ask(client, llm.model, messages, task.get("stream"))
        if not message.tool_calls:
            return grade(message.content, task)
        messages.append(message)
        for call in message.tool_calls:
            result = use_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


async def ask(client, model, messages, stream):
    request = {"model": model, "messages": messages, "tools": [CALCULATOR], "max_tokens": 64}
    if stream:
        async with client.chat.completions.stream(**request) as events:
            reply = await events.get_final_completion()
    else:
        reply = await client.chat.completions.create(**request)
    return reply.choices[0].message
