"""Servers in threads of their own: the ports they can listen on, and the requests they accept."""

import socket
from collections.abc import Generator
from urllib.parse import urlsplit

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from whet.errors import ConfigError
from whet.io.server import MAX_HEAD_BYTES, AppServer, listen


async def count(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"{len(await request.body())} bytes")


@pytest.fixture
def server() -> Generator[AppServer]:
    server = AppServer(Starlette(routes=[Route("/", count, methods=["POST"])]))
    yield server
    server.close()


def send(server: AppServer, request: bytes) -> bytes:
    """The response to a request, up to the end of the connection."""
    url = urlsplit(server.url)
    with socket.create_connection((url.hostname, url.port), timeout=30) as connection:
        connection.sendall(request)
        return connection.makefile("rb").read()


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_no_machine_has_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"invalid port {port}: expected 0 to 65535"):
        listen("127.0.0.1", port, "--port")


@pytest.mark.parametrize("header", [b"x: " + b"a" * MAX_HEAD_BYTES, b"x: a\r\n" * MAX_HEAD_BYTES])
def test_headers_that_never_end_are_refused(server: AppServer, header: bytes) -> None:
    head = b"POST / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
    endless = (head + header)[: MAX_HEAD_BYTES + 1]
    assert send(server, endless).startswith(b"HTTP/1.1 400 ")
    body = b"a" * (2 * MAX_HEAD_BYTES)
    length = b"content-length: %d\r\n\r\n" % len(body)
    assert send(server, head + length + body).endswith(b"\r\n%d bytes" % len(body))
