"""What the agents here do: they answer word problems, with a calculator."""

import re

from whet.demos.problems import calculate

SYSTEM = "Use the calculator, then answer."
NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?")


def calculator(expression: str) -> str:
    """Evaluates arithmetic."""
    return calculate(expression)


def graded(answer, task):
    """1.0 if the last number of an answer is the right one, else 0.0."""
    numbers = NUMBER.findall(str(answer))
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == task["answer"])
