"""LangChain's agent, which is a LangGraph graph."""

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from sums import SYSTEM, calculator, grade


async def solve(task, llm):
    # whet: begin
    model = ChatOpenAI(base_url=llm.base_url, api_key=llm.api_key, model=llm.model)
    # whet: end
    agent = create_agent(model, tools=[tool(calculator)], system_prompt=SYSTEM)
    request = {"messages": [{"role": "user", "content": task["question"]}]}
    limits = {"recursion_limit": 10}
    try:
        if task.get("stream"):
            text = ""
            async for part, _ in agent.astream(request, limits, stream_mode="messages"):
                if part.type == "AIMessageChunk":
                    text += part.text
            return grade(text, task)
        result = await agent.ainvoke(request, limits)
    except GraphRecursionError:
        return 0.0
    return grade(result["messages"][-1].text, task)
