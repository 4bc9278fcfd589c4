"""AutoGen's assistant. Its client needs the abilities of a model it does not know."""

from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from sums import SYSTEM, calculator, grade

ABILITIES = {
    "function_calling": True,
    "vision": False,
    "json_output": False,
    "structured_output": False,
    "family": "unknown",
}


async def solve(task, llm):
    # whet: begin
    client = OpenAIChatCompletionClient(
        base_url=llm.base_url, api_key=llm.api_key, model=llm.model, model_info=ABILITIES
    )
    # whet: end
    agent = AssistantAgent(
        "solver",
        model_client=client,
        system_message=SYSTEM,
        tools=[calculator],
        max_tool_iterations=3,
        model_client_stream=task.get("stream", False),
    )
    result = await agent.run(task=task["question"])
    return grade(result.messages[-1].content, task)
