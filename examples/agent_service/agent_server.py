"""An agent of the OpenAI Agents SDK as an HTTP service, in an environment of its own.

    pip install -r requirements.txt
    python agent_server.py 8001

It knows nothing of whet: each request has the address of its model, and the response has the text
of the answer. What is right is not known here; the client computes the reward.
"""

import sys

import uvicorn
from agents import (
    Agent,
    AgentsException,
    AsyncOpenAI,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

set_tracing_disabled(True)  # traces would be uploaded to OpenAI

INSTRUCTIONS = "Solve the problem with the tools. End with the number alone."


@function_tool
def add(a: float, b: float) -> float:
    """Add two numbers."""
    return a + b


@function_tool
def multiply(a: float, b: float) -> float:
    """Multiply two numbers."""
    return a * b


async def chat(request: Request) -> JSONResponse:
    """Work on one sample."""
    body = await request.json()
    llm, sample = body["llm"], body["sample"]
    async with AsyncOpenAI(base_url=llm["base_url"], api_key=llm["api_key"]) as client:
        agent = Agent(
            name="Assistant",
            instructions=INSTRUCTIONS,
            tools=[add, multiply],
            model=OpenAIChatCompletionsModel(model=llm["model"], openai_client=client),
            model_settings=ModelSettings(extra_headers=llm["headers"], max_tokens=256),
        )
        try:
            result = await Runner.run(agent, sample["question"], max_turns=body["max_turns"])
        except AgentsException as error:  # too many turns, or a tool that does not exist
            return JSONResponse({"text": "", "error": str(error)})
    return JSONResponse({"text": str(result.final_output)})


app = Starlette(routes=[Route("/chat", chat, methods=["POST"])])

if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
