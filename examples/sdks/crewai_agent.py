"""CrewAI: a single agent. In a crew, the model is set in the same way."""

from crewai import LLM, Agent
from crewai.tools import tool
from sums import SYSTEM, calculator, grade


async def solve(task, llm):
    # whet: begin
    model = LLM(model=llm.model, provider="openai", base_url=llm.base_url, api_key=llm.api_key)
    # whet: end
    model.stream = task.get("stream", False)
    agent = Agent(
        role="solver",
        goal=SYSTEM,
        backstory=SYSTEM,
        llm=model,
        tools=[tool("calculator")(calculator)],
        max_iter=10,
    )
    result = await agent.kickoff_async(task["question"])
    used = any(message["role"] == "tool" for message in result.messages)
    return grade(result.raw, task, has_calculated=used)
