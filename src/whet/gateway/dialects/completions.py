"""OpenAI Completions: a raw prompt, text or ids, with the fields vLLM adds."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from whet.errors import RequestError
from whet.gateway.dialects.chat import StreamOptions
from whet.gateway.dialects.dialect import Dialect, Json, Reply
from whet.gateway.dialects.wire import (
    DONE,
    MIN_LOGPROB,
    OPENAI_ERRORS,
    AnyJson,
    One,
    SamplingFields,
    StopStrings,
    TopsByToken,
    Zero,
    find_stop_string,
    format_event,
    format_usage,
    parse_body,
)
from whet.gateway.graph import Graph
from whet.gateway.requests import CompletedCall, ModelRequest, PreparedCall
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.detokenize import Delta
from whet.types import Generation, TokenChunk

DEFAULT_MAX_TOKENS = 16
"""Default of the format."""


class CompletionRequest(SamplingFields):
    """The supported fields; any other field, or a value outside its type, is a 400.

    Text is encoded as it is: no special token is added.
    """

    model: str
    prompt: AnyJson
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=128)] = 1
    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)] = DEFAULT_MAX_TOKENS
    stop: str | StopStrings | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    return_token_ids: bool = False
    # Accepted only with values that change nothing.
    echo: Literal[False] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    suffix: Literal[""] | None = None
    frequency_penalty: Zero | None = None
    presence_penalty: Zero | None = None
    min_p: Zero | None = None
    repetition_penalty: One | None = None
    logit_bias: Annotated[dict[str, JsonValue], Field(max_length=0)] | None = None
    skip_special_tokens: Literal[True] | None = None
    ignore_eos: Literal[False] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    # The provider's bookkeeping, ignored: nothing that a model sees.
    user: AnyJson = None
    cache_salt: AnyJson = None
    priority: AnyJson = None
    request_id: AnyJson = None
    session_id: AnyJson = None

    def to_model_request(self, graph: Graph) -> ModelRequest:
        return ModelRequest(
            raw=_read_prompt(self.prompt),
            sampling=self.to_sampling(
                max_tokens=self.max_tokens,
                stop=self.stop,
                seed=self.seed,
                top_logprobs=self.logprobs or 0,
            ),
            n=self.n,
            stream=self.stream,
        )

    def build_reply(self, call: PreparedCall, template: ChatTemplate) -> Reply:
        return CompletionReply(self, call, template)


def _read_prompt(prompt: JsonValue) -> str | tuple[int, ...]:
    """Return the prompt of a request, which may be the only one of a list."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if not isinstance(prompt, list) or not prompt:
        raise RequestError("prompt: expected text or token ids")
    if all(isinstance(each, (str, list)) for each in prompt):
        raise RequestError(f"prompt: expected one prompt per request, found {len(prompt)}")
    ids = tuple(id for id in prompt if type(id) is int and 0 <= id < 2**31)
    if len(ids) < len(prompt):
        raise RequestError("prompt: expected text or token ids")
    return ids


class CompletionReply(Reply):
    """A completion, or its chunks."""

    def __init__(
        self, request: CompletionRequest, call: PreparedCall, template: ChatTemplate
    ) -> None:
        self._request = request
        self._call = call
        self._template = template
        self._head: Json = {
            "id": f"cmpl-{call.id}",
            "object": "text_completion",
            "created": int(call.created),
            "model": request.model,
        }
        self._offsets = [0] * call.request.n
        """Characters of each choice so far."""

    def build_body(self, completed: CompletedCall) -> Json:
        choices: list[JsonValue] = []
        for index, generation in enumerate(completed.call.generations):
            text, top = completed.messages[index].content, completed.tops[index]
            choice = self._build_choice(index, text, self._end(generation))
            choice["logprobs"] = self._build_logprobs(
                index, generation.tokens, generation.logprobs, top
            )
            if self._request.return_token_ids:
                choice["token_ids"] = list(generation.tokens)
                choice["prompt_token_ids"] = list(self._call.tokens)
            choices.append(choice)
        return {**self._head, "choices": choices, "usage": format_usage(completed.call)}

    def build_first_events(self) -> bytes:
        if not self._request.return_token_ids:
            return b""
        prompt: JsonValue = list(self._call.tokens)
        return self._build_event(
            [
                self._build_choice(index, "", {}) | {"prompt_token_ids": prompt, "token_ids": []}
                for index in range(self._call.request.n)
            ]
        )

    def build_chunk_events(self, index: int, chunk: TokenChunk, delta: Delta) -> bytes:
        choice = self._build_choice(index, delta.content, {})
        choice["logprobs"] = self._build_logprobs(index, chunk.tokens, chunk.logprobs, chunk.top)
        if self._request.return_token_ids:
            choice["token_ids"] = list(chunk.tokens)
        elif not delta.content and self._request.logprobs is None:
            return b""
        return self._build_event([choice])

    def build_last_events(self, completed: CompletedCall, rest: Sequence[Delta]) -> bytes:
        events = [
            self._build_event(
                [self._build_choice(index, rest[index].content, self._end(generation))]
            )
            for index, generation in enumerate(completed.call.generations)
        ]
        if self._request.stream_options and self._request.stream_options.include_usage:
            events.append(self._build_event([], usage=format_usage(completed.call)))
        return b"".join(events) + DONE

    def _build_event(self, choices: Sequence[Json], **more: JsonValue) -> bytes:
        chunk: Json = {"choices": [*choices]}
        return format_event(self._head | chunk | more)

    def _build_choice(self, index: int, text: str, end: Json) -> Json:
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
            "stop_reason": find_stop_string(generation, self._template),
        }

    def _build_logprobs(
        self, index: int, tokens: Sequence[int], logprobs: Sequence[float], tops: TopsByToken
    ) -> Json | None:
        if self._request.logprobs is None:
            return None
        texts = [self._template.get_token_text(id) for id in tokens]
        offsets: list[JsonValue] = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        likeliest: list[JsonValue] = [
            {self._template.get_token_text(id): max(value, MIN_LOGPROB) for id, value in top}
            for top in tops
        ]
        return {
            "tokens": [*texts],
            "token_logprobs": [max(value, MIN_LOGPROB) for value in logprobs],
            "top_logprobs": likeliest or [{} for _ in texts],
            "text_offset": offsets,
        }


COMPLETIONS = Dialect(
    "completions", "/completions", partial(parse_body, CompletionRequest), OPENAI_ERRORS
)
