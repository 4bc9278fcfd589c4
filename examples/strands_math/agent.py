"""A Strands agent that answers word problems with a calculator. Nothing in it knows of training."""

import ast
import operator
import re
from collections.abc import Callable

from strands import Agent, tool
from strands.models.openai import OpenAIModel

SYSTEM = "Use the calculator, then answer."
NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?")
OPERATIONS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
TOOL_REWARD = 0.1


@tool
def calculator(expression: str) -> str:
    """Evaluates arithmetic."""
    try:
        return str(compute(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError, KeyError):
        return f"cannot compute {expression!r}"


def compute(node: ast.AST) -> int:
    """Evaluate a sum, difference or product of integers."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.BinOp(left, operation, right):
            return OPERATIONS[type(operation)](compute(left), compute(right))
        case ast.UnaryOp(ast.USub(), operand):
            return -compute(operand)
    raise ValueError(ast.dump(node))


async def solve(task, llm):
    """Answer `task["question"]`: 1.0 if the answer is right, a little for using the calculator."""
    model = OpenAIModel(
        client_args={"base_url": llm.base_url, "api_key": llm.api_key},
        model_id=llm.model,
        params={"max_tokens": 64},
    )
    agent = Agent(model=model, system_prompt=SYSTEM, tools=[calculator], callback_handler=None)
    result = await agent.invoke_async(task["question"])
    if last_number(str(result)) == task["answer"]:
        return 1.0
    return TOOL_REWARD if "calculator" in result.metrics.tool_metrics else 0.0


def last_number(text: str) -> float | None:
    found = NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None
