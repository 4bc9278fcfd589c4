"""Chat Completions replies, whole and streamed, from what was sampled."""

import json
from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.dialects.chat import ChatRequest
from whet.gateway.messages import Message
from whet.gateway.render import Renderer
from whet.gateway.service import Prompt
from whet.gateway.text import TextStream
from whet.types import Call, Generation, Piece

Json = dict[str, JsonValue]

DONE = b"data: [DONE]\n\n"


class ChatReply:
    """The answer to one request: fed with pieces as they are sampled, then with the call."""

    def __init__(self, request: ChatRequest, prompt: Prompt, renderer: Renderer, model: str) -> None:
        self._request = request
        self._prompt = prompt
        self._renderer = renderer
        self._model = model
        self._tops: list[list[tuple[tuple[int, float], ...]]] = [
            [] for _ in range(prompt.ask.n)
        ]
        self._streams = [
            TextStream(renderer, prompt.sampling, tools=prompt.ask.calls_tools)
            for _ in range(prompt.ask.n)
        ]

    # ------------------------------------------------------------- whole

    def keep(self, index: int, piece: Piece) -> None:
        """Remember what the record has no place for: the likeliest other tokens."""
        self._tops[index] += piece.top

    def whole(self, call: Call) -> Json:
        """The reply to a request that does not stream."""
        choices: list[JsonValue] = []
        for index, generation in enumerate(call.generations):
            message = Message.from_json(generation.message)
            choice: Json = {
                "index": index,
                "message": _wire_message(message),
                "finish_reason": _finish_reason(generation, message),
                "logprobs": self._logprobs(
                    generation.tokens, generation.logprobs, self._tops[index]
                ),
            }
            if self._request.return_token_ids:
                choice["token_ids"] = list(generation.tokens)
            choices.append(choice)
        reply = self._frame("chat.completion", choices) | {"usage": self._usage(call)}
        if self._request.return_token_ids:
            reply["prompt_token_ids"] = list(self._prompt.tokens)
        return reply

    # ------------------------------------------------------------- streamed

    def first(self) -> bytes:
        """The event that opens the stream."""
        choices: list[JsonValue] = [
            {"index": i, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            for i in range(self._prompt.ask.n)
        ]
        event = self._frame("chat.completion.chunk", choices)
        if self._request.return_token_ids:
            event["prompt_token_ids"] = list(self._prompt.tokens)
        return _sse(event)

    def piece(self, index: int, piece: Piece) -> bytes:
        """The event for some tokens; empty if there is nothing to say yet."""
        text = self._streams[index].feed(piece.tokens)
        choice: Json = {
            "index": index,
            "delta": {"content": text} if text else {},
            "logprobs": self._logprobs(piece.tokens, piece.logprobs, piece.top),
            "finish_reason": None,
        }
        if self._request.return_token_ids:
            choice["token_ids"] = list(piece.tokens)
        elif not text and not self._request.logprobs:
            return b""
        return _sse(self._frame("chat.completion.chunk", [choice]))

    def last(self, call: Call) -> bytes:
        """The events that end the stream; they may go out once the call is recorded."""
        events: list[bytes] = []
        for index, generation in enumerate(call.generations):
            message = Message.from_json(generation.message)
            delta: Json = {}
            if rest := self._streams[index].finish(message.content):
                delta["content"] = rest
            if message.tool_calls:
                calls = _wire_calls(message)
                delta["tool_calls"] = [{"index": i} | c for i, c in enumerate(calls)]
            if delta:
                choice: Json = {"index": index, "delta": delta, "finish_reason": None}
                events.append(_sse(self._frame("chat.completion.chunk", [choice])))
            end: Json = {
                "index": index,
                "delta": {},
                "finish_reason": _finish_reason(generation, message),
            }
            events.append(_sse(self._frame("chat.completion.chunk", [end])))
        options = self._request.stream_options
        if options and options.include_usage:
            usage = self._frame("chat.completion.chunk", []) | {"usage": self._usage(call)}
            events.append(_sse(usage))
        return b"".join([*events, DONE])

    # ------------------------------------------------------------- parts

    def _frame(self, kind: str, choices: list[JsonValue]) -> Json:
        return {
            "id": f"chatcmpl-{self._prompt.call}",
            "object": kind,
            "created": int(self._prompt.created),
            "model": self._model,
            "choices": choices,
        }

    def _usage(self, call: Call) -> Json:
        sampled = sum(len(g.tokens) for g in call.generations)
        return {
            "prompt_tokens": call.prompt_length,
            "completion_tokens": sampled,
            "total_tokens": call.prompt_length + sampled,
        }

    def _logprobs(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        tops: Sequence[tuple[tuple[int, float], ...]],
    ) -> Json | None:
        if not self._request.logprobs:
            return None
        content: list[JsonValue] = []
        for at, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            others: list[JsonValue] = [
                self._token(id, value) for id, value in (tops[at] if tops else ())
            ]
            content.append(self._token(token, logprob) | {"top_logprobs": others})
        return {"content": content, "refusal": None}

    def _token(self, id: int, logprob: float) -> Json:
        text = self._renderer.template.token_text(id)
        # JSON has no minus infinity; OpenAI's floor for it is -9999.
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}


def _wire_message(message: Message) -> Json:
    wire: Json = {"role": "assistant", "content": message.content, "refusal": None}
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


def _sse(event: Json) -> bytes:
    return b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n"
