"""strands-vllm: its recorder is given the very tokens that are trained. It always streams."""

from strands import Agent, tool
from strands_vllm import VLLMModel, VLLMTokenRecorder
from sums import SYSTEM, calculator, grade


async def solve(task, llm):
    recorder = VLLMTokenRecorder()
    return await answer(task, llm, recorder)


async def answer(task, llm, recorder):
    # whet: begin
    model = VLLMModel(
        base_url=llm.base_url, api_key=llm.api_key, model_id=llm.model, return_token_ids=True
    )
    # whet: end
    agent = Agent(
        model=model, system_prompt=SYSTEM, tools=[tool(calculator)], callback_handler=recorder
    )
    result = await agent.invoke_async(task["question"])
    return grade(result, task)
