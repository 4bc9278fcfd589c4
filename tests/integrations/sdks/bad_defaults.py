"""Agents that look right but harm training, each by a default of its SDK."""

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "sdks"))

from sums import grade


async def dspy_with_its_cache(task, llm):
    import dspy

    lm = dspy.LM(f"openai/{llm.model}", api_base=llm.base_url, api_key=llm.api_key)
    answers = await lm.acall(messages=[{"role": "user", "content": task["question"]}])
    return grade(answers[0], task)


async def agents_with_traces(task, llm):
    from agents import Agent, OpenAIChatCompletionsModel, Runner
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    model = OpenAIChatCompletionsModel(model=llm.model, openai_client=client)
    result = await Runner.run(Agent(name="solver", model=model), task["question"])
    return grade(result.final_output, task)


def crewai_with_telemetry(task, llm):
    from crewai import LLM

    model = LLM(model=llm.model, provider="openai", base_url=llm.base_url, api_key=llm.api_key)
    return grade(model.call(task["question"]), task)


async def openai_at_another_url(task, llm):
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=os.environ["ANOTHER_URL"], api_key="a key", max_retries=0)
    question: Any = {"role": "user", "content": task["question"]}
    reply = await client.chat.completions.create(model=llm.model, messages=[question])
    return grade(reply.choices[0].message.content, task)


async def no_model_call(task, llm):
    return grade("It is 42.", task)


async def without_token_ids(task, llms):
    from strands import Agent
    from strands_vllm import VLLMModel, VLLMTokenRecorder

    llm = llms["vllm"]
    model = VLLMModel(
        base_url=llm.base_url, api_key=llm.api_key, model_id=llm.model, return_token_ids=False
    )
    agent = Agent(model=model, callback_handler=VLLMTokenRecorder())
    return grade(await agent.invoke_async(task["question"]), task)
