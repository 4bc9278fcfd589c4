"""Log-probabilities as OpenAI's formats show them."""

from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.dialects.dialect import Json
from whet.gateway.template import ChatTemplate

FLOOR = -9999.0
"""JSON has no minus infinity; this is what OpenAI says instead."""

Tops = Sequence[tuple[tuple[int, float], ...]]
"""For each token the likeliest ids; empty where they were not asked for, or not kept."""


def token_logprobs(
    template: ChatTemplate, tokens: Sequence[int], logprobs: Sequence[float], tops: Tops
) -> list[JsonValue]:
    """One entry a token, as Chat Completions and Responses have them."""
    entries: list[JsonValue] = []
    for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        likeliest = tops[at] if tops else ()
        entry = _entry(template, token, logprob)
        entry["top_logprobs"] = [_entry(template, id, value) for id, value in likeliest]
        entries.append(entry)
    return entries


def _entry(template: ChatTemplate, id: int, logprob: float) -> Json:
    text = template.token_text(id)
    return {"token": text, "logprob": max(logprob, FLOOR), "bytes": list(text.encode())}
