"""A client at the level of ASGI, which can disconnect at any moment."""

import json
from collections.abc import Callable

import anyio
from starlette.types import Message

from support.gateway.scripted_gateway import Gateway, Json

PATH = "/v1/chat/completions"
BODY: Json = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


class Client:
    """One connection."""

    def __init__(self, gateway: Gateway, body: Json, **headers: str) -> None:
        self.sent: list[Message] = []
        self.gone = anyio.Event()
        self.headed = anyio.Event()
        self.done = anyio.Event()
        self._app = gateway.app
        self._body: bytes | None = json.dumps(body).encode()
        names = {"authorization": f"Bearer {gateway.key}"} | headers
        self._scope: Json = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": PATH,
            "raw_path": PATH.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [
                (name.replace("_", "-").encode(), value.encode()) for name, value in names.items()
            ],
        }

    async def run(self) -> None:
        await self._app(self._scope, self._receive, self._send)
        self.done.set()

    async def _receive(self) -> Json:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if not self.gone.is_set():  # as servers do: a message that has arrived needs no waiting
            await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        self.sent.append(message)
        self.headed.set()


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(5):
        while not condition():
            await anyio.lowlevel.checkpoint()
