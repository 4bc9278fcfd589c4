"""Microsoft Agent Framework with a calculator behind MCP, over Responses or Chat Completions."""

from agent_framework import Agent, MCPStdioTool
from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient
from sums import SYSTEM, grade


async def solve(task, llm):
    # whet: begin
    client = OpenAIChatClient(base_url=llm.base_url, api_key=llm.api_key, model=llm.model)
    # whet: end
    return await answer(task, client)


async def solve_by_chat(task, llm):
    # whet: begin
    client = OpenAIChatCompletionClient(base_url=llm.base_url, api_key=llm.api_key, model=llm.model)
    # whet: end
    return await answer(task, client)


async def answer(task, client):
    server = MCPStdioTool(
        name="calculator", command="mcp-server-calculator", tool_result_content="content_only"
    )
    async with server, Agent(client=client, instructions=SYSTEM, tools=server) as agent:
        server.functions[0].name = "calculator"  # the one tool that the tiny model can name
        if task.get("stream"):
            stream = agent.run(task["question"], stream=True)
            async for _ in stream:
                pass
            result = await stream.get_final_response()
        else:
            result = await agent.run(task["question"])
        parts = [part.type for message in result.messages for part in message.contents]
        return grade(result.text, task, has_calculated="function_result" in parts)
