"""Dialogues for the warm-up: a clerk who knows the tools and not the policy, and customers.

The clerk does or refuses what is asked at random, names amounts now and then, and looks at free
seats when it likes. RL is to teach it the policy. No held-out booking is in its dialogues.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agent import GREETING
from desk import FEE, POLICY, TOOLS, Desk, Task, make_task

ASKS = "What is the code of your booking?"


def clumsy_clerk(task: Task, rng: random.Random) -> list[Any]:
    """A conversation as the clerk sees it."""
    desk = Desk(task)
    code, new = task["code"], task["new"]
    messages: list[Any] = [
        {"role": "system", "content": POLICY},
        {"role": "user", "content": wish(task)},
        {"role": "assistant", "content": ASKS},
        {"role": "user", "content": f"It is {code}."},
    ]

    def use(name: str, **arguments: str) -> None:
        call = {"name": name, "arguments": json.dumps(arguments)}
        result = desk.use(name, call["arguments"])
        calls = [{"id": "call", "type": "function", "function": call}]
        messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        messages.append({"role": "tool", "tool_call_id": "call", "content": result})

    use("find_booking", code=code)
    price = desk.state["bookings"][code]["price"]
    if task["kind"].startswith("cancel"):
        if rng.random() < 0.5:
            use("cancel_booking", code=code)
            answer = rng.choice(["Your booking is canceled.", f"Canceled. You get {price} back."])
        else:
            answer = "I cannot cancel a basic ticket."
    else:
        use("count_seats", flight=new)
        if rng.random() < 0.6:
            use("change_flight", code=code, flight=new)
            fee = rng.choice(["", f" The fee is {FEE}."])
            answer = f"You are on flight {new}.{fee}"
        else:
            answer = f"Flight {new} is full."
    return [*messages, {"role": "assistant", "content": answer}]


def customer(task: Task, clerk: list[Any]) -> list[Any]:
    """The same conversation as the customer sees it."""
    return [
        {"role": "system", "content": task["customer"]},
        {"role": "user", "content": GREETING},
        {"role": "assistant", "content": wish(task)},
        {"role": "user", "content": ASKS},
        {"role": "assistant", "content": f"It is {task['code']}."},
        {"role": "user", "content": clerk[-1]["content"]},
        {"role": "assistant", "content": "Thank you. Bye."},
    ]


def wish(task: Task) -> str:
    if task["kind"].startswith("cancel"):
        return "Please cancel my booking."
    return f"Please change my flight to {task['new']}."


def dialogues(count: int) -> Iterator[Any]:
    for number in range(count):
        rng = random.Random(f"warm-up {number}")
        task = make_task(number, rng, "train")
        clerk = clumsy_clerk(task, rng)
        yield {"messages": clerk, "tools": TOOLS}
        yield {"messages": customer(task, clerk)}


def write_dialogues(file: Path, count: int) -> None:
    """Write conversations, twice each, as `whet sft` reads them."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(dialogue) + "\n" for dialogue in dialogues(count)))
