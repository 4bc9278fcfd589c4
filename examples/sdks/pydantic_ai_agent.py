"""Pydantic AI over Chat Completions."""

from pydantic_ai import Agent
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from sums import SYSTEM, calculator, grade


async def solve(task, llm):
    # whet: begin
    provider = OpenAIProvider(base_url=llm.base_url, api_key=llm.api_key)
    model = OpenAIChatModel(llm.model, provider=provider)
    # whet: end
    agent = Agent(model, instructions=SYSTEM, tools=[calculator])
    try:
        if task.get("stream"):
            async with agent.run_stream(task["question"]) as result:
                return grade(await result.get_output(), task)
        result = await agent.run(task["question"])
    except AgentRunError:
        return 0.0
    return grade(result.output, task)
