"""An agent that answers the problems of GSM8K with a calculator. Nothing in it knows of training.

A task is a line of GSM8K's files: a question, and an answer whose last line is `#### number`.
"""

import ast
import json
import operator
import re
from collections.abc import Callable
from typing import Any

from openai import AsyncOpenAI

SYSTEM = (
    "Solve the math problem. Think step by step, and compute with the calculator. "
    "End with a line that holds the answer: #### number"
)
CALCULATOR: Any = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression of numbers with + - * / ** % ( ).",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}
# One solved problem shows the form of an answer: a model for code writes a program otherwise.
CALL = {"name": "calculator", "arguments": '{"expression": "(12 + 9) * 4 - 15"}'}
EXAMPLE: list[Any] = [
    {
        "role": "user",
        "content": "A baker sells 12 loaves in the morning and 9 in the afternoon, for $4 each, "
        "and pays $15 for flour. How much money is left?",
    },
    {
        "role": "assistant",
        "content": "The baker sells 12 + 9 loaves. At $4 each they bring (12 + 9) * 4 dollars. "
        "After paying for the flour (12 + 9) * 4 - 15 dollars are left.",
        "tool_calls": [{"id": "example", "type": "function", "function": CALL}],
    },
    {"role": "tool", "tool_call_id": "example", "content": "69"},
    {"role": "assistant", "content": "The baker has $69 left.\n#### 69"},
]
TURNS = 5
MAX_TOKENS = 300
"""Of one turn."""
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
OPERATIONS: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
ERRORS = (ArithmeticError, LookupError, RecursionError, SyntaxError, TypeError, ValueError)
# Building a client takes longer than a call: one for all attempts of a process.
_client = AsyncOpenAI(base_url="http://unused", api_key="unused", max_retries=0, timeout=600)


async def solve(task, llm) -> float:
    """Answer `task["question"]`; 1.0 if the final number is the right one, else 0.0."""
    client = _client.with_options(base_url=llm.base_url, api_key=llm.api_key)
    messages: list[Any] = [
        {"role": "system", "content": SYSTEM},
        *EXAMPLE,
        {"role": "user", "content": task["question"]},
    ]
    for _ in range(TURNS):
        reply = await client.chat.completions.create(
            model=llm.model, messages=messages, tools=[CALCULATOR], max_tokens=MAX_TOKENS
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return score(task["answer"], message.content or "")
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            assert call.type == "function"  # no other kind of tool was offered
            result = use_calculator(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def score(gold: str, reply: str) -> float:
    """1.0 if the last number of the reply is the one behind #### in the gold answer."""
    found, expected = last_number(reply), last_number(gold.rpartition("####")[2])
    return float(found is not None and expected is not None and abs(found - expected) < 1e-6)


def last_number(text: str) -> float | None:
    """Return the number behind the last ####, or else the last number of the text."""
    found = NUMBER.findall(text.rpartition("####")[2]) or NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def use_calculator(name: str, arguments: str) -> str:
    """Result of a tool call, or what is wrong with it."""
    if name != "calculator":
        return f"error: there is no tool {name!r}"
    try:
        expression = str(json.loads(arguments)["expression"])
        value = compute(ast.parse(expression.replace(",", "").replace("$", ""), mode="eval").body)
        return f"{value:.12g}"
    except ERRORS as error:
        return f"error: {error}"


def compute(node: ast.AST) -> float:
    """Evaluate an expression of numbers."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return float(value)
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            return float(OPERATIONS[type(operation)](compute(left), compute(right)))
        case ast.UnaryOp(ast.USub(), operand):
            return -compute(operand)
    raise ValueError("expected numbers with + - * / ** % ( )")
