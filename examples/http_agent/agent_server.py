"""An agent of the OpenAI Agents SDK as a service, in an environment of its own.

    pip install -r examples/http_agent/requirements.txt
    python examples/http_agent/agent_server.py 8001

    whet train --tasks examples/http_agent/tasks.jsonl --model tiny --service http://127.0.0.1:8001

It knows nothing of whet: each request has the address of its model, and each response the reward.
"""

import sys

import uvicorn
from agents import (
    Agent,
    AsyncOpenAI,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import MaxTurnsExceeded
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

set_tracing_disabled(True)  # it would upload to OpenAI


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def chat(request: Request) -> JSONResponse:
    """Work on one sample."""
    body = await request.json()
    llm, sample = body["llm"], body["sample"]
    async with AsyncOpenAI(base_url=llm["base_url"], api_key=llm["api_key"]) as client:
        agent = Agent(
            name="Assistant",
            instructions="Answer with a number.",
            tools=[add],
            model=OpenAIChatCompletionsModel(model=llm["model"], openai_client=client),
            model_settings=ModelSettings(extra_headers=llm["headers"], max_tokens=16),
        )
        try:
            result = await Runner.run(agent, sample["question"], max_turns=body["max_turns"])
            text = str(result.final_output)
        except MaxTurnsExceeded:
            text = ""
    right = str(sample["answer"]) in text
    return JSONResponse({"text": text, "reward": 1.0 if right else min(len(text), 100) / 1000})


app = Starlette(routes=[Route("/chat", chat, methods=["POST"])])

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
