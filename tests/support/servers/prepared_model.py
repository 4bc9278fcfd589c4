"""A model endpoint that answers with prepared texts."""

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from whet.io.server import AppServer
from whet.types import Endpoint

PATH = "/rollouts/r/attempts/a/v1"
"""Of an attempt, which is all that a sandbox may reach."""


class PreparedModel:
    """An endpoint that answers with prepared texts, and keeps what it was asked."""

    def __init__(self) -> None:
        self.replies: list[str] = []
        self.requests: list[Any] = []
        self._server = AppServer(
            Starlette(routes=[Route(f"{PATH}/chat/completions", self._answer, methods=["POST"])]),
            name="model",
        )
        self.llm = Endpoint(base_url=f"{self._server.url}{PATH}", api_key="k", model="m")

    async def _answer(self, request: Request) -> JSONResponse:
        self.requests.append(await request.json())
        message = {"role": "assistant", "content": self.replies.pop(0)}
        return JSONResponse({"choices": [{"message": message}]})

    def close(self) -> None:
        self._server.close()
