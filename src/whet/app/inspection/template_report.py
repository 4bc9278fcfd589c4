"""Report on a chat template: what it continues, what starts a new row and why, what it omits."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import cast

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.messages import Message, ToolCall
from whet.gateway.templates.chat_template import QUESTION
from whet.gateway.templates.detokenize import decode_message
from whet.gateway.templates.renderer import Renderer
from whet.gateway.templates.suffix import TOOL
from whet.types import Sampling

WIDTH = 100
INDENT = 18
LINE_CHARS = 76
"""Characters shown of a line of the template."""
CALL = ToolCall("call_1", "calculator", json.dumps({"expression": "2 + 3"}))
TURNS: Mapping[str, Message] = {
    "tool_calls": Message("assistant", "", (CALL,)),
    "thinking": Message("assistant", "It is 5.", reasoning="Two and three make five."),
}
"""Turns that the template writes and that must be read back."""
DROPPED = {
    "never": "shown to the model in all later prompts",
    "before_last_user": "left out of prompts after the next user message, which starts a new row",
    "always": "left out of all later prompts, each of which starts a new row",
}


def build_template_report(renderer: Renderer) -> dict[str, JsonValue]:
    """The report on a template as JSON, with what is read back of turns that it writes."""
    read = {name: _read_back(renderer, turn) for name, turn in TURNS.items()}
    return {**renderer.report.to_json(), "read_back": cast(dict[str, JsonValue], read)}


def _read_back(renderer: Renderer, turn: Message) -> bool | None:
    """Whether a turn that the template writes is read as it was; None if it writes none."""
    tools = (TOOL,) if turn.tool_calls else ()
    try:
        prompt, ids = renderer.render_turn([QUESTION], turn, tools)
    except RequestError:
        return None
    read = decode_message(
        renderer, ids, Sampling(), parse_calls=bool(tools), tools=tools, prompt=prompt
    )
    calls = [(call.name, call.parse_arguments()) for call in read.tool_calls]
    return (read.content.strip(), read.reasoning.strip(), calls) == (
        turn.content,
        turn.reasoning,
        [(call.name, call.parse_arguments()) for call in turn.tool_calls],
    )


def describe_template(report: Mapping[str, JsonValue]) -> str:
    """Format the report for a reader."""
    probes = cast(dict[str, dict[str, str]], report["probes"])
    lines = cast(dict[str, str], report["lines"])
    causes = cast(list[str], report["causes"])
    omissions = cast(list[str], report["omissions"])
    page = [
        _format_entry("conversations", _describe_mode(report)),
        *(_format_entry("", f"because {cause}") for cause in causes),
        _format_entry("end of turn", str(report["close"]) or "no token"),
        _format_entry("system messages", _describe_system(str(report["system"]))),
        _format_entry("tools", _describe_tools(report)),
        _format_entry("thinking", _describe_thinking(report)),
        _format_entry(
            "left out", f"{', '.join(omissions)}; calls are marked" if omissions else "nothing"
        ),
    ]
    if passed := probes["passed"]:
        page += ["", "One row:", _wrap("; ".join(passed), "  ")]
    if forks := probes["forks"]:
        page += ["", "A new row, and the cause is recorded with the call:"]
        page += _group(forks, lines)
    if skipped := probes["skipped"]:
        page += ["", "Not possible with this template:", *_group(skipped, {})]
    return "\n".join(page)


def _describe_mode(report: Mapping[str, JsonValue]) -> str:
    if report["mode"] == "per-call":
        return "per call: every call trains as a row of its own"
    probes = cast(dict[str, Sequence[str]], report["probes"])
    passed = len(probes["passed"])
    total = passed + len(probes["forks"]) + len(probes["failed"])
    return f"merged: {passed} of {total} kinds train as one row"


def _describe_system(rule: str) -> str:
    return "shown where they stand" if rule == "as sent" else rule


def _describe_tools(report: Mapping[str, JsonValue]) -> str:
    if not report["tools"]:
        return "not shown to the model: requests with tools are refused"
    if report["parser"] == "none":
        return "requests with tools are refused: calls in this format cannot be read"
    read = cast(dict[str, bool | None], report["read_back"])["tool_calls"]
    checked = {
        True: "a call that the template writes is read back",
        False: "a call alone is not read back",
        None: "the template writes no call to read back",
    }
    return f"calls are read in the format {report['parser']!r}; {checked[read]}"


def _describe_thinking(report: Mapping[str, JsonValue]) -> str:
    if report["reasoning"] == "none":
        return "none: all text is content"
    read = cast(dict[str, bool | None], report["read_back"])["thinking"]
    checked = {True: " and read back", False: ", but not read back", None: ""}
    dropped = DROPPED[str(report["drops_thinking"])]
    return f"read in the format {report['reasoning']!r}{checked[read]}; {dropped}"


def _group(causes: Mapping[str, str], lines: Mapping[str, str]) -> list[str]:
    """The kinds of conversations with the same cause, then the cause and the template's lines."""
    groups: dict[str, list[str]] = {}
    for kind, cause in causes.items():
        groups.setdefault(cause, []).append(kind)
    page: list[str] = []
    for cause, kinds in groups.items():
        page += [_wrap("; ".join(kinds), "  "), _wrap(cause, "      ")]
        found = dict.fromkeys(lines[kind] for kind in kinds if kind in lines)
        page += [
            "      " + textwrap.shorten(line, LINE_CHARS, placeholder=" ...") for line in found
        ]
    return page


def _format_entry(name: str, text: str) -> str:
    first = f"{name:<{INDENT}}"
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * INDENT)


def _wrap(text: str, indent: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=indent)
