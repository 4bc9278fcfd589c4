"""A chat agent of Microsoft Agent Framework with a calculator behind MCP. No training in it."""

import re

from agent_framework import Agent, MCPStdioTool
from agent_framework.openai import OpenAIChatClient

INSTRUCTIONS = "Use the calculator, then answer."
SERVER = "exec mcp-server-calculator 2>/dev/null"  # it reports each newer request at length
NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?")


async def math_agent(task, llm):
    """Answer `task["question"]`: 1.0 if the last number is right, a little for calculating."""
    client = OpenAIChatClient(base_url=llm.base_url, api_key=llm.api_key, model=llm.model)
    calculator = MCPStdioTool(
        name="calculator",
        command="sh",
        args=["-c", SERVER],
        tool_result_content="content_only",
    )
    async with (
        calculator,
        Agent(
            client=client,
            name="MathAgent",
            instructions=INSTRUCTIONS,
            tools=calculator,
            default_options={"max_tokens": 64},
        ) as agent,
    ):
        calculator.functions[0].name = "calculator"  # the name that the tiny model knows
        result = await agent.run(task["question"])
    if last_number(result.text) == task["answer"]:
        return 1.0
    parts = {part.type for message in result.messages for part in message.contents}
    return 0.1 if "function_result" in parts else 0.0


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
