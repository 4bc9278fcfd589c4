import whet
from openai import AsyncOpenAI
from whet.demos.problems import CALCULATOR, problems, use_tool

async def solve(task, llm):                                       # your agent, as it is
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    reply = await client.chat.completions.create(
        model=llm.model, tools=[CALCULATOR], messages=[{"role": "user", "content": task["question"]}])
    calls = reply.choices[0].message.tool_calls or []
    results = [use_tool(call.function.name, call.function.arguments) for call in calls]
    return float(results == [str(task["answer"])])                # its reward

whet.train(solve, problems("train", 500, 0), held_out=problems("test", 100, 1), adam={"lr": 1e-3})
