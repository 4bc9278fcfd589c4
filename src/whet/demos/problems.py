"""Arithmetic word problems, and a calculator to solve them with. Standard library only."""

import ast
import json
import random
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

ProblemSplit = Literal["train", "test"]
ProblemKind = Literal["add", "subtract", "multiply", "two_step"]

Task = dict[str, Any]  # Any: a task is the user's JSON, typed as `json.loads` types it
DialogueMessage = dict[str, Any]  # Any: the same, for a chat message

SYSTEM = "Use the calculator, then answer."

CALCULATOR: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates arithmetic.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}

EXAMPLE: list[DialogueMessage] = [
    {
        "role": "user",
        "content": "Tom has 12 pens and buys 32 more. How many pens does Tom have now?",
    },
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_0",
                "type": "function",
                "function": {"name": "calculator", "arguments": '{"expression": "12+32"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_0", "content": "44"},
    {"role": "assistant", "content": "The answer is 44."},
]
"""A worked dialogue, for a model that has not learned to call tools."""

# --------------------------------------------------------------------------- problems

NAMES = [
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Jo", "Kim", "Leo", "Mia",
    "Noah", "Olga", "Pia", "Quinn", "Rosa", "Sam", "Tom", "Uma", "Vera", "Will", "Zoe",
]  # fmt: skip
THINGS = [
    "apples", "books", "coins", "cards", "shells", "stamps", "pens", "marbles", "eggs", "roses",
    "stones", "tickets", "cups", "balls", "keys", "lamps", "nuts", "pears", "rings", "seeds",
]  # fmt: skip
BOXES = ["boxes", "bags", "jars", "crates", "trays"]


@dataclass(frozen=True, slots=True)
class Pattern:
    """An arithmetic expression, and the ways to phrase it as a question."""

    kind: ProblemKind
    expression: str
    phrasings: tuple[str, ...]


PATTERNS = (
    Pattern(
        "add",
        "{a}+{b}",
        (
            "{name} has {a} {things} and gets {b} more. How many {things} does {name} have now?",
            "{name} has {a} {things} and {other} has {b}. How many {things} do they have together?",
            "One box holds {a} {things} and another holds {b}. How many {things} are there?",
            "{name} found {a} {things} on Monday and {b} on Friday. How many in all?",
            "What is {a} plus {b}?",
        ),
    ),
    Pattern(
        "subtract",
        "{a}-{b}",
        (
            "{name} has {a} {things} and gives {b} to {other}. How many {things} are left?",
            "{name} lost {b} of {a} {things}. How many {things} remain?",
            "{name} needs {a} {things} and has {b}. How many {things} are missing?",
            "{name} has {a} {things} and {other} has {b}. How many more does {name} have?",
            "What is {a} minus {b}?",
        ),
    ),
    Pattern(
        "multiply",
        "{a}*{b}",
        (
            "{name} buys {b} {boxes} of {a} {things}. How many {things} is that?",
            "Each of {b} shelves holds {a} {things}. How many {things} are there?",
            "{name} sells {a} {things} a day. How many {things} in {b} days?",
            "There are {b} {boxes} with {a} {things} each. How many {things} in total?",
            "What is {a} times {b}?",
        ),
    ),
    Pattern(
        "two_step",
        "{a}+{b}-{c}",
        (
            "{name} has {a} {things}, buys {b} and loses {c}. How many {things} are left?",
            "{name} picks {a} {things}, then {b} more, and gives {c} to {other}. How many remain?",
            "What is {a} plus {b} minus {c}?",
        ),
    ),
    Pattern(
        "two_step",
        "{a}*{b}+{c}",
        (
            "{name} buys {b} {boxes} of {a} {things} and finds {c}. How many {things} is that?",
            "There are {b} {boxes} with {a} {things} each, and {c} loose ones. How many in all?",
            "What is {a} times {b} plus {c}?",
        ),
    ),
    Pattern(
        "two_step",
        "{a}*{b}-{c}",
        (
            "{name} buys {b} {boxes} of {a} {things} and sells {c}. How many {things} are left?",
            "Each of {b} {boxes} holds {a} {things}; {c} are broken. How many {things} are whole?",
            "What is {a} times {b} minus {c}?",
        ),
    ),
)

_TEST_SHARE = 5
"""One operand tuple in this many is for tests."""


@dataclass(frozen=True, slots=True)
class Draw:
    """A pattern with its numbers and words filled in."""

    pattern: Pattern
    numbers: Mapping[str, int]
    question: str

    @property
    def expression(self) -> str:
        return self.pattern.expression.format_map(self.numbers)

    @property
    def key(self) -> tuple[ProblemKind, tuple[int, ...]]:
        """Identity of a problem: its kind and its numbers in any order."""
        return self.pattern.kind, tuple(sorted(self.numbers.values()))

    @property
    def split(self) -> ProblemSplit:
        return "test" if zlib.crc32(repr(self.key).encode()) % _TEST_SHARE == 0 else "train"

    @property
    def task(self) -> Task:
        answer = int(calculate(self.expression))
        return {"question": self.question, "answer": answer, "kind": self.pattern.kind}


def _draw_number(rng: random.Random) -> int:
    return rng.randint(10, 99) if rng.random() < 0.8 else rng.randint(100, 999)


def _draw_numbers(pattern: Pattern, rng: random.Random) -> dict[str, int]:
    """Operands for a pattern, such that its answer is not negative."""
    a, b = _draw_number(rng), _draw_number(rng)
    if "*" in pattern.expression:
        b = rng.randint(2, 9)
    elif pattern.kind == "subtract":
        a, b = max(a, b), min(a, b)
    if pattern.kind != "two_step":
        return {"a": a, "b": b}
    first = a * b if "*" in pattern.expression else a + b
    return {"a": a, "b": b, "c": rng.randint(10, min(99, first))}


def draw(pattern: Pattern, split: ProblemSplit, rng: random.Random) -> Draw:
    """A problem of this pattern and split."""
    while True:
        name, other = rng.sample(NAMES, 2)
        words = {
            "name": name,
            "other": other,
            "things": rng.choice(THINGS),
            "boxes": rng.choice(BOXES),
        }
        numbers = _draw_numbers(pattern, rng)
        question = rng.choice(pattern.phrasings).format_map({**words, **numbers})
        drawn = Draw(pattern, numbers, question)
        if drawn.split == split:
            return drawn


def problems(split: ProblemSplit, count: int, seed: int, *, examples: bool = False) -> list[Task]:
    """`count` different problems, the same ones for the same seed, with every kind equally often.

    A problem belongs to the test split when a hash of its kind and its sorted numbers is divisible
    by five, and to the train split otherwise. So no numbers of a kind are in both, whatever the
    seeds, and no wording can bring them there.

    With `examples`, each task also holds a worked dialogue to put before the question.
    """
    rng = random.Random(f"{split} {seed}")
    by_kind = {
        kind: [p for p in PATTERNS if p.kind == kind]
        for kind in ("add", "subtract", "multiply", "two_step")
    }
    kinds = list(by_kind)
    seen: set[tuple[ProblemKind, tuple[int, ...]]] = set()
    tasks: list[Task] = []
    misses = 0
    while len(tasks) < count:
        drawn = draw(rng.choice(by_kind[kinds[len(tasks) % len(kinds)]]), split, rng)
        if drawn.key in seen:
            misses += 1
            if misses > 2000:  # in a row: the kind is used up
                raise ValueError(f"{count} is more than the different {split} problems there are")
            continue
        misses = 0
        seen.add(drawn.key)
        tasks.append(drawn.task | ({"examples": EXAMPLE} if examples else {}))
    rng.shuffle(tasks)
    return tasks


# --------------------------------------------------------------------------- calculator


def use_tool(name: str, arguments: str) -> str:
    """Run a tool call as a model wrote it; errors are returned as text."""
    if name != "calculator":
        return "error: unknown tool"
    try:
        expression = json.loads(arguments)["expression"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return "error: expected an expression"
    return calculate(str(expression))


Number = int | float

_LENGTH = 200
_LARGEST = 10**15
_CHARACTERS = re.compile(r"[0-9.+\-*/%() ]+")
_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: lambda left, right: left + right,
    ast.Sub: lambda left, right: left - right,
    ast.Mult: lambda left, right: left * right,
    ast.Div: lambda left, right: left / right,
    ast.FloorDiv: lambda left, right: left // right,
    ast.Mod: lambda left, right: left % right,
}
_UNARY: Mapping[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.USub: lambda operand: -operand,
    ast.UAdd: lambda operand: operand,
}


def calculate(expression: str) -> str:
    """Evaluate `+ - * / // %` and parentheses over numbers; errors are returned as text.

    Never raises and never runs long: the text, and every value on the way, is bounded.
    """
    if len(expression) > _LENGTH:
        return f"error: longer than {_LENGTH} characters"
    if _CHARACTERS.fullmatch(expression) is None:
        return "error: not arithmetic"
    try:
        value = _compute_value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except OverflowError:
        return "error: number too large"
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "error: not arithmetic"
    if value == int(value):
        return str(int(value))
    return format(value, ".10g")


def _compute_value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number):
            value = number
        case ast.BinOp(left, op, right) if type(op) in _BINARY:
            value = _BINARY[type(op)](_compute_value(left), _compute_value(right))
        case ast.UnaryOp(op, operand) if type(op) in _UNARY:
            value = _UNARY[type(op)](_compute_value(operand))
        case _:
            raise ValueError("not arithmetic")
    if abs(value) > _LARGEST:
        raise OverflowError
    return value
