"""LiteLLM without a framework."""

import litellm
from sums import SYSTEM, grade

from whet.demos.problems import CALCULATOR, use_tool


async def solve(task, llm):
    # whet: begin
    endpoint = {"api_base": llm.base_url, "api_key": llm.api_key, "model": f"openai/{llm.model}"}
    # whet: end
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    for _ in range(3):
        message = await ask(endpoint, messages, task.get("stream"))
        if not message.tool_calls:
            return grade(message.content, task)
        messages.append(message)
        for call in message.tool_calls:
            result = use_tool(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


async def ask(endpoint, messages, stream):
    request = {**endpoint, "messages": messages, "tools": [CALCULATOR], "max_tokens": 64}
    reply = await litellm.acompletion(**request, stream=bool(stream))
    if stream:
        reply = litellm.stream_chunk_builder([chunk async for chunk in reply], messages=messages)
    return reply.choices[0].message
