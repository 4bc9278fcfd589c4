"""Anthropic messages and their events, from what was sampled."""

from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.dialects.dialect import Json, Reply
from whet.gateway.dialects.wire import find_stop_string, format_event
from whet.gateway.messages import Message, ToolCall
from whet.gateway.requests import CompletedCall, PreparedCall
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.detokenize import Delta
from whet.types import Generation, TokenChunk

SIGNATURE = "whet-"
"""Start of a signature of thinking; the id of the call follows."""


class AnthropicReply(Reply):
    """A message, or its events."""

    def __init__(
        self,
        call: PreparedCall,
        template: ChatTemplate,
        *,
        model: str,
        thinking: bool,
        omit_thinking: bool,
        token_ids: bool,
    ) -> None:
        self._call = call
        self._template = template
        self._model = model
        self._shows_thinking = thinking
        self._omits_thinking = omit_thinking
        """Whether thinking blocks are sent without their text."""
        self._wants_ids = token_ids
        self._index = 0
        self._open = ""

    def build_body(self, completed: CompletedCall) -> Json:
        call = completed.call
        [generation], [message] = call.generations, completed.messages
        content: list[JsonValue] = []
        if message.reasoning and self._shows_thinking:
            thinking = "" if self._omits_thinking else message.reasoning
            content.append(_build_thinking(thinking, self._build_signature()))
        if message.content or not message.tool_calls:
            content.append(_build_text(message.content))
        content += [
            _build_tool_use(made, made.parse_arguments() or {}) for made in message.tool_calls
        ]
        reply = self._build_message(content)
        reply |= self._build_stop(generation, message)
        reply["usage"] = _build_usage(call.prompt_length, len(generation.tokens))
        if self._wants_ids:
            reply["prompt_token_ids"] = list(self._call.tokens)
            reply["token_ids"] = list(generation.tokens)
        return reply

    # ------------------------------------------------------------- streamed

    def build_first_events(self) -> bytes:
        message = self._build_message([])
        message["usage"] = _build_usage(len(self._call.tokens), 0)
        if self._wants_ids:
            message["prompt_token_ids"] = list(self._call.tokens)
        return _build_event("message_start", message=message)

    def build_chunk_events(self, index: int, chunk: TokenChunk, delta: Delta) -> bytes:
        return self._send(delta)

    def build_last_events(self, completed: CompletedCall, rest: Sequence[Delta]) -> bytes:
        call = completed.call
        [generation], [message] = call.generations, completed.messages
        events = self._send(rest[0])
        if self._open != "text" and not message.content and not message.tool_calls:
            events += self._close() + self._begin("text", _build_text(""))
        events += self._close()
        for made in message.tool_calls:
            # The text as the model wrote it, so that the client assembles what was sampled.
            json = made.arguments if made.parse_arguments() is not None else "{}"
            events += self._begin("tool_use", _build_tool_use(made, {}))
            events += self._build_delta("input_json_delta", "partial_json", json) + self._close()
        end: Json = {"usage": _build_usage(call.prompt_length, len(generation.tokens))}
        if self._wants_ids:
            end["token_ids"] = list(generation.tokens)
        stop = self._build_stop(generation, message)
        return (
            events + _build_event("message_delta", delta=stop, **end) + _build_event("message_stop")
        )

    def _send(self, delta: Delta) -> bytes:
        events = b""
        if delta.reasoning and self._shows_thinking:
            if self._open != "thinking":
                events += self._close() + self._begin("thinking", _build_thinking("", ""))
            if not self._omits_thinking:
                events += self._build_delta("thinking_delta", "thinking", delta.reasoning)
        if delta.content:
            if self._open != "text":
                events += self._close() + self._begin("text", _build_text(""))
            events += self._build_delta("text_delta", "text", delta.content)
        return events

    def _begin(self, kind: str, block: Json) -> bytes:
        self._open = kind
        return _build_event("content_block_start", index=self._index, content_block=block)

    def _build_delta(self, kind: str, name: str, text: str) -> bytes:
        delta: Json = {"type": kind, name: text}
        return _build_event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if not self._open:
            return b""
        events = b""
        if self._open == "thinking":
            events = self._build_delta("signature_delta", "signature", self._build_signature())
        events += _build_event("content_block_stop", index=self._index)
        self._open = ""
        self._index += 1
        return events

    # ------------------------------------------------------------- parts

    def _build_message(self, content: list[JsonValue]) -> Json:
        return {
            "id": f"msg_{self._call.id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _build_stop(self, generation: Generation, message: Message) -> Json:
        stop = find_stop_string(generation, self._template)
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

    def _build_signature(self) -> str:
        """Return the signature, which clients echo unchanged: it names the call."""
        return f"{SIGNATURE}{self._call.id}"


def _build_thinking(text: str, signature: str) -> Json:
    return {"type": "thinking", "thinking": text, "signature": signature}


def _build_text(text: str) -> Json:
    return {"type": "text", "text": text}


def _build_tool_use(made: ToolCall, arguments: Json) -> Json:
    return {"type": "tool_use", "id": made.id, "name": made.name, "input": arguments}


def _build_usage(prompt: int, sampled: int) -> Json:
    return {
        "input_tokens": prompt,
        "output_tokens": sampled,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _build_event(kind: str, **fields: JsonValue) -> bytes:
    event: Json = {"type": kind, **fields}
    return format_event(event, kind)
