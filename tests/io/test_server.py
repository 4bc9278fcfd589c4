"""Servers in threads of their own: the ports that they can listen on."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from select import select

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from whet.errors import ConfigError
from whet.io.server import AppServer, listen


@pytest.fixture
def port() -> Iterator[int]:
    async def count(request: Request) -> Response:
        return PlainTextResponse(str(len(await request.body())))

    async def refuse(request: Request) -> Response:
        return PlainTextResponse("no", 401)

    routes = [Route("/", count, methods=["GET", "POST"]), Route("/no", refuse, methods=["POST"])]
    server = AppServer(Starlette(routes=routes), head_timeout_s=0.5)
    yield int(server.url.rpartition(":")[2])
    server.close()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost:"])
def test_a_connection_without_a_whole_request_is_closed(port: int, sent: bytes) -> None:
    with connect(port) as connection:
        connection.sendall(sent)
        assert connection.recv(1) == b""


def test_a_connection_is_kept_for_its_next_request_however_large_the_first(port: int) -> None:
    with connect(port) as connection:
        for size in (5 * 2**20, 0, 3):
            head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
            connection.sendall(head.encode() + b"x" * size)
            reply = connection.recv(4096).decode()
            assert reply.endswith(f"\r\n\r\n{size}"), reply
            if not size:
                assert select([connection], [], [], 1)[0] == []


def test_a_refused_request_that_does_not_end_is_closed(port: int) -> None:
    with connect(port) as connection:
        for body in (b"12", b"1"):  # after a whole one
            connection.sendall(b"POST /no HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n" + body)
            assert connection.recv(4096).startswith(b"HTTP/1.1 401")
        assert connection.recv(1) == b""


def test_headers_without_end_are_refused(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nX: ")
        with suppress(ConnectionError):
            for _ in range(64):
                connection.sendall(b"a" * 2**18)
        with suppress(ConnectionResetError):
            assert b" 431 " in connection.recv(100)


def test_trailers_without_end_close_the_connection(port: int) -> None:
    with connect(port) as connection:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"1\r\nx\r\n0\r\nX: ")
        with pytest.raises(ConnectionError):
            connection.sendall(b"a" * 2**24)


def test_a_large_body_in_small_chunks_is_received(port: int) -> None:
    with connect(port) as connection:
        head = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        connection.sendall(head + b"1\r\nx\r\n" * 2**18 + b"0\r\nX: 1\r\n\r\n")
        assert connection.recv(4096).decode().endswith(f"\r\n\r\n{2**18}")


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_no_machine_has_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=f"invalid port {port}: expected 0 to 65535"):
        listen("127.0.0.1", port, "--port")
