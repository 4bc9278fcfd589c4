"""One chat completion at an attempt's endpoint, for environments whose loop is ours."""

from collections.abc import Sequence

from pydantic import JsonValue

from whet.errors import AgentFailed
from whet.io import chat_completion
from whet.io.http_client import HttpClient, TransportError
from whet.types import Endpoint

JsonMessage = dict[str, JsonValue]


async def complete(
    llm: Endpoint, messages: Sequence[JsonMessage], *, max_tokens: int | None = None
) -> str:
    """Return the text of the model's reply. Raises AgentFailed."""
    body: dict[str, JsonValue] = {"model": llm.model, "messages": list(messages)}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    try:
        async with HttpClient(token=llm.api_key) as http:
            return (await chat_completion.complete(http, llm.base_url, body)).text
    except TransportError as error:
        raise AgentFailed(f"the model call failed: {error}") from error
