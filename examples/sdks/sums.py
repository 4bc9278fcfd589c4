"""System prompt, tool and reward of the agents in this folder: word problems with a calculator."""

import re

from whet.demos.problems import calculate

SYSTEM = "Use the calculator, then answer."
NUMBER = re.compile(r"(?<!\d)-?\d[\d,]*(?:\.\d+)?")


def calculator(expression: str) -> str:
    """Evaluates arithmetic."""
    return calculate(expression)


def grade(answer, task, *, has_calculated=False):
    """Return 1.0 if the last number of an answer is right; else 0.1 if the calculator was used."""
    numbers = NUMBER.findall(str(answer))
    if numbers and float(numbers[-1].replace(",", "")) == task["answer"]:
        return 1.0
    return 0.1 if has_calculated else 0.0
