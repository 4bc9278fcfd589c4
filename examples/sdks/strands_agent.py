"""Strands Agents: an OpenAI model with our address. It always streams."""

from strands import Agent, tool
from strands.models.openai import OpenAIModel
from sums import SYSTEM, calculator, grade


async def solve(task, llm):
    # whet: begin
    model = OpenAIModel(
        client_args={"base_url": llm.base_url, "api_key": llm.api_key}, model_id=llm.model
    )
    # whet: end
    agent = Agent(
        model=model, system_prompt=SYSTEM, tools=[tool(calculator)], callback_handler=None
    )
    result = await agent.invoke_async(task["question"])
    return grade(result, task)
