"""Shared parts of the wire formats: fields, text, tools, sampling, events, errors."""

import logging
from collections.abc import Collection, Sequence
from functools import cache
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, SkipValidation, ValidationError

from whet.errors import RequestError
from whet.gateway.dialects.dialect import ErrorFormat, Json, WireError
from whet.gateway.messages import OMITTED_IMAGE, dump_json, parse_json
from whet.gateway.templates.chat_template import ChatTemplate
from whet.types import Call, Generation, Sampling

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=BaseModel)

AnyJson = Annotated[JsonValue, SkipValidation]
"""Any JSON value. It was parsed as JSON, so validating each value again would only cost time."""

Zero = Annotated[float, Field(ge=0, le=0)]
"""A penalty that is not supported: only the value that disables it is accepted."""

One = Annotated[float, Field(ge=1, le=1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
StopStrings = Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=64)]
Tools = Annotated[tuple[T, ...], Field(max_length=1024, strict=False, fail_fast=True)]
"""The tools of a request. As in every list, the first invalid item is reported, and not each: a
body has room for millions, which would take minutes and all memory."""

MIN_LOGPROB = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON lacks."""

TopsByToken = Sequence[tuple[tuple[int, float], ...]]
"""Most likely ids of each token; empty where they were not requested, or not kept."""

DONE = b"data: [DONE]\n\n"
"""The last event of a stream of completions."""

UNION_BRANCHES = {"str", "int", "float", "bool"}


# ------------------------------------------------------------------- requests


class Wire(BaseModel):
    """A request, strictly typed: unknown fields are refused by name."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Lenient(BaseModel):
    """Part of a message: SDKs echo fields of their own, which mean nothing to a model."""

    model_config = ConfigDict(extra="ignore", strict=True)


class SamplingFields(Wire):
    """The sampling fields that every format has."""

    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None

    def to_sampling(
        self,
        *,
        max_tokens: int | None,
        stop: str | list[str] | None = None,
        seed: int | None = None,
        top_logprobs: int = 0,
    ) -> Sampling:
        """Convert to the engine's sampling parameters; the request has been validated."""
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        return Sampling.unchecked(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=self.top_p or 1.0,
            top_k=max(0, self.top_k or 0),
            max_tokens=max_tokens,
            stop=tuple(text for text in stops if text),
            stop_ids=(),
            seed=seed,
            top_logprobs=top_logprobs,
            grammar=None,
        )


def parse_body(model: type[T], body: bytes) -> T:
    """Parse and validate a request; null is the same as absent.

    Raises:
        RequestError: names the first invalid field.
    """
    try:
        value = parse_json(body)
        if isinstance(value, dict):
            value = {name: part for name, part in value.items() if part is not None}
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    # Where a union failed, the location includes the name of a branch, which clients do not know.
    where = ".".join(str(part) for part in first["loc"] if not _is_branch(part))
    if first["type"] == "extra_forbidden":
        raise RequestError(f"the field {where!r} is not supported")
    if first["type"] in ("model_type", "dict_type"):
        raise RequestError(f"{where or 'the body'}: input should be an object")
    raise RequestError(f"{where}: {first['msg'][:300].lower()}")


def _is_branch(part: int | str) -> bool:
    return isinstance(part, str) and (not part.islower() or part in UNION_BRANCHES)


def read_text(
    content: JsonValue, where: str, kinds: Collection[str], images: Collection[str] = ()
) -> str:
    """Return the text of a string or of parts, joined by line breaks as vLLM joins them.

    Parts of the kinds `images` become a line that says so: an agent cannot choose what a tool
    returns, and an error would end its rollout.

    Raises:
        RequestError: a part is invalid, or not of these kinds.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where}: expected text or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = read_type(part, f"{where}.{index}")
        if kind in images:
            texts.append(OMITTED_IMAGE)
            continue
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in kinds:
            raise RequestError(f"{where}.{index}: parts of type {kind!r} are not supported")
        if not isinstance(text, str):
            raise RequestError(f"{where}.{index}.text: expected text")
        texts.append(text)
    return "\n".join(texts)


def read_type(part: JsonValue, where: str) -> str:
    """Return the `type` of a part, a block or an item. Raises RequestError if it has none."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise RequestError(f"{where}.type: expected the name of a type")
    return kind


@cache
def omit_tool(kind: str) -> None:
    """Warn once that tools of a type are left out of prompts, since no model here can run them."""
    logger.warning("tools of type %r are left out of prompts: no model here can use them", kind)


def build_tool(name: str, description: str | None, parameters: JsonValue, more: Json) -> Json:
    """Build a function tool in the form that templates use.

    `strict` is left out: it is meant for the server, and constrains nothing here.
    """
    function: Json = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    function |= {key: value for key, value in more.items() if key != "strict"}
    return {"type": "function", "function": function}


# ------------------------------------------------------------------- replies


def format_event(event: Json, name: str = "") -> bytes:
    """Format a server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + dump_json(event) + b"\n\n"


def format_usage(call: Call) -> Json:
    """Format token counts for Chat Completions and Completions."""
    sampled = sum(len(generation.tokens) for generation in call.generations)
    return {
        "prompt_tokens": call.prompt_length,
        "completion_tokens": sampled,
        "total_tokens": call.prompt_length + sampled,
    }


def format_error(error: WireError) -> Json:
    """Format an error for OpenAI's APIs."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {"message": error.message, "type": kind, "param": None, "code": error.code},
    }


def format_error_event(error: WireError) -> bytes:
    """Format an error as an event of OpenAI's completions."""
    return format_event(format_error(error))


OPENAI_ERRORS = ErrorFormat(format_error, format_error_event)


def find_stop_string(generation: Generation, template: ChatTemplate) -> str | None:
    """Return the stop string that ended a generation, or None if something else did."""
    stops = generation.sampling.stop
    if generation.stop != "stop" or not stops:
        return None
    text = template.decode(generation.tokens)
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


def format_logprobs(
    template: ChatTemplate, tokens: Sequence[int], logprobs: Sequence[float], tops: TopsByToken
) -> list[JsonValue]:
    """Format one entry for each token, for Chat Completions and Responses."""
    entries: list[JsonValue] = []
    for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
        entry = _format_logprob(template, token, logprob)
        top = tops[at] if tops else ()
        entry["top_logprobs"] = [_format_logprob(template, id, value) for id, value in top]
        entries.append(entry)
    return entries


def _format_logprob(template: ChatTemplate, id: int, logprob: float) -> Json:
    text = template.get_token_text(id)
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(text.encode())}
