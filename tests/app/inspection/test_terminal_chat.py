"""`whet chat` against a gateway that fails in the middle of an answer."""

import argparse
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from whet.app.inspection.terminal_chat import _stream
from whet.errors import EngineError
from whet.gateway.dialects.dialect import WireError
from whet.gateway.dialects.wire import format_error_event, format_event
from whet.io.server import AppServer
from whet.types import Endpoint


@pytest.mark.anyio
async def test_an_answer_that_breaks_off_ends_with_the_reason() -> None:
    async def stream() -> AsyncGenerator[bytes]:
        yield format_event({"choices": [{"delta": {"content": "Hel"}}]})
        yield format_error_event(WireError(503, "engine_error", "sampling failed"))

    async def answer(request: Request) -> Response:
        return StreamingResponse(stream(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/v1/chat/completions", answer, methods=["POST"])])
    server = AppServer(app)
    endpoint = Endpoint(base_url=f"{server.url}/v1", api_key="none", model="mine")
    args = argparse.Namespace(temperature=1.0, max_tokens=None)
    async with aclosing(_stream(endpoint, [{"role": "user", "content": "hi"}], args)) as texts:
        assert await anext(texts) == "Hel"
        with pytest.raises(EngineError, match="sampling failed"):
            await anext(texts)
    server.close()
