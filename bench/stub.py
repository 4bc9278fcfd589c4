"""The stub of `bench/gateway.py`: an ASGI app that sends the replies in a folder.

    python bench/stub.py FOLDER

No framework, so that none is measured along with it. Prints its address, and ends with its input.
"""

import socket
import sys
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import uvicorn

UNIQUE = b"chatcmpl-" + b"0" * 24
"""Stands in stored replies where every reply must have an id of its own."""


def build_app(folder: Path) -> Callable[..., Any]:
    whole = (folder / "whole").read_bytes()
    events = [event + b"\n\n" for event in (folder / "events").read_bytes().split(b"\n\n")[:-1]]
    numbers = count()

    async def app(scope: Any, receive: Any, send: Any) -> None:  # Any: ASGI's own types
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        id = b"chatcmpl-%024x" % next(numbers)
        if b'"stream": true' in body or b'"stream":true' in body:
            await send(_start(b"text/event-stream"))
            for event in events:
                data = event.replace(UNIQUE, id)
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send(_start(b"application/json", (b"content-length", b"%d" % len(whole))))
            await send({"type": "http.response.body", "body": whole.replace(UNIQUE, id)})

    return app


def _start(kind: bytes, *more: tuple[bytes, bytes]) -> dict[str, object]:
    headers = [(b"content-type", kind), *more]
    return {"type": "http.response.start", "status": 200, "headers": headers}


def main(folder: str) -> None:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(
        build_app(Path(folder)),
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
        timeout_keep_alive=120,
    )
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    print(f"bench: http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
