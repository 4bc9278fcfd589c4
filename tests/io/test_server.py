"""The ASGI server: writes are joined, and a client that does not read pauses the sender."""

import asyncio
import socket
import threading
from collections.abc import Generator
from contextlib import contextmanager
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from whet.io.server import AppServer

REQUEST = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


@contextmanager
def connected(app: ASGIApp) -> Generator[socket.socket]:
    """Serve an app, and send it a request that the test reads the response of."""
    server = AppServer(app)
    address = urlsplit(server.url)
    try:
        with socket.create_connection((address.hostname, address.port), timeout=10) as client:
            client.sendall(REQUEST)
            yield client
    finally:
        server.close()


async def start(send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})


def test_the_head_of_a_response_and_its_first_chunk_arrive_together() -> None:
    may_end = threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await start(send)
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await asyncio.to_thread(may_end.wait)
        await send({"type": "http.response.body", "body": b"last"})

    with connected(app) as client:
        received = client.recv(2**16)
        assert received.startswith(b"HTTP/1.1 200")
        assert received.endswith(b"first\r\n")  # before the rest is there
        may_end.set()
        assert client.recv(2**16).endswith(b"last\r\n0\r\n\r\n")


def test_a_sender_waits_for_a_client_that_does_not_read() -> None:
    chunk, count = b"x" * 2**16, 1000
    sent, is_suspended = list[int](), threading.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await start(send)
        asyncio.get_running_loop().call_soon(is_suspended.set)
        for number in range(count):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            sent.append(number)
        await send({"type": "http.response.body", "body": b""})

    with connected(app) as client:
        assert is_suspended.wait(10)
        assert len(sent) < count
        received = 0
        while data := client.recv(2**20):
            received += data.count(b"x")
    assert received == count * len(chunk)
