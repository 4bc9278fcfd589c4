"""Answers of `whet chat`, as they are streamed."""

import json

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from whet.app.inspection.terminal_chat import stream_answer
from whet.errors import EngineError
from whet.io.server import AppServer
from whet.types import Endpoint


@pytest.mark.anyio
async def test_an_answer_that_fails_in_the_middle_is_one_error() -> None:
    async def answer(request: Request) -> StreamingResponse:
        events = [{"choices": [{"delta": {"content": "Ne"}}]}, {"error": {"message": "no memory"}}]
        return StreamingResponse(f"data: {json.dumps(event)}\n\n" for event in events)

    server = AppServer(Starlette(routes=[Route("/chat/completions", answer, methods=["POST"])]))
    endpoint = Endpoint(base_url=server.url, api_key="x", model="m")
    texts = stream_answer(endpoint, [{"role": "user", "content": "Hi"}], 1.0)
    try:
        assert await anext(texts) == "Ne"
        with pytest.raises(EngineError, match="the model does not answer: no memory"):
            await anext(texts)
    finally:
        server.close()
