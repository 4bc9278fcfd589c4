"""Anthropic messages and their events, from what was sampled."""

from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.calls import Prompt
from whet.gateway.dialects.dialect import Json, Reply, Said
from whet.gateway.dialects.logprobs import Tops
from whet.gateway.dialects.parts import sse
from whet.gateway.dialects.stops import matched_stop
from whet.gateway.messages import Message, ToolCall
from whet.gateway.template import ChatTemplate
from whet.gateway.text import Delta
from whet.types import Call, Generation, Piece


class MessagesReply(Reply):
    """A message, or its events."""

    def __init__(
        self,
        prompt: Prompt,
        template: ChatTemplate,
        *,
        model: str,
        thinking: bool,
        omit_thinking: bool,
        token_ids: bool,
    ) -> None:
        self._prompt = prompt
        self._template = template
        self._model = model
        self._shows_thinking = thinking
        self._omits_thinking = omit_thinking
        """The block is there, its text is not."""
        self._wants_ids = token_ids
        self.shows_tokens = False
        self._index = 0
        self._open = ""

    def whole(self, call: Call, messages: Sequence[Message], tops: Sequence[Tops]) -> Json:
        [generation], [message] = call.generations, messages
        content: list[JsonValue] = []
        if message.reasoning and self._shows_thinking:
            thinking = "" if self._omits_thinking else message.reasoning
            content.append(_thinking(thinking, self._signature()))
        if message.content or not message.tool_calls:
            content.append(_text(message.content))
        content += [_tool_use(made, made.parsed() or {}) for made in message.tool_calls]
        reply = self._message(content)
        reply |= self._stop(generation, message)
        reply["usage"] = _usage(call.prompt_length, len(generation.tokens))
        if self._wants_ids:
            reply["prompt_token_ids"] = list(self._prompt.tokens)
            reply["token_ids"] = list(generation.tokens)
        return reply

    # ------------------------------------------------------------- streamed

    def first(self) -> bytes:
        message = self._message([])
        message["usage"] = _usage(len(self._prompt.tokens), 0)
        if self._wants_ids:
            message["prompt_token_ids"] = list(self._prompt.tokens)
        return _event("message_start", message=message)

    def piece(self, index: int, piece: Piece, delta: Delta) -> bytes:
        return self._say(delta)

    def last(self, call: Call, messages: Sequence[Message], rest: Sequence[Said]) -> bytes:
        [generation], [message] = call.generations, messages
        events = self._say(rest[0])
        if self._open != "text" and not message.content and not message.tool_calls:
            events += self._close() + self._begin("text", _text(""))
        events += self._close()
        for made in message.tool_calls:
            # The text the model wrote, so that what is put together again is what it sampled.
            json = made.arguments if made.parsed() is not None else "{}"
            events += self._begin("tool_use", _tool_use(made, {}))
            events += self._delta("input_json_delta", "partial_json", json) + self._close()
        end: Json = {"usage": _usage(call.prompt_length, len(generation.tokens))}
        if self._wants_ids:
            end["token_ids"] = list(generation.tokens)
        stop = self._stop(generation, message)
        return events + _event("message_delta", delta=stop, **end) + _event("message_stop")

    def _say(self, delta: Said) -> bytes:
        events = b""
        if delta.reasoning and self._shows_thinking:
            if self._open != "thinking":
                events += self._close() + self._begin("thinking", _thinking("", ""))
            if not self._omits_thinking:
                events += self._delta("thinking_delta", "thinking", delta.reasoning)
        if delta.content:
            if self._open != "text":
                events += self._close() + self._begin("text", _text(""))
            events += self._delta("text_delta", "text", delta.content)
        return events

    def _begin(self, kind: str, block: Json) -> bytes:
        self._open = kind
        return _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, kind: str, name: str, text: str) -> bytes:
        delta: Json = {"type": kind, name: text}
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        events = b""
        if self._open == "thinking":
            events = self._delta("signature_delta", "signature", self._signature())
        events += _event("content_block_stop", index=self._index)
        self._open = ""
        self._index += 1
        return events

    # ------------------------------------------------------------- parts

    def _message(self, content: list[JsonValue]) -> Json:
        return {
            "id": f"msg_{self._prompt.call}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _stop(self, generation: Generation, message: Message) -> Json:
        stop = matched_stop(generation, self._template)
        limit = generation.sampling.max_tokens
        if message.tool_calls:
            reason = "tool_use"
        elif stop is not None:
            reason = "stop_sequence"
        elif generation.stop == "stop":
            reason = "end_turn"
        elif limit is not None and len(generation.tokens) < limit:
            reason = "model_context_window_exceeded"
        else:
            reason = "max_tokens"
        return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}

    def _signature(self) -> str:
        """Clients send it back and may not change it; we take the thinking by its text."""
        return f"whet-{self._prompt.call}"


def _thinking(text: str, signature: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _text(text: str) -> Json:
    return {"type": "text", "text": text, "citations": None}


def _tool_use(made: ToolCall, arguments: Json) -> Json:
    return {"type": "tool_use", "id": made.id, "name": made.name, "input": arguments}


def _usage(prompt: int, sampled: int) -> Json:
    return {
        "input_tokens": prompt,
        "output_tokens": sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _event(kind: str, **fields: JsonValue) -> bytes:
    event: Json = {"type": kind, **fields}
    return sse(event, kind)
