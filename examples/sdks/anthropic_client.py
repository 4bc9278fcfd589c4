"""The `anthropic` package without a framework. It takes the base URL as it is."""

from anthropic import AsyncAnthropic
from sums import SYSTEM, calculator, grade

TOOL = {
    "name": "calculator",
    "description": "Evaluates arithmetic.",
    "input_schema": {
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
}


async def solve(task, llm):
    # whet: begin
    client = AsyncAnthropic(base_url=llm.base_url, api_key=llm.api_key)
    # whet: end
    messages = [{"role": "user", "content": task["question"]}]
    for _ in range(3):
        reply = await ask(client, llm.model, messages, task.get("stream"))
        uses = [block for block in reply.content if block.type == "tool_use"]
        if not uses:
            return grade("".join(block.text for block in reply.content), task)
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": run(use)} for use in uses
        ]
        messages += [
            {"role": "assistant", "content": reply.content},
            {"role": "user", "content": results},
        ]
    return 0.0


async def ask(client, model, messages, stream):
    request = {"model": model, "system": SYSTEM, "messages": messages, "tools": [TOOL]}
    if stream:
        async with client.messages.stream(**request, max_tokens=64) as events:
            return await events.get_final_message()
    return await client.messages.create(**request, max_tokens=64)


def run(use):
    expression = use.input.get("expression")
    if use.name != "calculator" or expression is None:
        return "error: expected an expression for the calculator"
    return calculator(str(expression))
