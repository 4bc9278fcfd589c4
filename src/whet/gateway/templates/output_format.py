"""Detect the text around answers and tool calls in a model's output, for grammars.

A call and an answer of known words are rendered with the chat template; the text around the words
is the format. A call format is accepted only if the model's own parser parses such a call.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.messages import Message, ToolCall
from whet.gateway.templates.chat_template import QUESTION
from whet.gateway.templates.renderer import Renderer

PROBE_NAMES = ("probealpha", "probebeta")
"""Names of the tools in probes."""
PROBE_WORDS = ("wordalpha", "wordbeta")
"""Their arguments; the first is also the answer."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """Text around the names and the JSON arguments of tool calls."""

    before: str
    middle: str
    """Between a name and its arguments."""
    separator: str | None
    """Between the arguments of a call and the next name; None if only one call is supported."""
    after: str


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The format of a model's turns, as a grammar needs it."""

    encode: Callable[[str], Sequence[int]]
    answer: tuple[str, str]
    """Text before and after an answer, within its turn."""
    calls: CallFormat | None
    """None if the arguments of calls are not written as JSON."""
    thinking: tuple[str, str] | None = None
    """The tags around thinking, if the model may think first."""


def detect_output_format(renderer: Renderer) -> OutputFormat:
    """Detect the output format of the renderer's model."""
    reasoning = renderer.reasoning
    word = PROBE_WORDS[0]
    text = _render_turn(renderer, Message("assistant", word)) or word
    before, _, after = text.partition(word)
    return OutputFormat(
        encode=renderer.template.encode,
        answer=(before, after.rstrip()),
        calls=_detect_call_format(renderer),
        thinking=(reasoning.open, reasoning.close) if reasoning.open else None,
    )


def _detect_call_format(renderer: Renderer) -> CallFormat | None:
    text = _render_calls(renderer, 1)
    one = re.fullmatch(_build_calls_pattern(1), text or "", re.DOTALL)
    if text is None or one is None:
        return None
    parsed = renderer.parser.parse(text, [_build_tool(name) for name in PROBE_NAMES])
    if parsed is None or [call.name for call in parsed.calls] != [PROBE_NAMES[0]]:
        return None
    before, middle, after = one.groups()
    two = re.fullmatch(_build_calls_pattern(2), _render_calls(renderer, 2) or "", re.DOTALL)
    # Two calls must be written like one, with something between them.
    regular = two is not None and (before, middle, middle, after) == two.group(1, 2, 4, 5)
    return CallFormat(before, middle, two[3] if two and regular else None, after)


def _build_calls_pattern(count: int) -> str:
    """Pattern of a turn with some calls; its groups are the text around names and arguments."""
    parts = [
        rf'{name}(.*?)\{{\s*"expression"\s*:\s*"{word}"\s*\}}'
        for name, word in zip(PROBE_NAMES[:count], PROBE_WORDS, strict=False)
    ]
    return rf"(.*?){'(.*?)'.join(parts)}(.*)"


def _render_calls(renderer: Renderer, count: int) -> str | None:
    calls = [
        ToolCall(f"probe000{i}", PROBE_NAMES[i], json.dumps({"expression": PROBE_WORDS[i]}))
        for i in range(count)
    ]
    return _render_turn(renderer, Message("assistant", "", tuple(calls)))


def _render_turn(renderer: Renderer, message: Message) -> str | None:
    """Render an assistant turn without thinking and end; None if the template rejects it."""
    template, reasoning = renderer.template, renderer.reasoning
    tools = [_build_tool(name) for name in PROBE_NAMES] if message.tool_calls else []
    try:
        prompt = template.render([QUESTION], tools, add_generation_prompt=True)
        full = template.render([QUESTION, message], tools, add_generation_prompt=False)
    except RequestError:
        return None
    # A thinking block that the prompt opens is not in the history of every template.
    if not full.startswith(prompt) and reasoning.open:
        prompt = prompt[: prompt.rfind(reasoning.open)] if reasoning.open in prompt else prompt
    if not full.startswith(prompt):
        return None
    turn = full[len(prompt) :]
    if reasoning.close and reasoning.close in turn:
        turn = turn.partition(reasoning.close)[2].lstrip("\n")
    ends = [template.get_token_text(id) for id in renderer.stop_ids]
    return turn[: min((at for end in ends if (at := turn.find(end)) >= 0), default=len(turn))]


def _build_tool(name: str) -> JsonValue:
    parameters: JsonValue = {"type": "object", "properties": {"expression": {"type": "string"}}}
    function: JsonValue = {"name": name, "description": "A probe.", "parameters": parameters}
    return {"type": "function", "function": function}
