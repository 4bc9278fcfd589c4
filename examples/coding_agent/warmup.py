"""Write dialogues for a warm-up: a programmer who knows the form of an answer and often errs.

    python warmup.py FILE [COUNT]

Four in five of its answers have the usual mistake of their kind, such as `x - 21` for a sum. RL is
to teach what is right. The numbers of these dialogues are in no task.
"""

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from agent import SYSTEM, TURNS
from make_tasks import KINDS, Kind, make_task

RIGHT = 0.2
"""Share of right answers."""
NUMBERS = range(15, 46)


def make_dialogue(kind: Kind, number: int, rng: random.Random) -> list[dict[str, str]]:
    """A conversation with `agent.py`."""
    task = make_task(kind, number)
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": task["question"]},
    ]
    for turn in range(TURNS):
        right = rng.random() < RIGHT
        expression = (kind.answer if right else kind.mistake).format(number)
        reply = f"```python\ndef f(x):\n    return {expression}\n```"
        messages.append({"role": "assistant", "content": reply})
        if right or turn == TURNS - 1:
            break
        failure = f"This test fails:\n{task['tests'][0]}\nAssertionError"
        messages.append({"role": "user", "content": failure})
    return messages


def make_dialogues(count: int) -> Iterator[dict[str, list[dict[str, str]]]]:
    for number in range(count):
        rng = random.Random(f"warm-up {number}")
        kind = KINDS[number % len(KINDS)]
        yield {"messages": make_dialogue(kind, rng.choice(NUMBERS), rng)}


def main() -> None:
    file = Path(sys.argv[1] if len(sys.argv) > 1 else "dialogues.jsonl")
    count = int(sys.argv[2]) if len(sys.argv) > 2 else 600
    file.write_text("".join(json.dumps(dialogue) + "\n" for dialogue in make_dialogues(count)))
    print(f"{count} dialogues in {file}")


if __name__ == "__main__":
    main()
