"""The airline: a small database, the tools over it, the tasks, and what is checked at the end.

The tools do what they are told: whether an operation is allowed is the policy's matter, and so the
assistant's. A task names the state that the database should have in the end, and what the customer
should have been told.
"""

import copy
import json
import random
from pathlib import Path
from typing import Any, Literal

Split = Literal["train", "test"]
Task = dict[str, Any]

POLICY = Path(__file__).with_name("policy.md").read_text().strip()
NAMES = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Hana", "Ivan", "Kim", "Leo", "Mia", "Noah"]
KINDS = ["cancel flex", "cancel basic", "change flex", "change basic", "change full"]
TASKS = 120
FEE = 20
FIELDS = {"code": "code of the booking", "flight": "number of the flight"}


def tool(name: str, description: str, *fields: str) -> Any:
    properties = {field: {"type": "string", "description": FIELDS[field]} for field in fields}
    parameters = {"type": "object", "properties": properties, "required": list(fields)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool("find_booking", "Looks up a booking.", "code"),
    tool("count_seats", "Free seats of a flight.", "flight"),
    tool("cancel_booking", "Cancels and pays back.", "code"),
    tool("change_flight", "Moves a booking.", "code", "flight"),
]


class Desk:
    """The database of one conversation, and the tools over it."""

    def __init__(self, task: Task) -> None:
        self.state: Any = copy.deepcopy(task["database"])

    def use(self, name: str, arguments: str) -> str:
        """Result of a tool call, or what is wrong with it."""
        tools = {
            "find_booking": self._find,
            "count_seats": self._count,
            "cancel_booking": self._cancel,
            "change_flight": self._change,
        }
        try:
            return tools[name](**json.loads(arguments))
        except (KeyError, TypeError, ValueError) as error:
            return f"error: {type(error).__name__} {error}"

    def _find(self, code: str) -> str:
        booking = self.state["bookings"][code]
        return f"{booking['ticket']} ticket, flight {booking['flight']}, price {booking['price']}"

    def _count(self, flight: str) -> str:
        return f"{self.state['flights'][flight]} seats"

    def _cancel(self, code: str) -> str:
        self.state["bookings"][code]["status"] = "canceled"
        return f"canceled, {self.state['bookings'][code]['price']} paid back"

    def _change(self, code: str, flight: str) -> str:
        booking = self.state["bookings"][code]
        self.state["flights"][flight] -= 1
        self.state["flights"][booking["flight"]] += 1
        booking["flight"] = flight
        return f"changed to {flight}"


def check(task: Task, state: Any, answers: list[str]) -> dict[str, bool]:
    """Whether the database is as it should be, and the customer was told what matters."""
    text = " ".join(answers).lower()
    return {
        "state": state == task["expected"],
        "communication": all(word.lower() in text for word in task["tell"]),
    }


def tasks(split: Split) -> list[Task]:
    """Half of the tasks: those of the test split have codes that are in no other one."""
    return [make_task(n, random.Random(f"{split} {n}"), split) for n in range(TASKS // 2)]


def make_task(number: int, rng: random.Random, split: Split) -> Task:
    """A customer with a wish, who has a booking in a database with another one."""
    kind = KINDS[number % len(KINDS)]
    wish, what = kind.split()
    ticket = rng.choice(["flex", "basic"]) if what == "full" else what
    code, other = (draw_code(rng, split, place) for place in range(2))
    flight, new = (str(n) for n in rng.sample(range(11, 100), 2))
    price = 10 * rng.randint(5, 19)
    booking = {"ticket": ticket, "flight": flight, "price": price, "status": "booked"}
    spare = booking | {"ticket": rng.choice(["flex", "basic"])}
    seats = 0 if what == "full" else rng.randint(1, 9)
    database: Any = {"bookings": {code: booking, other: spare}, "flights": {flight: 0, new: seats}}
    desk = Desk({"database": database})
    tell = {"cancel": [str(price)], "change": [new] if ticket == "flex" else [new, str(FEE)]}[wish]
    if kind == "cancel flex":
        desk.use("cancel_booking", json.dumps({"code": code}))
    elif kind == "cancel basic":
        tell = ["cannot"]
    elif what == "full":
        tell = ["full"]
    else:
        desk.use("change_flight", json.dumps({"code": code, "flight": new}))
    wants = "cancel your booking" if wish == "cancel" else f"change your flight to {new}"
    return {
        "id": f"{split}-{number}",
        "kind": kind,
        "code": code,
        "new": new,
        "customer": f"You are {rng.choice(NAMES)}. You want to {wants}. Your code is {code}.",
        "database": database,
        "expected": desk.state,
        "tell": tell,
    }


def draw_code(rng: random.Random, split: Split, place: int) -> str:
    """A letter and a number: even in tests, odd in training; of two in a task no two are equal."""
    letter = rng.choice("ABCDEFGHJKLM" if place == 0 else "NPQRSTUVWXYZ")
    return f"{letter}{2 * rng.randint(5, 49) + (split == 'train')}"
