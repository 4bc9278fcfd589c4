"""What the wire formats have in common: how they say text, tools and sampling."""

from collections.abc import Collection
from functools import lru_cache
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, JsonValue, SkipValidation

from whet.errors import RequestError
from whet.gateway import strictjson
from whet.gateway.dialects.dialect import Json, Told
from whet.types import Call, Sampling

AnyJson = Annotated[JsonValue, SkipValidation]
"""Any JSON. It was read as JSON, so it is: to check each value of it once more would cost much."""

Off = Annotated[float, Field(ge=0, le=0)]
"""A penalty we do not apply: only the value that means "none" is taken."""

One = Annotated[float, Field(ge=1, le=1)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Stops = Annotated[list[Annotated[str, Field(max_length=1024)]], Field(max_length=64)]
MOST_TOOLS = 1024


class Wire(BaseModel):
    """A request: a field we do not know is refused by name, and types are taken as they come."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Lenient(BaseModel):
    """Part of a message: SDKs echo fields of their own, which mean nothing to a model."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Sampled(Wire):
    """The sampling fields every format has."""

    temperature: Annotated[float, Field(ge=0, le=10)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None

    def sampling(
        self,
        *,
        max_tokens: int | None,
        stop: str | list[str] | None = None,
        seed: int | None = None,
        top_logprobs: int = 0,
    ) -> Sampling:
        """As the engine takes it."""
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        return _sampling(
            1.0 if self.temperature is None else self.temperature,
            self.top_p or 1.0,
            max(0, self.top_k or 0),
            max_tokens,
            stops,
            seed,
            top_logprobs,
        )


@lru_cache(1024)
def _sampling(
    temperature: float,
    top_p: float,
    top_k: int,
    max_tokens: int | None,
    stops: tuple[str, ...],
    seed: int | None,
    top_logprobs: int,
) -> Sampling:
    """One value for all who ask for the same. The request was checked: nothing is checked again."""
    return Sampling.unchecked(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        stop=tuple(text for text in stops if text),
        stop_ids=(),
        seed=seed,
        top_logprobs=top_logprobs,
        grammar=None,
    )


def text_of(content: JsonValue, where: str, kinds: Collection[str]) -> str:
    """The text of a string or of parts, joined by line breaks as vLLM joins them.

    Raises:
        RequestError: a part is of none of these kinds, or not a part at all.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise RequestError(f"{where}: expected text or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        kind = kind_of(part, f"{where}.{index}")
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if kind not in kinds:
            raise RequestError(f"{where}.{index}: parts of type {kind!r} are not supported")
        if not isinstance(text, str):
            raise RequestError(f"{where}.{index}.text: expected text")
        texts.append(text)
    return "\n".join(texts)


def kind_of(part: JsonValue, where: str) -> str:
    """The `type` of a part, a block or an item. Raises RequestError if it has none."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise RequestError(f"{where}.type: expected the name of a type")
    return kind


def tool(name: str, description: str | None, parameters: JsonValue, more: Json) -> Json:
    """A function tool in the one form templates see, whatever format it came in.

    `strict` is left out: it is said to the server, and constrains nothing here.
    """
    function: Json = {"name": name}
    if description is not None:
        function["description"] = description
    if parameters is not None:
        function["parameters"] = parameters
    function |= {key: value for key, value in more.items() if key != "strict"}
    return {"type": "function", "function": function}


def sse(event: Json, name: str = "") -> bytes:
    """A server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + strictjson.dumps(event) + b"\n\n"


def openai_usage(call: Call) -> Json:
    """Token counts as Chat Completions and Completions give them."""
    sampled = sum(len(generation.tokens) for generation in call.generations)
    return {
        "prompt_tokens": call.prompt_length,
        "completion_tokens": sampled,
        "total_tokens": call.prompt_length + sampled,
    }


def openai_error(told: Told) -> Json:
    """An error as OpenAI's APIs tell it."""
    kind = "invalid_request_error" if told.status < 500 else "server_error"
    error: Json = {"message": told.message, "type": kind, "param": None, "code": told.code}
    return {"error": error}
