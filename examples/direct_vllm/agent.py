"""A Strands agent that calls a vLLM directly; its recorder puts the token ids into its spans."""

import sys
from pathlib import Path

from strands import Agent, tool
from strands_vllm import VLLMModel, VLLMTokenRecorder

sys.path.insert(0, str(Path(__file__).parents[1] / "sdks"))

from sums import SYSTEM, calculator, grade


async def solve(task, llms):
    llm = llms["vllm"]
    model = VLLMModel(
        base_url=llm.base_url,
        api_key=llm.api_key,
        model_id=llm.model,
        return_token_ids=True,
        # A gateway would enforce this: log-probs are those of this distribution.
        params={"temperature": 1.0, "top_p": 1.0, "max_tokens": 100},
    )
    agent = Agent(
        model=model,
        system_prompt=SYSTEM,
        tools=[tool(calculator)],
        callback_handler=VLLMTokenRecorder(),
    )
    return grade(await agent.invoke_async(task["question"]), task)
