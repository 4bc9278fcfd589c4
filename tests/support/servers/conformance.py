"""Methods of the `tinker` client that the server supports, as declared by their tests.

A test that declares one has to call the method: `watch` notes the calls, and conftest.py compares.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tinker

SUITE = Path(__file__).parents[2] / "app" / "tinker_server"
PAGE = Path(__file__).parents[3] / "docs" / "guides" / "backends" / "tinker.md"
MODULES = tuple(
    f"app.tinker_server.test_{name}"
    for name in ("training", "samples", "listing", "restart", "refusals")
)
CLIENTS: tuple[type, ...] = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    tinker.AdminClient,
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
    return _marked(dict.fromkeys(methods, note), works=True)


def refuses(reasons: Mapping[str, str]) -> Callable[[Test], Test]:
    """The test, run once for each `method` with its `reason`, shows that it is refused so."""
    each = pytest.mark.parametrize(("method", "reason"), reasons.items(), ids=list(reasons))
    mark = _marked(reasons, works=False)
    return lambda test: each(mark(test))


def _marked(notes: Mapping[str, str], *, works: bool) -> Callable[[Test], Test]:
    def mark(test: Test) -> Test:
        place = f"{test.__module__.split('.')[-1]}.py: {test.__name__}"
        lines = [Line(method, works, note, place) for method, note in notes.items()]
        vars(test)["conforms"] = [*getattr(test, "conforms", ()), *lines]
        return test

    return mark


def shown_by(test: Test) -> set[str]:
    """The methods that a test says it shows."""
    return {line.method for line in getattr(test, "conforms", ()) if line.works}


def watch(called: set[str]) -> None:
    """Note what tests call from now on; what the client calls by itself is not theirs."""
    for client in CLIENTS:
        for name, method in list(vars(client).items()):
            if not name.startswith("_") and callable(method):
                setattr(client, name, _watched(method, f"{client.__name__}.{name}", called))


def _watched(method: Any, name: str, called: set[str]) -> Any:
    static = isinstance(method, staticmethod)
    function: Callable[..., Any] = method.__func__ if static else method

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        if Path(sys._getframe(1).f_code.co_filename).parent == SUITE:
            called.add(name)
        return function(*args, **kwargs)

    return staticmethod(noted) if static else noted


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
    """The client's methods; an `_async` twin sends the same request."""
    return [
        f"{client.__name__}.{name}"
        for client in CLIENTS
        for name in vars(client)
        if not name.startswith("_") and not name.endswith("_async") and name not in NOT_OF_THE_WIRE
    ]


def table() -> str:
    """The table of docs/guides/backends/tinker.md."""
    head = "| method | here | shown by |\n|---|---|---|\n"
    return head + "".join(
        f"| `{line.method}` | {'yes' if line.works else 'refused'}"
        f"{': ' + line.note if line.note else ''} | `{line.test}` |\n"
        for line in lines()
    )
