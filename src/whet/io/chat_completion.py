"""One chat completion of an OpenAI-compatible endpoint, for callers that need its text alone."""

from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from pydantic import JsonValue

from whet.io.http_client import HttpClient, Response, TransportError

MAX_REPLY_BYTES = 4 * 2**20
SHOWN_CHARS = 300


class Completion(NamedTuple):
    """Text of a reply, and the tokens it cost."""

    text: str
    input_tokens: int = 0
    output_tokens: int = 0


async def complete(
    http: HttpClient,
    base_url: str,
    body: Mapping[str, JsonValue],
    *,
    timeout_s: float | None = None,
) -> Completion:
    """Request one completion. Raises TransportError for an error status or an invalid reply."""
    url = f"{base_url.rstrip('/')}/chat/completions"
    response = await http.request(
        "POST", url, json=dict(body), timeout_s=timeout_s, max_bytes=MAX_REPLY_BYTES
    )
    if response.status != 200:
        raise TransportError(f"status {response.status}: {_read_error(response)}")
    try:
        value = response.json()
        text = value["choices"][0]["message"]["content"] or ""
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise TransportError("the response is not a chat completion") from error
    if not isinstance(text, str):
        raise TransportError("the response has no text")
    usage = value.get("usage")
    return Completion(text, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"))


def _read_error(response: Response) -> str:
    """The message of an error as OpenAI's API sends it, else the body, in one line."""
    text = response.body.decode(errors="replace")
    with suppress(ValueError, KeyError, TypeError):
        text = str(response.json()["error"]["message"] or text)
    return " ".join(text.split())[:SHOWN_CHARS]


def _count(usage: JsonValue, name: str) -> int:
    """Return a count of tokens from the reply; 0 if it is missing or invalid."""
    value = usage.get(name) if isinstance(usage, dict) else None
    return value if isinstance(value, int) and value >= 0 else 0
