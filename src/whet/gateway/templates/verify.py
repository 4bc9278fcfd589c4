"""Report at start-up which conversations of a chat template can be continued from stored tokens.

A probe is a conversation up to a turn, the turn, and the messages after it, continued as at run
time. Besides, the stored tokens plus those of the suffix must equal, id for id, a full render of
the conversation, except for the turn itself: sampled tokens are kept as they are. Only a token that
reaches across the start of the turn may differ, since it is partly the turn's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import takewhile
from typing import Literal, NamedTuple

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.messages import Message, ToolCall
from whet.gateway.templates.chat_template import PROBE_TEXT, QUESTION, RESULT, ChatTemplate
from whet.gateway.templates.suffix import TOOL, Mismatch, SuffixCutter
from whet.types import Fork, Omission

MergeMode = Literal["merged", "per-call"]
DropsThinking = Literal["never", "before_last_user", "always"]


class ProbeKind(StrEnum):
    """The kind of conversation that a probe tests; also its name in reports."""

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


WITHOUT_THINKING = frozenset(
    {
        ProbeKind.TWO_TURNS,
        ProbeKind.RESULT,
        ProbeKind.NUDGE,
        ProbeKind.TOOL_TURNS,
        ProbeKind.ANSWER,
    }
)
"""Probes that have a second version with thinking, so thinking is never added to them."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A conversation to be continued."""

    kind: ProbeKind
    before: Sequence[Message]
    turn: Message
    after: Sequence[Message]
    tools: bool = False


class ProbeStatus(StrEnum):
    """The outcome of a probe."""

    PASSED = "passed"
    FAILED = "failed"
    """The texts are equal but their tokens differ, which is not detected at run time."""
    FORKS = "forks"
    """The template renders the conversation differently after the turn."""
    DROPPED = "dropped"
    """The same, because it leaves out earlier thinking."""
    SKIPPED = "skipped"
    """The template rejects the conversation itself."""


class ProbeResult(NamedTuple):
    """The status of a probe and its cause."""

    status: ProbeStatus
    cause: str = ""
    line: str = ""
    """The line of the template that writes the text that differs, if it is known."""


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """Report on which conversations of a template can be continued from stored tokens."""

    mode: MergeMode
    """`merged`: a conversation trains as one row. `per-call`: every call is a row of its own."""
    causes: tuple[str, ...]
    """Why the mode is not merged; empty if it is."""
    passed: tuple[str, ...]
    """Probes in which stored tokens and a full render agree, id for id."""
    failed: tuple[str, ...]
    """Probes in which they do not agree, if nothing is merged."""
    forks: Mapping[str, str]
    """Probes in which they do not agree, and why, if others are merged: such calls are detected and
    start a new row."""
    skipped: Mapping[str, str]
    """Probes that the template itself rejects, and why."""
    lines: Mapping[str, str]
    """Lines of the template that write the text that differs, by probe."""
    close: str
    """The end-of-turn token of the assistant, or "" if there is none."""
    drops_thinking: DropsThinking
    """Which earlier thinking the template leaves out."""
    tools: bool
    """Whether the template shows tools to the model."""
    system: str
    """How system messages are changed that the template would refuse or omit."""
    parser: str
    """Name of the tool-call format."""
    reasoning: str
    """Name of the thinking format."""
    omissions: tuple[str, ...]
    """Parts of requests that the template leaves out; calls that have some are marked."""

    def to_json(self) -> dict[str, JsonValue]:
        """Serialize for `whet doctor`."""
        return {
            "mode": self.mode,
            "causes": list(self.causes),
            "probes": {
                "passed": list(self.passed),
                "failed": list(self.failed),
                "forks": dict(self.forks),
                "skipped": dict(self.skipped),
            },
            "lines": dict(self.lines),
            "close": self.close,
            "drops_thinking": self.drops_thinking,
            "tools": self.tools,
            "system": self.system,
            "parser": self.parser,
            "reasoning": self.reasoning,
            "omissions": list(self.omissions),
        }


SYSTEM = Message("system", "Be brief.")
ANSWER = Message("assistant", "It is 5.")
THANKS = Message("user", "Thanks. And 4 + 4?")
CALL = ToolCall("call_1", "calculator", '{"expression": "2 + 3"}')
SECOND_CALL = ToolCall("call_2", "calculator", '{"expression": "4 + 4"}')
CALL_TURN = Message("assistant", "", (CALL,))
SECOND_CALL_TURN = Message("assistant", "", (SECOND_CALL,))
SECOND_RESULT = Message("tool", "8", tool_call_id=SECOND_CALL.id)
THOUGHT = "Two and three make five."
SECOND_THOUGHT = "Four and four make eight."
OPENING = (SYSTEM, QUESTION)
PADDED = (Message("user", "  What is 2 + 3?\n"), Message("assistant", "\n\n It is 5.  \n"))
FOREIGN = (Message("user", "2 + 3 = ? Zürich 東京 🙂"), Message("assistant", "é 五 👩‍👧 مرحبا"))


def _add_thinking(turn: Message, thinking: str = THOUGHT) -> Message:
    return turn._replace(reasoning=thinking)


PROBES = (
    Probe(ProbeKind.TWO_TURNS, [QUESTION], ANSWER, [THANKS]),
    Probe(ProbeKind.SYSTEM, OPENING, ANSWER, [THANKS]),
    Probe(ProbeKind.THREE_TURNS, [QUESTION, ANSWER, THANKS], ANSWER, [THANKS]),
    Probe(ProbeKind.WHITE_SPACE, PADDED[:1], PADDED[1], [Message("user", " \n Thanks.\n\n")]),
    Probe(ProbeKind.UNICODE, FOREIGN[:1], FOREIGN[1], [FOREIGN[0]]),
    Probe(ProbeKind.TRUNCATED, [QUESTION], Message("assistant", "It is 5, sin"), [THANKS]),
    Probe(ProbeKind.THINKING, [QUESTION], _add_thinking(ANSWER), [THANKS]),
    Probe(ProbeKind.TOOLS, OPENING, ANSWER, [THANKS], tools=True),
    Probe(ProbeKind.RESULT, OPENING, CALL_TURN, [RESULT], tools=True),
    Probe(
        ProbeKind.RESULTS,
        OPENING,
        CALL_TURN._replace(tool_calls=(CALL, SECOND_CALL)),
        [RESULT._replace(content=" 5\n"), SECOND_RESULT._replace(content="8 東京 🙂")],
        tools=True,
    ),
    Probe(
        ProbeKind.TEXT_AND_CALL,
        OPENING,
        CALL_TURN._replace(content="Let me see."),
        [RESULT],
        tools=True,
    ),
    Probe(ProbeKind.NUDGE, OPENING, CALL_TURN, [RESULT, THANKS], tools=True),
    Probe(
        ProbeKind.TOOL_TURNS,
        [*OPENING, CALL_TURN, RESULT],
        SECOND_CALL_TURN,
        [SECOND_RESULT],
        tools=True,
    ),
    Probe(ProbeKind.ANSWER, [*OPENING, CALL_TURN, RESULT], ANSWER, [THANKS], tools=True),
    Probe(ProbeKind.THINKING_RESULT, OPENING, _add_thinking(CALL_TURN), [RESULT], tools=True),
    Probe(
        ProbeKind.THINKING_TOOL_TURNS,
        [*OPENING, _add_thinking(CALL_TURN), RESULT],
        _add_thinking(SECOND_CALL_TURN, SECOND_THOUGHT),
        [SECOND_RESULT],
        tools=True,
    ),
    Probe(
        ProbeKind.THINKING_NUDGE, OPENING, _add_thinking(CALL_TURN), [RESULT, THANKS], tools=True
    ),
    Probe(
        ProbeKind.THINKING_ANSWER,
        [*OPENING, _add_thinking(CALL_TURN), RESULT],
        _add_thinking(ANSWER, SECOND_THOUGHT),
        [THANKS],
        tools=True,
    ),
    Probe(ProbeKind.LATE_SYSTEM, OPENING, ANSWER, [Message("system", "Use words."), THANKS]),
    Probe(ProbeKind.ANOTHER_TURN, [QUESTION], ANSWER, []),
    Probe(ProbeKind.TURN_AFTER_TURN, [QUESTION, ANSWER], ANSWER, [THANKS]),
    Probe(ProbeKind.EDITED, OPENING, CALL_TURN, [RESULT, ANSWER, THANKS], tools=True),
    Probe(ProbeKind.NO_RESULT, OPENING, CALL_TURN, [THANKS], tools=True),
)


class TemplateVerifier:
    """Run every probe on a template."""

    def __init__(
        self,
        template: ChatTemplate,
        suffixes: SuffixCutter,
        *,
        renders_tools: bool,
        can_think: bool,
        always_thinks: bool,
    ) -> None:
        """`always_thinks`: prompts end inside a thinking block, so every turn has thinking."""
        self._template = template
        self._suffixes = suffixes
        self._renders_tools = renders_tools
        self._can_think = can_think
        self._always_thinks = always_thinks

    def run(self) -> dict[ProbeKind, ProbeResult]:
        """Run all probes and return their results."""
        return {probe.kind: self._run_probe(self._add_usual_thinking(probe)) for probe in PROBES}

    def _add_usual_thinking(self, probe: Probe) -> Probe:
        """Add thinking to a probe's turns where every turn of this model has some."""
        if not self._always_thinks or probe.kind in WITHOUT_THINKING or probe.turn.reasoning:
            return probe
        before = [_add_thinking(m) if m.role == "assistant" else m for m in probe.before]
        return replace(probe, before=before, turn=_add_thinking(probe.turn, SECOND_THOUGHT))

    def _run_probe(self, probe: Probe) -> ProbeResult:
        messages = [*probe.before, probe.turn, *probe.after]
        if probe.tools and not self._renders_tools:
            return ProbeResult(ProbeStatus.SKIPPED, "the template shows no tools")
        if not self._can_think and any(message.reasoning for message in messages):
            return ProbeResult(ProbeStatus.SKIPPED, "the template has no thinking")
        tools = (TOOL,) if probe.tools else ()
        try:
            prompt = self._suffixes.render(probe.before, tools, now=0.0)
            full = self._suffixes.render(messages, tools, now=0.0)
        except RequestError as error:
            return ProbeResult(ProbeStatus.SKIPPED, str(error))
        suffix = self._suffixes.cut(prompt, full, probe.turn, probe.after)
        if isinstance(suffix, Mismatch):
            dropped = suffix.fork is Fork.THINKING_DROPPED
            status = ProbeStatus.DROPPED if dropped else ProbeStatus.FORKS
            return ProbeResult(status, suffix.cause, self._find_line(probe, tools, prompt, full))
        return self._compare(prompt, full, suffix)

    def _find_line(self, probe: Probe, tools: Sequence[JsonValue], prompt: str, full: str) -> str:
        """Find the line that writes the text which changes after the turn, or else the turn."""
        if full.startswith(prompt):
            messages = [*probe.before, probe.turn, *probe.after]
            return self._suffixes.find_line(messages, tools, len(prompt))
        same = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, full, strict=False))
        return self._suffixes.find_line(probe.before, tools, len([*same]))

    def _compare(self, prompt: str, full: str, suffix: str) -> ProbeResult:
        """Compare stored prompt ids and suffix ids with the ids of a full render."""
        encode = self._template.encode
        stored, ids, after = encode(prompt), encode(full), encode(suffix)
        # The last token of the prompt may reach into the turn, so it is not compared. Where the
        # template drops thinking that is kept, nothing before the turn is.
        compared = max(0, len(stored) - 1) if full.startswith(prompt) else 0
        if (
            ids[:compared] != stored[:compared]
            or ids[len(ids) - len(after) :] != after
            or compared + len(after) > len(ids)
        ):
            cause = "the same text is encoded to other tokens in a longer prompt"
            return ProbeResult(ProbeStatus.FAILED, cause)
        return ProbeResult(ProbeStatus.PASSED)


def build_report(
    results: Mapping[ProbeKind, ProbeResult],
    *,
    end_of_turn: str,
    closes_thinking: bool,
    tools: bool,
    system: str,
    parser: str,
    reasoning: str,
    omissions: frozenset[Omission],
) -> TemplateReport:
    """Decide from the results of all probes whether conversations are merged.

    `closes_thinking`: prompts end with a closed thinking block, so turns have no thinking.
    """
    by_status = {s: [k for k in results if results[k].status is s] for s in ProbeStatus}
    failed = by_status[ProbeStatus.FAILED]
    forks = [*by_status[ProbeStatus.DROPPED], *by_status[ProbeStatus.FORKS]]
    if not by_status[ProbeStatus.PASSED]:
        failed, forks = [*failed, *forks], []  # every conversation would fork
    causes = _group_by_cause({kind: results[kind].cause for kind in failed})
    if not end_of_turn:
        causes = ["no token ends an assistant turn", *causes]
    if not by_status[ProbeStatus.PASSED] and not causes:
        causes = ["the template rejects every conversation"]
    return TemplateReport(
        mode="per-call" if causes else "merged",
        causes=tuple(causes),
        passed=tuple(kind.value for kind in by_status[ProbeStatus.PASSED]),
        failed=tuple(kind.value for kind in failed),
        forks={kind.value: results[kind].cause for kind in forks},
        skipped={kind.value: results[kind].cause for kind in by_status[ProbeStatus.SKIPPED]},
        lines={kind.value: result.line for kind, result in results.items() if result.line},
        close=end_of_turn,
        drops_thinking=_find_dropped_thinking(results, closes_thinking=closes_thinking),
        tools=tools,
        system=system,
        parser=parser,
        reasoning=reasoning,
        omissions=tuple(omission.value for omission in Omission if omission in omissions),
    )


def _group_by_cause(causes: Mapping[ProbeKind, str]) -> list[str]:
    """List each cause once, with the probes that showed it."""
    kinds: dict[str, list[str]] = {}
    for kind, cause in causes.items():
        kinds.setdefault(cause, []).append(kind)
    return [f"{cause} ({', '.join(names)})" for cause, names in kinds.items()]


def _find_dropped_thinking(
    results: Mapping[ProbeKind, ProbeResult], *, closes_thinking: bool
) -> DropsThinking:
    statuses = {kind: result.status for kind, result in results.items()}
    after_user = {statuses[ProbeKind.THINKING], statuses[ProbeKind.THINKING_ANSWER]}
    in_tools = statuses[ProbeKind.THINKING_RESULT]
    if closes_thinking:  # only the empty thinking block of the prompt can be dropped
        after_user = {statuses[ProbeKind.TWO_TURNS], statuses[ProbeKind.ANSWER]}
        in_tools = statuses[ProbeKind.RESULT]
    if ProbeStatus.DROPPED not in after_user:
        return "never"
    return "before_last_user" if in_tools is ProbeStatus.PASSED else "always"


# ------------------------------------------------------------------- omissions

OMISSION_TEXT = f"{PROBE_TEXT}1"
"""Text by which a part of a request is found in the prompt."""
OMISSION_CALLS = tuple(
    ToolCall(f"call_{number}", "calculator", f'{{"expression": "{text}"}}')
    for number, text in ((1, "2 + 3"), (2, OMISSION_TEXT))
)
OMISSION_PROBES: Mapping[Omission, Sequence[Message]] = {
    Omission.SYSTEM: [Message("system", OMISSION_TEXT), QUESTION],
    Omission.LATE_SYSTEM: [
        QUESTION,
        Message("assistant", "5"),
        Message("system", OMISSION_TEXT),
        QUESTION,
    ],
    Omission.USER: [Message("user", OMISSION_TEXT), QUESTION],
    Omission.CALL_TEXT: [QUESTION, Message("assistant", OMISSION_TEXT, OMISSION_CALLS[:1]), RESULT],
    Omission.SECOND_CALL: [
        *(QUESTION, Message("assistant", "", OMISSION_CALLS)),
        *(RESULT, RESULT._replace(tool_call_id="call_2")),
    ],
    Omission.LONE_RESULT: [QUESTION, Message("tool", OMISSION_TEXT, tool_call_id="call_1")],
    Omission.NAME: [QUESTION._replace(name=OMISSION_TEXT)],
}


def detect_omissions(template: ChatTemplate, *, renders_tools: bool) -> frozenset[Omission]:
    """Find the parts of requests that the template leaves out without an error."""
    return frozenset(
        omission
        for omission, messages in OMISSION_PROBES.items()
        if _leaves_out(template, messages, renders_tools=renders_tools)
    )


def _leaves_out(
    template: ChatTemplate, messages: Sequence[Message], *, renders_tools: bool
) -> bool:
    uses_tools = any(m.tool_calls or m.role == "tool" for m in messages)
    if uses_tools and not renders_tools:
        return False  # such requests are refused
    tools = (TOOL,) if uses_tools else ()
    try:
        return OMISSION_TEXT not in template.render(messages, tools, add_generation_prompt=True)
    except RequestError:
        return False
