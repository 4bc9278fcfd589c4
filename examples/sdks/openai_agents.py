"""The OpenAI Agents SDK, over Responses as it does by default, or over Chat Completions."""

from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from sums import SYSTEM, calculator, grade

set_tracing_disabled(True)  # traces would be uploaded to OpenAI with the key of the rollout


async def solve(task, llm):
    # whet: begin
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    model = OpenAIResponsesModel(model=llm.model, openai_client=client)
    # whet: end
    return await answer(task, model)


async def solve_by_chat(task, llm):
    # whet: begin
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    model = OpenAIChatCompletionsModel(model=llm.model, openai_client=client)
    # whet: end
    return await answer(task, model)


async def answer(task, model):
    agent = Agent(
        name="solver", instructions=SYSTEM, model=model, tools=[function_tool(calculator)]
    )
    try:
        if task.get("stream"):
            result = Runner.run_streamed(agent, task["question"], max_turns=4)
            async for _ in result.stream_events():
                pass
        else:
            result = await Runner.run(agent, task["question"], max_turns=4)
    except AgentsException:  # it called an unknown tool, or too many
        return 0.0
    return grade(result.final_output, task)
