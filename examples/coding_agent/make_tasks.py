"""Write small functions with their tests: `train.jsonl` and `held_out.jsonl`, 60 tasks each.

    python make_tasks.py FOLDER

Numbers of the training tasks are odd and those of the held-out tasks even. What a test expects is
computed from a right answer.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple, TypedDict


class Kind(NamedTuple):
    """A kind of function, with a place for a number."""

    question: str
    answer: str
    """What a right function of one argument `x` returns."""
    mistake: str
    """What a wrong one returns, in the dialogues of `warmup.py`."""
    arguments: tuple[object, ...]


KINDS = [
    Kind("returns the number plus {}", "x + {}", "x - {}", (4, -3)),
    Kind("returns the number minus {}", "x - {}", "{} - x", (50, 2)),
    Kind("returns the number times {}", "x * {}", "x + {}", (3, -2)),
    Kind("returns the square of the number plus {}", "x * x + {}", "x + {}", (3, -5)),
    Kind("returns the larger one of the number and {}", "max(x, {})", "min(x, {})", (1, 30)),
    Kind("returns the remainder of the number divided by {}", "x % {}", "x // {}", (47, 100)),
    Kind("returns True if the number is larger than {}, else False", "x > {}", "x < {}", (1, 99)),
    Kind("returns the text {} times in a row", "x * {}", "[x] * {}", ("ab", "c")),
    Kind("returns the first {} letters of the text", "x[:{}]", "x[{}:]", ("abcdefghijklmn", "z")),
    Kind("returns the sum of the list plus {}", "sum(x) + {}", "sum(x) - {}", ([1, 2], [])),
]
NUMBERS = {"train": range(3, 15, 2), "held_out": range(2, 14, 2)}


class Task(TypedDict):
    """A task of `agent.py`."""

    question: str
    tests: list[str]


def make_task(kind: Kind, number: int) -> Task:
    """Make a question, and tests that a right answer passes."""
    expression = kind.answer.format(number)
    tests: list[str] = []
    for argument in kind.arguments:
        expected = eval(expression, {"x": argument})
        tests.append(f"assert f({argument!r}) == {expected!r}")
    question = f"Write the function `f(x)`, which {kind.question.format(number)}."
    return {"question": question, "tests": tests}


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    for split, numbers in NUMBERS.items():
        tasks = [make_task(kind, number) for number in numbers for kind in KINDS]
        file = folder / f"{split}.jsonl"
        file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
        print(f"{len(tasks)} tasks in {file}")


if __name__ == "__main__":
    main()
