"""Chat Completions replies, whole and streamed, from what was sampled."""

from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.calls import Prompt
from whet.gateway.dialects.chunks import DONE, Chunks
from whet.gateway.dialects.dialect import Json, Reply, Said
from whet.gateway.dialects.logprobs import Tops, token_logprobs
from whet.gateway.dialects.parts import openai_usage
from whet.gateway.messages import Message
from whet.gateway.template import ChatTemplate
from whet.gateway.text import Delta
from whet.types import Call, Generation, Piece

NOTHING = Delta("", "")


class ChatReply(Reply):
    """A chat completion, or its chunks."""

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
        self._id = f"chatcmpl-{prompt.call}"
        self._created = int(prompt.created)
        self._chunks = Chunks("chat.completion.chunk", self._id, self._created, model)
        self._begun: set[int] = set()
        """The choices of which something was said."""

    def whole(self, call: Call, messages: Sequence[Message], tops: Sequence[Tops]) -> Json:
        choices: list[JsonValue] = []
        for index, generation in enumerate(call.generations):
            message = messages[index]
            choice: Json = {
                "index": index,
                "message": _wire_message(message),
                "finish_reason": _finish_reason(generation, message),
                "logprobs": self._logprobs(generation.tokens, generation.logprobs, tops[index]),
            }
            if self._wants_ids:
                choice["token_ids"] = list(generation.tokens)
            choices.append(choice)
        reply: Json = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "usage": openai_usage(call),
        }
        if self._wants_ids:
            reply["prompt_token_ids"] = list(self._prompt.tokens)
        return reply

    # ------------------------------------------------------------- streamed

    def first(self) -> bytes:
        if not self._wants_ids:
            return b""
        choices: list[JsonValue] = [
            {"index": index, "delta": self._delta(index, NOTHING), "finish_reason": None}
            for index in range(self._prompt.ask.n)
        ]
        return self._chunks.event(choices, {"prompt_token_ids": list(self._prompt.tokens)})

    def piece(self, index: int, piece: Piece, delta: Delta) -> bytes:
        if not any(delta) and not self.shows_tokens:
            return b""
        choice: Json = {
            "index": index,
            "delta": self._delta(index, delta),
            "logprobs": self._logprobs(piece.tokens, piece.logprobs, piece.top),
            "finish_reason": None,
        }
        if self._wants_ids:
            choice["token_ids"] = list(piece.tokens)
        return self._chunks.event([choice])

    def last(self, call: Call, messages: Sequence[Message], rest: Sequence[Said]) -> bytes:
        events = b""
        for index, generation in enumerate(call.generations):
            message = messages[index]
            delta = self._delta(index, rest[index])
            if message.tool_calls:
                calls = _wire_calls(message)
                delta["tool_calls"] = [{"index": i} | c for i, c in enumerate(calls)]
                made: Json = {"index": index, "delta": delta, "finish_reason": None}
                events += self._chunks.event([made])
                delta = {}
            # The last words come with the end, as from vLLM.
            reason = _finish_reason(generation, message)
            end: Json = {"index": index, "delta": delta, "finish_reason": reason}
            events += self._chunks.event([end])
        if self._wants_usage:
            events += self._chunks.event([], {"usage": openai_usage(call)})
        return events + DONE

    def _delta(self, index: int, said: Said) -> Json:
        """What is said of a choice, and the first time, by whom."""
        wire: Json = {}
        if index not in self._begun:
            self._begun.add(index)
            wire = {"role": "assistant", "content": ""}
        if said.reasoning:
            wire |= _wire_reasoning(said.reasoning)
        if said.content:
            wire["content"] = said.content
        return wire

    # ------------------------------------------------------------- parts

    def _logprobs(
        self, tokens: Sequence[int], logprobs: Sequence[float], tops: Tops
    ) -> Json | None:
        if not self._wants_logprobs:
            return None
        content = token_logprobs(self._template, tokens, logprobs, tops)
        return {"content": content, "refusal": None}


def _wire_reasoning(text: str) -> Json:
    """Under both names in use: vLLM says `reasoning`, most agents read `reasoning_content`."""
    return {"reasoning": text, "reasoning_content": text}


def _wire_message(message: Message) -> Json:
    wire: Json = {"role": "assistant", "content": message.content, "refusal": None}
    if message.reasoning:
        wire |= _wire_reasoning(message.reasoning)
    if message.tool_calls:
        wire["content"] = message.content or None
        wire["tool_calls"] = [*_wire_calls(message)]
    return wire


def _wire_calls(message: Message) -> list[Json]:
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in message.tool_calls
    ]


def _finish_reason(generation: Generation, message: Message) -> str:
    return "tool_calls" if message.tool_calls else generation.stop
