"""Responses objects and their events, in the order OpenAI sends them."""

from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.dialects.dialect import Json, Reply
from whet.gateway.dialects.responses_items import (
    build_call_item,
    build_message_item,
    build_output_items,
    build_reasoning_item,
    build_text_part,
)
from whet.gateway.dialects.wire import format_event, format_logprobs
from whet.gateway.messages import Message
from whet.gateway.requests import CompletedCall, PreparedCall
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.detokenize import Delta
from whet.types import Call, CallId, TokenChunk

DEFAULTS: Json = {
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "top_p": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "max_output_tokens": None,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "text": {"format": {"type": "text"}},
    "truncation": "disabled",
    "background": False,
    "user": None,
    "usage": None,
}


def build_response(call: CallId, created: float, model: str, shown: Json) -> Json:
    """Build a response without output."""
    head: Json = {
        "id": f"resp_{call}",
        "object": "response",
        "created_at": int(created),
        "status": "in_progress",
        "model": model,
        "output": [],
    }
    return head | DEFAULTS | shown


def finish_response(
    response: Json, call: Call, message: Message, template: ChatTemplate, output: Sequence[Json]
) -> Json:
    """Add the output, status and usage of a completed call to a response."""
    [generation] = call.generations
    cut = generation.stop == "length"
    # Of the reasoning only the text is stored; encoding it is close enough for a count.
    thinking = len(template.encode(message.reasoning)) if message.reasoning else 0
    sampled = len(generation.tokens)
    end: Json = {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": [*output],
        "usage": {
            "input_tokens": call.prompt_length,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": min(thinking, sampled)},
            "total_tokens": call.prompt_length + sampled,
        },
    }
    return response | end


class ResponsesReply(Reply):
    """A response, or its events."""

    def __init__(
        self,
        call: PreparedCall,
        template: ChatTemplate,
        *,
        shown: Json,
        logprobs: bool,
        token_ids: bool,
    ) -> None:
        self._call = call
        self._template = template
        self._wants_logprobs = logprobs
        self._wants_ids = token_ids
        self._response = build_response(call.id, call.created, call.origin.model, shown)
        self._sequence = 0
        self._output: list[Json] = []
        """Items that are complete."""
        self._open = ""
        """Kind of the item that is being sent."""
        self._text = ""
        """Text of that item so far."""
        self._logprobs: list[JsonValue] = []
        self._unsent_logprobs: list[JsonValue] = []

    def build_body(self, completed: CompletedCall) -> Json:
        call = completed.call
        [generation], [message] = call.generations, completed.messages
        output = build_output_items(self._call.id, message, complete=generation.stop == "stop")
        if self._wants_logprobs:
            logprobs = format_logprobs(
                self._template, generation.tokens, generation.logprobs, completed.tops[0]
            )
            for item in output:
                if item["type"] == "message":
                    item["content"] = [build_text_part(message.content, logprobs)]
        return self._end(call, message, output)

    # ------------------------------------------------------------- streamed

    def build_first_events(self) -> bytes:
        created = self._build_event("response.created", response=self._response)
        return created + self._build_event("response.in_progress", response=self._response)

    def build_chunk_events(self, index: int, chunk: TokenChunk, delta: Delta) -> bytes:
        if self._wants_logprobs:
            self._unsent_logprobs += format_logprobs(
                self._template, chunk.tokens, chunk.logprobs, chunk.top
            )
        return self._send(delta)

    def build_last_events(self, completed: CompletedCall, rest: Sequence[Delta]) -> bytes:
        call = completed.call
        [generation], [message] = call.generations, completed.messages
        events = self._send(rest[0])
        if not self._open and not message.tool_calls and not message.reasoning:
            events += self._begin("message")
        elif self._open == "reasoning" and not message.tool_calls:
            events += self._close() + self._begin("message")
        events += self._close(complete=generation.stop == "stop")
        for index in range(len(message.tool_calls)):
            events += self._send_call(message, index)
        end = self._end(call, message, self._output)
        name = "response.incomplete" if end["status"] == "incomplete" else "response.completed"
        return events + self._build_event(name, response=end)

    def _end(self, call: Call, message: Message, output: Sequence[Json]) -> Json:
        end = finish_response(self._response, call, message, self._template, output)
        if self._wants_ids:
            end["prompt_token_ids"] = list(self._call.tokens)
            end["token_ids"] = list(call.generations[0].tokens)
        return end

    def _send(self, delta: Delta) -> bytes:
        events = b""
        for kind, text in (("reasoning", delta.reasoning), ("message", delta.content)):
            if not text:
                continue
            if self._open != kind:
                events += self._close() + self._begin(kind)
            self._text += text
            event = self._build_position()
            event["delta"] = text
            if kind == "message":
                event["logprobs"] = self._unsent_logprobs
                self._logprobs += self._unsent_logprobs
                self._unsent_logprobs = []
            events += self._build_event(f"{_TEXT_EVENTS[kind]}.delta", **event)
        return events

    def _begin(self, kind: str) -> bytes:
        self._open, self._text = kind, ""
        item = self._build_item() | {"status": "in_progress", "content": []}
        at = len(self._output)
        events = self._build_event("response.output_item.added", output_index=at, item=item)
        part = self._build_part("")
        return events + self._build_event(
            "response.content_part.added", **self._build_position(), part=part
        )

    def _close(self, *, complete: bool = True) -> bytes:
        if not self._open:
            return b""
        kind = self._open
        position = self._build_position()
        done: Json = {"text": self._text}
        if kind == "message":
            self._logprobs += self._unsent_logprobs
            self._unsent_logprobs = []
            done["logprobs"] = self._logprobs
        events = self._build_event(f"{_TEXT_EVENTS[kind]}.done", **position, **done)
        part = self._build_part(self._text)
        events += self._build_event("response.content_part.done", **position, part=part)
        return events + self._finish(self._build_item(complete=complete))

    def _send_call(self, message: Message, index: int) -> bytes:
        made = message.tool_calls[index]
        item = build_call_item(self._call.id, index, made)
        at = len(self._output)
        position: Json = {"output_index": at, "item_id": item["id"]}
        begun: Json = {**item, "arguments": "", "status": "in_progress"}
        events = self._build_event("response.output_item.added", output_index=at, item=begun)
        name = "response.function_call_arguments"
        events += self._build_event(f"{name}.delta", **position, delta=made.arguments)
        done = self._build_event(
            f"{name}.done", **position, name=made.name, arguments=made.arguments
        )
        return events + done + self._finish(item)

    def _finish(self, item: Json) -> bytes:
        at = len(self._output)
        self._output.append(item)
        self._open = ""
        return self._build_event("response.output_item.done", output_index=at, item=item)

    def _build_item(self, *, complete: bool = True) -> Json:
        if self._open == "reasoning":
            return build_reasoning_item(self._call.id, self._text)
        return build_message_item(
            self._call.id, self._text, complete=complete, logprobs=self._logprobs
        )

    def _build_part(self, text: str) -> Json:
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return build_text_part(text, self._logprobs if text else ())

    def _build_position(self) -> Json:
        item_id = self._build_item()["id"]
        return {"item_id": item_id, "output_index": len(self._output), "content_index": 0}

    def _build_event(self, kind: str, /, **fields: JsonValue) -> bytes:
        head: Json = {"type": kind, "sequence_number": self._sequence}
        self._sequence += 1
        return format_event(head | fields, kind)


_TEXT_EVENTS = {"reasoning": "response.reasoning_text", "message": "response.output_text"}
