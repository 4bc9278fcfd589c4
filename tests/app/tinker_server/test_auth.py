"""Authorization at the level of ASGI, without a server."""

from pathlib import Path
from typing import Any

import anyio
import pytest
from starlette.requests import HTTPConnection, Request

from support.servers.tinker_serving import KEY
from whet.app.tinker_server.app import HEALTH, build_server
from whet.app.tinker_server.storage import Storage
from whet.store.sqlite import SQLiteStore

HOST = "x/api/v1/healthz?"
"""A Host header that makes the URL of every request that of an open path in some starlettes."""


def build_scope(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", HOST.encode())],
    }


async def request_status(path: str, folder: Path) -> int:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async with SQLiteStore(folder / "store.db") as log:
        server = build_server([], Storage(folder), log, KEY)
        await server(build_scope(path), receive, send)
    return sent[0]["status"]


def test_the_check_reads_the_path_that_is_routed_and_never_the_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: HTTPConnection) -> None:
        raise AssertionError("the URL of a request has its Host header in it")

    monkeypatch.setattr(HTTPConnection, "url", property(fail))
    with pytest.raises(AssertionError, match="Host header"):
        _ = Request(build_scope(HEALTH)).url
    assert anyio.run(request_status, HEALTH, tmp_path) == 200, "open to all"
    assert anyio.run(request_status, "/api/v1/training_runs", tmp_path) == 401
    assert anyio.run(request_status, f"{HEALTH}x", tmp_path) == 401
