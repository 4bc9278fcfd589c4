"""What of the `tinker` client works here, as the tests that show it say themselves."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import tinker
from tinker.lib.public_interfaces.rest_client import RestClient

PAGE = Path(__file__).parents[2] / "docs" / "tinker.md"
MODULES = ("test_training", "test_samples", "test_listing", "test_restart", "test_refusals")
CLIENTS: tuple[type, ...] = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    RestClient,
)
NOT_OF_THE_WIRE = {
    "create",
    "create_rest_client",
    "get_console_url",
    "get_telemetry",
    "holder",
    "on_queue_state_change",
}
"""Methods that make addresses of the hosted console, or are the client's own business."""

Test = Callable[..., Any]


class Line(NamedTuple):
    """A line of the table."""

    method: str
    works: bool
    note: str
    test: str


def shows(*methods: str, note: str = "") -> Callable[[Test], Test]:
    """The test shows that these methods do what the client expects."""
    return _marked(methods, True, note)


def refuses(*methods: str, note: str) -> Callable[[Test], Test]:
    """The test shows that these are refused, at once and with a reason."""
    return _marked(methods, False, note)


def _marked(methods: tuple[str, ...], works: bool, note: str) -> Callable[[Test], Test]:
    def mark(test: Test) -> Test:
        place = f"{test.__module__.split('.')[-1]}.py"
        lines = [Line(method, works, note, f"{place}: {test.__name__}") for method in methods]
        test.conforms = [*getattr(test, "conforms", ()), *lines]
        return test

    return mark


def lines() -> list[Line]:
    """Of all tests, in the order of the client's own methods."""
    found = [
        line
        for name in MODULES
        for _, test in inspect.getmembers(importlib.import_module(name), inspect.isfunction)
        for line in getattr(test, "conforms", ())
    ]
    order = methods()
    return sorted(found, key=lambda line: (order.index(line.method), not line.works, line.test))


def methods() -> list[str]:
    """What the client offers; an `_async` twin asks for the same."""
    return [
        f"{client.__name__}.{name}"
        for client in CLIENTS
        for name in vars(client)
        if not name.startswith("_") and not name.endswith("_async") and name not in NOT_OF_THE_WIRE
    ]


def table() -> str:
    """The table of docs/tinker.md."""
    head = "| method | here | shown by |\n|---|---|---|\n"
    return head + "".join(
        f"| `{line.method}` | {'yes' if line.works else 'refused'}"
        f"{': ' + line.note if line.note else ''} | `{line.test}` |\n"
        for line in lines()
    )
