"""Dialogues of every shape, on which the incremental render of a template is proven.

A probe takes a conversation up to a turn, the turn, and what follows it. Stored tokens plus the
tail must be, id for id, what the template gives for the whole conversation, up to the turn itself:
what was sampled stands. Only a token that reaches over the very beginning of the turn may differ,
since it is partly the turn's own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.messages import Message, ToolCall
from whet.gateway.parsers import Reasoning
from whet.gateway.tails import QUESTION, TOOL, Tails
from whet.gateway.template import ChatTemplate


class Shape(StrEnum):
    """What a probe is about; also its name in reports."""

    TWO_TURNS = "two turns"
    SYSTEM = "system message"
    THREE_TURNS = "three turns"
    WHITE_SPACE = "white space"
    UNICODE = "unicode"
    TRUNCATED = "truncated turn"
    THINKING = "thinking"
    TOOLS = "tools"
    RESULT = "tool result"
    RESULTS = "two tool results"
    TEXT_AND_CALL = "text and tool call"
    NUDGE = "tool result, then user"
    TOOL_TURNS = "tool turns in a row"
    ANSWER = "answer after tools"
    THINKING_RESULT = "thinking, tool result"
    THINKING_TOOL_TURNS = "thinking, tool turns in a row"
    THINKING_NUDGE = "thinking, tool result, then user"
    THINKING_ANSWER = "thinking, answer after tools"
    LATE_SYSTEM = "late system message"
    ANOTHER_TURN = "another turn at once"
    TURN_AFTER_TURN = "turn after turn"
    EDITED = "edited turn"
    NO_RESULT = "tool call without a result"


AVOIDABLE = frozenset(
    {
        Shape.TEXT_AND_CALL,
        Shape.TOOLS,
        Shape.NUDGE,
        Shape.ANSWER,
        Shape.THINKING_NUDGE,
        Shape.THINKING_ANSWER,
        Shape.LATE_SYSTEM,
        Shape.ANOTHER_TURN,
        Shape.TURN_AFTER_TURN,
        Shape.EDITED,
        Shape.NO_RESULT,
    }
)
"""Shapes that a template may fail and still be merged: they are refused where they come up.

Most are a new user message under tools, which some templates show beside the last one only. What
happens between two user messages must pass."""

THOUGHTLESS = frozenset(
    {Shape.TWO_TURNS, Shape.RESULT, Shape.NUDGE, Shape.TOOL_TURNS, Shape.ANSWER}
)
"""Shapes of which there is a second with thinking; in these there is none."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A conversation, its latest turn, and what follows."""

    shape: Shape
    before: Sequence[Message]
    turn: Message
    after: Sequence[Message]
    tools: bool = False


class Outcome(StrEnum):
    """How a probe went."""

    PASSED = "passed"
    FAILED = "failed"
    DROPPED = "dropped"
    """It differs by earlier thinking, which the template leaves out."""
    SKIPPED = "skipped"
    """The template refuses the conversation itself."""


class Finding(NamedTuple):
    """An outcome, and why it is one."""

    outcome: Outcome
    cause: str = ""


SYSTEM = Message("system", "Be brief.")
ANSWER = Message("assistant", "It is 5.")
THANKS = Message("user", "Thanks. And 4 + 4?")
CALL = ToolCall("call_1", "calculator", '{"expression": "2 + 3"}')
OTHER_CALL = ToolCall("call_2", "calculator", '{"expression": "4 + 4"}')
CALLED = Message("assistant", "", (CALL,))
CALLED_AGAIN = Message("assistant", "", (OTHER_CALL,))
RESULT = Message("tool", "5", tool_call_id=CALL.id)
OTHER_RESULT = Message("tool", "8", tool_call_id=OTHER_CALL.id)
THOUGHT = "Two and three make five."
OTHER_THOUGHT = "Four and four make eight."
BEGUN = (SYSTEM, QUESTION)
PADDED = (Message("user", "  What is 2 + 3?\n"), Message("assistant", "\n\n It is 5.  \n"))
FOREIGN = (Message("user", "2 + 3 = ? Zürich 東京 🙂"), Message("assistant", "é 五 👩‍👧 مرحبا"))


def thinking(turn: Message, thought: str = THOUGHT) -> Message:
    """The same turn, after some thinking."""
    return turn._replace(reasoning=thought)


PROBES = (
    Probe(Shape.TWO_TURNS, [QUESTION], ANSWER, [THANKS]),
    Probe(Shape.SYSTEM, BEGUN, ANSWER, [THANKS]),
    Probe(Shape.THREE_TURNS, [QUESTION, ANSWER, THANKS], ANSWER, [THANKS]),
    Probe(Shape.WHITE_SPACE, PADDED[:1], PADDED[1], [Message("user", " \n Thanks.\n\n")]),
    Probe(Shape.UNICODE, FOREIGN[:1], FOREIGN[1], [FOREIGN[0]]),
    Probe(Shape.TRUNCATED, [QUESTION], Message("assistant", "It is 5, sin"), [THANKS]),
    Probe(Shape.THINKING, [QUESTION], thinking(ANSWER), [THANKS]),
    Probe(Shape.TOOLS, BEGUN, ANSWER, [THANKS], tools=True),
    Probe(Shape.RESULT, BEGUN, CALLED, [RESULT], tools=True),
    Probe(
        Shape.RESULTS,
        BEGUN,
        CALLED._replace(tool_calls=(CALL, OTHER_CALL)),
        [RESULT._replace(content=" 5\n"), OTHER_RESULT._replace(content="8 東京 🙂")],
        tools=True,
    ),
    Probe(Shape.TEXT_AND_CALL, BEGUN, CALLED._replace(content="Let me see."), [RESULT], tools=True),
    Probe(Shape.NUDGE, BEGUN, CALLED, [RESULT, THANKS], tools=True),
    Probe(Shape.TOOL_TURNS, [*BEGUN, CALLED, RESULT], CALLED_AGAIN, [OTHER_RESULT], tools=True),
    Probe(Shape.ANSWER, [*BEGUN, CALLED, RESULT], ANSWER, [THANKS], tools=True),
    Probe(Shape.THINKING_RESULT, BEGUN, thinking(CALLED), [RESULT], tools=True),
    Probe(
        Shape.THINKING_TOOL_TURNS,
        [*BEGUN, thinking(CALLED), RESULT],
        thinking(CALLED_AGAIN, OTHER_THOUGHT),
        [OTHER_RESULT],
        tools=True,
    ),
    Probe(Shape.THINKING_NUDGE, BEGUN, thinking(CALLED), [RESULT, THANKS], tools=True),
    Probe(
        Shape.THINKING_ANSWER,
        [*BEGUN, thinking(CALLED), RESULT],
        thinking(ANSWER, OTHER_THOUGHT),
        [THANKS],
        tools=True,
    ),
    Probe(Shape.LATE_SYSTEM, BEGUN, ANSWER, [Message("system", "Use words."), THANKS]),
    Probe(Shape.ANOTHER_TURN, [QUESTION], ANSWER, []),
    Probe(Shape.TURN_AFTER_TURN, [QUESTION, ANSWER], ANSWER, [THANKS]),
    Probe(Shape.EDITED, BEGUN, CALLED, [RESULT, ANSWER, THANKS], tools=True),
    Probe(Shape.NO_RESULT, BEGUN, CALLED, [THANKS], tools=True),
)


class Prover:
    """Runs probes on a template."""

    def __init__(
        self,
        template: ChatTemplate,
        tails: Tails,
        arguments: Mapping[str, JsonValue],
        *,
        tools: bool,
        reasoning: Reasoning,
        thinks: bool,
        opened: bool,
    ) -> None:
        """`opened` says that prompts begin the thinking, so that every turn has some."""
        self._template = template
        self._tails = tails
        self._arguments = arguments
        self._tools = tools
        self._reasoning = reasoning
        self._thinks = thinks
        self._opened = opened

    def findings(self) -> dict[Shape, Finding]:
        """How every probe went."""
        return {probe.shape: self._judge(self._as_sampled(probe)) for probe in PROBES}

    def _as_sampled(self, probe: Probe) -> Probe:
        """The probe with the thinking that a turn of this model always has."""
        if not self._opened or probe.shape in THOUGHTLESS or probe.turn.reasoning:
            return probe
        before = [thinking(m) if m.role == "assistant" else m for m in probe.before]
        return replace(probe, before=before, turn=thinking(probe.turn, OTHER_THOUGHT))

    def _judge(self, probe: Probe) -> Finding:
        messages = [*probe.before, probe.turn, *probe.after]
        if probe.tools and not self._tools:
            return Finding(Outcome.SKIPPED, "the template shows no tools")
        if not self._thinks and any(message.reasoning for message in messages):
            return Finding(Outcome.SKIPPED, "the template knows no thinking")
        tools = (TOOL,) if probe.tools else ()
        try:
            prompt, whole = self._text(probe.before, tools), self._text(messages, tools)
        except RequestError as error:
            return Finding(Outcome.SKIPPED, str(error))
        try:
            tail = self._tails.after(probe.turn, probe.after, tools)
        except RequestError as error:
            return Finding(Outcome.FAILED, str(error))
        return self._compare(probe, prompt, whole, tail)

    def _compare(self, probe: Probe, prompt: str, whole: str, tail: Sequence[int]) -> Finding:
        stored, ids = self._template.encode(prompt), self._template.encode(whole)
        if ids[len(ids) - len(tail) :] != tail:
            return Finding(Outcome.FAILED, "what follows a turn depends on what came before it")
        if not whole.startswith(prompt):
            if self._differs_by_thinking(probe, prompt, whole):
                return Finding(Outcome.DROPPED, "earlier thinking is left out")
            cause = "what stands before a turn is written differently once it has been taken"
            return Finding(Outcome.FAILED, cause)
        thought = probe.turn.reasoning
        if thought and thought not in whole[len(prompt) :]:
            return Finding(Outcome.DROPPED, "the turn's own thinking is left out")
        inside = max(0, len(stored) - 1)
        if ids[:inside] != stored[:inside] or inside + len(tail) > len(ids):
            return Finding(Outcome.FAILED, "the same text becomes other tokens in a longer prompt")
        return Finding(Outcome.PASSED)

    def _differs_by_thinking(self, probe: Probe, prompt: str, whole: str) -> bool:
        if any(m.reasoning and m.reasoning not in whole for m in probe.before):
            return True
        open, close = re.escape(self._reasoning.open), re.escape(self._reasoning.close)
        if not open:
            return False
        blocks = re.compile(rf"{open}.*?(?:{close}|$)|\s", re.DOTALL)
        return blocks.sub("", whole).startswith(blocks.sub("", prompt))

    def _text(self, messages: Sequence[Message], tools: Sequence[JsonValue]) -> str:
        return self._template.render(
            messages, tools, add_generation_prompt=True, arguments=self._arguments
        )
