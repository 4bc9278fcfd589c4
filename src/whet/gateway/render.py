"""Renders what is new in a conversation, so that what was sampled is never encoded again.

Whether a template allows that is not believed but proven at start-up, on dialogues of many shapes;
where it does not, every call is rendered whole and becomes a row of its own, and the log says so.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.graph import Turn
from whet.gateway.messages import Message, Role, ToolCall
from whet.gateway.parsers import choose_parser, choose_reasoning
from whet.gateway.parsers.headed import HeadedParser
from whet.gateway.probes import AVOIDABLE, Finding, Outcome, Prover, Shape
from whet.gateway.tails import QUESTION, STAND_IN, TOOL, Tails, Way, way_of
from whet.gateway.template import ChatTemplate
from whet.gateway.verdict import DropsThinking, Verdict
from whet.types import Fork

logger = logging.getLogger(__name__)

KEEP_THINKING: Mapping[str, JsonValue] = {
    "preserve_thinking": True,
    "truncate_history_thinking": False,
    "clear_thinking": False,
}
"""Arguments by which templates that drop earlier thinking can be told to keep it."""
PROMPT_END = 32
"""Ids at the end of a prompt that show whether thinking has begun."""


class Renderer:
    """Conversations to prompts, for one model."""

    def __init__(self, template: ChatTemplate, *, keep_thinking: bool = False) -> None:
        """Prove the template. With `keep_thinking`, thinking it would drop stays in the prompt."""
        self.template = template
        self.parser = choose_parser(template.source)
        """Finds tool calls in what the model writes."""
        self.reasoning = choose_reasoning(template.source)
        """Finds thinking in it; formats with headers tell it apart themselves."""
        self._keep_thinking = keep_thinking
        known = {name: value for name, value in KEEP_THINKING.items() if name in template.source}
        self._arguments = known if keep_thinking else {}
        self.renders_tools = self._shows("calculator", [QUESTION], (TOOL,))
        """Whether the prompt tells the model of its tools."""
        self._shows_calls = self._shows_turn(Message("assistant", "", _calls()))
        self._shows_results = self._shows_turn(Message("tool", STAND_IN, tool_call_id="call_1"))
        self._headed = isinstance(self.parser, HeadedParser)
        words = (*self.parser.format.tokens, self.reasoning.open, self.reasoning.close)
        self._tails = Tails(
            template,
            self._arguments,
            tools=self.renders_tools,
            syntax=() if self._headed else words,
        )
        self.stop_ids = self._tails.stop_ids
        """Where sampling ends."""
        ending = self._tails.endings.get(Way(calls=False, next="user"))
        self.close_id = ending.close if ending else None
        """The id that ends an assistant turn, or None if the template shows none."""
        prompt = self.template.decode_all(self.whole([QUESTION], ())[-PROMPT_END:])
        self.opens_thinking = self.reasoning.ends_open(prompt)
        """Whether a plain prompt ends inside a block of thinking."""
        self._closes_thinking = self.reasoning.ends_closed(prompt)
        self._findings = self._prove()
        self.verdict = self._verdict()
        if self.verdict.mode == "per-call":
            logger.warning(
                "the chat template cannot be continued turn by turn: one row per call causes=%s",
                "; ".join(self.verdict.causes),
            )

    @property
    def incremental(self) -> bool:
        """Whether a conversation may be continued from stored tokens."""
        return self.verdict.mode == "merged"

    def refuses(self, path: Sequence[Turn], rest: Sequence[Message]) -> Fork | None:
        """Why a conversation may not be continued from these stored turns, or None if it may."""
        if not self.incremental:
            return Fork.TEMPLATE
        turn = path[-1]
        ending = self._tails.endings.get(way_of(turn.message, rest))
        last = turn.generation.tokens[-1:]
        if ending is None or (last and last[0] in self.stop_ids and last[0] != ending.close):
            return Fork.TEMPLATE
        outcomes = {self._findings[shape].outcome for shape in _shapes(_going(path, rest))}
        if Outcome.FAILED in outcomes:
            return Fork.TEMPLATE
        if Outcome.DROPPED in outcomes and not self._keep_thinking:
            return Fork.THINKING_DROPPED
        return None

    def whole(self, messages: Sequence[Message], tools: Sequence[JsonValue]) -> list[int]:
        """The prompt of a conversation, from its beginning.

        Raises:
            RequestError: the template refuses the conversation, or would leave some of it out.
        """
        self._check(messages, tools)
        text = self.template.render(
            messages, tools, add_generation_prompt=True, arguments=self._arguments
        )
        return self.template.encode(text)

    def tail(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        *,
        closed: bool,
        turn: Message,
    ) -> list[int]:
        """The ids after a sampled `turn` that `messages` followed, up to the next turn's start.

        `closed` says whether the turn itself ended with the closing token; a turn that was cut
        short is closed here, as context.
        """
        self._check(messages, tools)
        ids = self._tails.after(turn, messages, tools)
        if closed:
            return ids[1:]
        lead = "" if turn.tool_calls else self._tails.endings[way_of(turn, messages)].lead
        return [*self.template.encode(lead), *ids]

    def opens(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a block of thinking, so that the turn starts there."""
        if not self.reasoning.open:
            return False
        return self.reasoning.ends_open(self.template.decode_all(prompt[-PROMPT_END:]))

    def _check(self, messages: Sequence[Message], tools: Sequence[JsonValue]) -> None:
        """Refuse what the template would leave out without a word."""
        if tools and not self.renders_tools:
            raise RequestError(
                "tools: the model's chat template does not show tools to the model; leave them "
                "out, or give the model a template that does"
            )
        if not self._shows_results and any(m.role == "tool" for m in messages):
            raise RequestError("messages: the model's chat template does not show tool results")
        if not self._shows_calls and any(m.tool_calls for m in messages):
            raise RequestError("messages: the model's chat template does not show tool calls")

    def _shows(
        self, text: str, messages: Sequence[Message], tools: Sequence[JsonValue] = ()
    ) -> bool:
        try:
            rendered = self.template.render(messages, tools, add_generation_prompt=True)
        except RequestError:
            return False
        return text in rendered

    def _shows_turn(self, message: Message) -> bool:
        """Whether a message of a tool loop comes out; True if the template refuses it aloud."""
        before = [QUESTION, Message("assistant", "", _calls("0"))]
        messages = [*before, message] if message.role == "tool" else [QUESTION, message]
        try:
            text = self.template.render(messages, (), add_generation_prompt=True)
        except RequestError:
            return True
        return STAND_IN in text

    def _prove(self) -> dict[Shape, Finding]:
        prover = Prover(
            self.template,
            self._tails,
            self._arguments,
            tools=self.renders_tools and self._shows_results,
            reasoning=self.reasoning,
            thinks=self._headed or bool(self.reasoning.open),
            opened=self.opens_thinking,
        )
        return prover.findings()

    def _verdict(self) -> Verdict:
        found = self._findings
        by = {outcome: [s for s in found if found[s].outcome is outcome] for outcome in Outcome}
        failed = [shape for shape in by[Outcome.FAILED] if shape not in AVOIDABLE]
        forks = [s for s in by[Outcome.FAILED] if s in AVOIDABLE]
        dropped = by[Outcome.DROPPED]
        merges = any(shape not in AVOIDABLE for shape in by[Outcome.PASSED])
        if not failed and not merges and not (self._keep_thinking and dropped):
            failed, dropped = dropped, []
        causes = _causes({shape: found[shape].cause for shape in failed})
        if self.close_id is None:
            causes = ["no token ends an assistant turn", *causes]
        if not merges and not causes and not dropped:
            causes = ["the template refuses every dialogue"]
        return Verdict(
            mode="per-call" if causes else "merged",
            causes=tuple(causes),
            passed=_names(by[Outcome.PASSED]),
            failed=_names(failed),
            forks={shape.value: found[shape].cause for shape in [*dropped, *forks]},
            skipped={shape.value: found[shape].cause for shape in by[Outcome.SKIPPED]},
            close="" if self.close_id is None else self.template.token_text(self.close_id),
            drops_thinking=self._drops_thinking(),
            tools=self.renders_tools,
            parser=self.parser.format.name,
            reasoning=self.parser.format.name if self._headed else self.reasoning.name,
        )

    def _drops_thinking(self) -> DropsThinking:
        outcomes = {shape: finding.outcome for shape, finding in self._findings.items()}
        after_user = {outcomes[Shape.THINKING], outcomes[Shape.THINKING_ANSWER]}
        in_tools = outcomes[Shape.THINKING_RESULT]
        if self._closes_thinking:
            after_user = {outcomes[Shape.TWO_TURNS], outcomes[Shape.ANSWER]}
            in_tools = outcomes[Shape.RESULT]
        if Outcome.DROPPED not in after_user:
            return "never"
        return "before_last_user" if in_tools is Outcome.PASSED else "always"


def _names(shapes: Sequence[Shape]) -> tuple[str, ...]:
    return tuple(shape.value for shape in shapes)


def _causes(found: Mapping[Shape, str]) -> list[str]:
    """Each cause once, with the probes that showed it."""
    shapes: dict[str, list[str]] = {}
    for shape, cause in found.items():
        shapes.setdefault(cause, []).append(shape)
    return [f"{cause} ({', '.join(names)})" for cause, names in shapes.items()]


def _calls(argument: str = STAND_IN) -> tuple[ToolCall, ...]:
    return (ToolCall("call_1", "calculator", json.dumps({"expression": argument})),)


class _Going(NamedTuple):
    """All that counts of how a conversation goes on."""

    roles: frozenset[Role]
    """Of the messages that follow."""
    first: Role | None
    calls: bool
    """Whether the last turn called tools."""
    text: bool
    """Whether it also said something."""
    called_before: bool
    thinks: bool


def _going(path: Sequence[Turn], rest: Sequence[Message]) -> _Going:
    last = path[-1].message
    return _Going(
        frozenset([message.role for message in rest]),
        rest[0].role if rest else None,
        bool(last.tool_calls),
        bool(last.content),
        any(turn.message.tool_calls for turn in path[:-1]),
        any(turn.message.reasoning for turn in path),
    )


@lru_cache(1024)
def _shapes(going: _Going) -> Sequence[Shape]:
    """The probes that must have passed for a conversation to go on this way."""
    roles, first, calls, text, called_before, thinks = going
    shapes: list[Shape] = []
    if "user" in roles and calls:
        shapes.append(Shape.THINKING_NUDGE if thinks else Shape.NUDGE)
    elif "user" in roles:
        # Whether there are tools is not seen here; to fork without need is always right.
        shapes += [Shape.THINKING if thinks else Shape.TWO_TURNS, Shape.TOOLS]
    else:
        shapes.append(Shape.THINKING_RESULT if thinks else Shape.RESULT)
    if "user" in roles and called_before:
        shapes.append(Shape.THINKING_ANSWER if thinks else Shape.ANSWER)
    if calls and text:
        shapes.append(Shape.TEXT_AND_CALL)
    if "system" in roles:
        shapes.append(Shape.LATE_SYSTEM)
    if "assistant" in roles:
        shapes.append(Shape.EDITED)
    if calls and first not in ("tool", None):
        shapes.append(Shape.NO_RESULT)
    if first is None:
        shapes += [Shape.ANOTHER_TURN, Shape.TURN_AFTER_TURN]
    return shapes
