"""Renders what is new in a conversation, so that what was sampled is never encoded again.

A turn the model sampled ends with the template's own closing token. What follows it depends only
on the messages after it, so it is rendered behind a stand-in turn and cut off there. Whether that
holds for a template is not believed but proven at start-up, on dialogues of several shapes; where
it does not, every call is rendered whole and becomes a row of its own, and the log says so.
"""

import logging
from collections.abc import Sequence

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.graph import Turn
from whet.gateway.messages import Message, ToolCall
from whet.gateway.template import ChatTemplate
from whet.types import Fork

logger = logging.getLogger(__name__)

STAND_IN = "0whet0stand0in0"
"""Text no template touches: no white space, no markup."""

QUESTION = Message("user", "What is 2 + 3?")
CALLING = ToolCall("call_1", "calculator", '{"expression": "2 + 3"}')
PROBE_TOOL: JsonValue = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluate an expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


class Renderer:
    """Conversations to prompts, for one model."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.close_id = self._close_id()
        """The id that ends an assistant turn, or None if the template shows none."""
        self.incremental = self.close_id is not None and self._proves_incremental()
        """Whether a conversation may be continued from stored tokens."""
        if not self.incremental:
            logger.warning("the chat template cannot be continued turn by turn: one row per call")
        closing = () if self.close_id is None else (self.close_id,)
        self.stop_ids = tuple(dict.fromkeys((*template.eos_ids, *closing)))

    def refuses(self, path: Sequence[Turn], rest: Sequence[Message]) -> Fork | None:
        """Why a conversation may not be continued from these stored turns, or None if it may."""
        return None if self.incremental else Fork.TEMPLATE

    def whole(self, messages: Sequence[Message], tools: Sequence[JsonValue]) -> list[int]:
        """The prompt of a conversation, from its beginning."""
        text = self.template.render(messages, tools, add_generation_prompt=True)
        return self.template.encode(text)

    def tail(
        self, messages: Sequence[Message], tools: Sequence[JsonValue], *, closed: bool
    ) -> list[int]:
        """The ids after a sampled turn that `messages` followed, up to the next turn's start.

        `closed` says whether the turn itself ended with the closing token; a turn that was cut
        short is closed here, as context.
        """
        behind = Message("assistant", STAND_IN)
        text = self.template.render(
            [QUESTION, behind, *messages], tools, add_generation_prompt=True
        )
        ids = self.template.encode(text.rpartition(STAND_IN)[2])
        if not ids or ids[0] != self.close_id:
            raise RequestError("the chat template does not close the assistant's turn here")
        return ids[1:] if closed else ids

    def _close_id(self) -> int | None:
        try:
            text = self.template.render(
                [QUESTION, Message("assistant", STAND_IN)], (), add_generation_prompt=False
            )
        except RequestError:
            return None
        ids = self.template.encode(text.rpartition(STAND_IN)[2])
        return ids[0] if ids else None

    def _proves_incremental(self) -> bool:
        """Whether stored turns plus tails are, id for id, what a whole render gives."""
        answer = Message("assistant", "It is 5.")
        called = Message("assistant", "", (CALLING,))
        result = Message("tool", "5", tool_call_id=CALLING.id)
        thanks = Message("user", "Thanks. And 4 + 4?")
        system = Message("system", "Be brief.")
        dialogues: list[tuple[list[Message], Message, list[Message], list[JsonValue]]] = [
            ([QUESTION], answer, [thanks], []),
            ([system, QUESTION], answer, [thanks], []),
            ([system, QUESTION, answer, thanks], answer, [thanks], []),
            ([system, QUESTION], called, [result], [PROBE_TOOL]),
            ([system, QUESTION], called, [result, answer, thanks], [PROBE_TOOL]),
            ([system, QUESTION], called, [result, thanks], [PROBE_TOOL]),
        ]
        try:
            return all(self._probe(*dialogue) for dialogue in dialogues)
        except RequestError:
            return False

    def _probe(
        self,
        before: Sequence[Message],
        turn: Message,
        after: Sequence[Message],
        tools: Sequence[JsonValue],
    ) -> bool:
        prompt = self.whole(before, tools)
        rendered = self.template.render([*before, turn], tools, add_generation_prompt=False)
        through_turn = self.template.encode(rendered)
        if through_turn[: len(prompt)] != prompt:
            return False
        sampled = through_turn[len(prompt) :]
        end = len(sampled) - sampled[::-1].index(self.close_id) if self.close_id in sampled else 0
        tail = self.tail(after, tools, closed=True)
        return [*prompt, *sampled[:end], *tail] == self.whole([*before, turn, *after], tools)
