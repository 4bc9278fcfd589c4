"""OpenAI Completions: a raw prompt, text or ids, with the fields vLLM adds."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from whet.errors import RequestError
from whet.gateway.calls import Ask, Prompt
from whet.gateway.dialects.chat import StreamOptions
from whet.gateway.dialects.chunks import DONE, Chunks
from whet.gateway.dialects.dialect import Asked, Dialect, Json, Reply, Said, Told, validate
from whet.gateway.dialects.logprobs import FLOOR, Tops
from whet.gateway.dialects.parts import (
    AnyJson,
    Off,
    One,
    Sampled,
    Stops,
    openai_error,
    openai_usage,
    sse,
)
from whet.gateway.dialects.stops import matched_stop
from whet.gateway.graph import Graph
from whet.gateway.messages import Message
from whet.gateway.template import ChatTemplate
from whet.gateway.text import Delta
from whet.types import Call, Generation, Piece

DEFAULT_MAX_TOKENS = 16
"""The format's own."""

KIND = "text_completion"
"""What replies and their events call themselves."""


class CompletionRequest(Sampled):
    """What we honour. A field that is missing here, or a value outside its type, is a 400.

    Text is encoded as it is: no token is put before it that it does not spell.
    """

    model: str
    prompt: AnyJson
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = DEFAULT_MAX_TOKENS
    stop: str | Stops | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool = False
    # Taken only where they change nothing.
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Literal[""] | None = None
    frequency_penalty: Off | None = None
    presence_penalty: Off | None = None
    min_p: Off | None = None
    repetition_penalty: One | None = None
    logit_bias: Annotated[dict[str, JsonValue], Field(max_length=0)] | None = None
    skip_special_tokens: Literal[True] | None = None
    ignore_eos: Literal[False] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    # Said for the provider's bookkeeping; they change nothing a model could see.
    user: AnyJson = None
    cache_salt: AnyJson = None
    priority: AnyJson = None
    request_id: AnyJson = None
    session_id: AnyJson = None

    def ask(self, graph: Graph) -> Ask:
        return Ask(
            raw=_one_prompt(self.prompt),
            sampling=self.sampling(
                max_tokens=self.max_tokens,
                stop=self.stop,
                seed=self.seed,
                top_logprobs=self.logprobs or 0,
            ),
            n=self.n,
            stream=self.stream,
        )

    def reply(self, prompt: Prompt, template: ChatTemplate) -> Reply:
        return CompletionReply(
            prompt,
            template,
            model=self.model,
            logprobs=self.logprobs is not None,
            token_ids=self.return_token_ids,
            usage=bool(self.stream_options and self.stream_options.include_usage),
        )


def _one_prompt(prompt: JsonValue) -> str | tuple[int, ...]:
    """The one prompt of a request, which may stand in a list of its own."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt: expected text or token ids")
    if all(isinstance(each, (str, list)) for each in prompt):
        raise RequestError(f"prompt: one prompt a request, found {len(prompt)}")
    ids = tuple(id for id in prompt if type(id) is int and 0 <= id < 2**31)
    if len(ids) < len(prompt):
        raise RequestError("prompt: expected text or token ids")
    return ids


class CompletionReply(Reply):
    """A completion, or its chunks."""

    def __init__(
        self,
        prompt: Prompt,
        template: ChatTemplate,
        *,
        model: str,
        logprobs: bool,
        token_ids: bool,
        usage: bool,
    ) -> None:
        self._prompt = prompt
        self._template = template
        self._model = model
        self._wants_logprobs = logprobs
        self._wants_ids = token_ids
        self.shows_tokens = logprobs or token_ids
        self._wants_usage = usage
        self._id = f"cmpl-{prompt.call}"
        self._created = int(prompt.created)
        self._chunks = Chunks(KIND, self._id, self._created, model)
        self._offsets = [0] * prompt.ask.n

    def whole(self, call: Call, messages: Sequence[Message], tops: Sequence[Tops]) -> Json:
        choices: list[JsonValue] = []
        for index, generation in enumerate(call.generations):
            choice = self._choice(index, messages[index].content, self._end(generation))
            choice["logprobs"] = self._logprobs(
                index, generation.tokens, generation.logprobs, tops[index]
            )
            if self._wants_ids:
                choice["token_ids"] = list(generation.tokens)
                choice["prompt_token_ids"] = list(self._prompt.tokens)
            choices.append(choice)
        return {
            "id": self._id,
            "object": KIND,
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": openai_usage(call),
        }

    def first(self) -> bytes:
        if not self._wants_ids:
            return b""
        prompt: JsonValue = list(self._prompt.tokens)
        choices: list[JsonValue] = [
            self._choice(index, "", {}) | {"prompt_token_ids": prompt, "token_ids": []}
            for index in range(self._prompt.ask.n)
        ]
        return self._chunks.event(choices)

    def piece(self, index: int, piece: Piece, delta: Delta) -> bytes:
        choice = self._choice(index, delta.content, {})
        choice["logprobs"] = self._logprobs(index, piece.tokens, piece.logprobs, piece.top)
        if self._wants_ids:
            choice["token_ids"] = list(piece.tokens)
        elif not delta.content and not self._wants_logprobs:
            return b""
        return self._chunks.event([choice])

    def last(self, call: Call, messages: Sequence[Message], rest: Sequence[Said]) -> bytes:
        events = [
            self._chunks.event([self._choice(index, rest[index].content, self._end(generation))])
            for index, generation in enumerate(call.generations)
        ]
        if self._wants_usage:
            events.append(self._chunks.event([], {"usage": openai_usage(call)}))
        events.append(DONE)
        return b"".join(events)

    def _choice(self, index: int, text: str, end: Json) -> Json:
        return {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            "stop_reason": None,
        } | end

    def _end(self, generation: Generation) -> Json:
        return {
            "finish_reason": generation.stop,
            "stop_reason": matched_stop(generation, self._template),
        }

    def _logprobs(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[float], tops: Tops
    ) -> Json | None:
        if not self._wants_logprobs:
            return None
        texts = [self._template.token_text(id) for id in tokens]
        offsets: list[JsonValue] = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        likeliest: list[JsonValue] = [
            {self._template.token_text(id): max(value, FLOOR) for id, value in top} for top in tops
        ]
        return {
            "tokens": [*texts],
            "token_logprobs": [max(value, FLOOR) for value in logprobs],
            "top_logprobs": likeliest or [{} for _ in texts],
            "text_offset": offsets,
        }


class CompletionsDialect(Dialect):
    """`/v1/completions`."""

    name = "completions"
    path = "/completions"

    def parse(self, body: bytes) -> Asked:
        return validate(CompletionRequest, body)

    def error(self, told: Told) -> Json:
        return openai_error(told)

    def error_event(self, told: Told) -> bytes:
        return sse(openai_error(told))
