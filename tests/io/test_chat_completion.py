"""One chat completion: its text and counts, and why there is none."""

import pytest
from pydantic import JsonValue
from starlette.responses import JSONResponse, PlainTextResponse, Response

from support.servers.judge_server import serve_judge
from whet.errors import AgentFailed
from whet.io.chat_completion import Completion, complete
from whet.io.http_client import HttpClient, TransportError
from whet.runners.environments import completion
from whet.types import Endpoint

pytestmark = pytest.mark.anyio

HELLO: dict[str, JsonValue] = {"role": "user", "content": "hello"}


async def test_the_text_comes_with_the_counts_of_tokens() -> None:
    with serve_judge(lambda prompt, n: prompt.upper()) as server:
        async with HttpClient() as http:
            found = await complete(http, f"{server.url}/", {"messages": [HELLO]})
    assert found == Completion("HELLO", 100, 20)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (PlainTextResponse("out of\norder", 500), "status 500: out of order"),
        (JSONResponse({"error": {"message": "unknown model"}}, 404), "status 404: unknown model"),
        (JSONResponse({"detail": "no"}, 403), 'status 403: {"detail":"no"}'),
        (JSONResponse({"error": {"message": None}}, 500), 'status 500: {"error":{"message":null}}'),
        (PlainTextResponse("[" * 100_000), "the response is not a chat completion"),
        (PlainTextResponse("<html>"), "the response is not a chat completion"),
        (JSONResponse([1]), "the response is not a chat completion"),
        (JSONResponse({"choices": []}), "the response is not a chat completion"),
        (JSONResponse({"choices": [{"message": {"content": [1]}}]}), "the response has no text"),
    ],
)
async def test_a_reply_without_a_completion_fails_with_the_reason(
    reply: Response, reason: str
) -> None:
    with serve_judge(lambda prompt, n: reply) as server:
        async with HttpClient() as http:
            with pytest.raises(TransportError, match=f"^{reason}$"):
                await complete(http, server.url, {"messages": [HELLO]})
        endpoint = Endpoint(base_url=server.url, api_key="key", model="policy")
        with pytest.raises(AgentFailed, match=f"^the model call failed: {reason}$"):
            await completion.complete(endpoint, [HELLO])
