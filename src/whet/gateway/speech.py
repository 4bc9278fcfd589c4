"""How a model writes its answers and calls, learned from its chat template.

A call and an answer with known words in them are rendered; what stands around the words is the
form. A form of calls is only believed if the model's own parser reads such a call back.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from whet.errors import RequestError
from whet.gateway.messages import Message, ToolCall
from whet.gateway.render import Renderer

QUESTION = Message("user", "What is 2 + 3?")
NAMES = ("probealpha", "probebeta")
"""Of the tools that are called."""
WORDS = ("wordalpha", "wordbeta")
"""Their arguments, and the answer."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """The text around the names and the arguments of calls, which are JSON."""

    before: str
    middle: str
    """Between a name and its arguments."""
    again: str | None
    """Between the arguments of a call and the next name; None if only one call is known to do."""
    after: str


@dataclass(frozen=True, slots=True)
class Speech:
    """What a grammar must know of a model."""

    encode: Callable[[str], Sequence[int]]
    answer: tuple[str, str]
    """The text before and after an answer, within its turn."""
    calls: CallForm | None
    """None if the arguments of calls are not written as JSON."""
    think: tuple[str, str] | None = None
    """The marks around thinking, if the model may think first."""


def learn_speech(renderer: Renderer) -> Speech:
    """How the model of this renderer writes."""
    reasoning = renderer.reasoning
    text = _turn(renderer, Message("assistant", WORDS[0])) or WORDS[0]
    before, _, after = text.partition(WORDS[0])
    return Speech(
        encode=renderer.template.encode,
        answer=(before, after.rstrip()),
        calls=_call_form(renderer),
        think=(reasoning.open, reasoning.close) if reasoning.open else None,
    )


def _call_form(renderer: Renderer) -> CallForm | None:
    one, two = _calling(renderer, 1), _calling(renderer, 2)
    alone = re.fullmatch(_pattern(1), one or "", re.DOTALL)
    if one is None or alone is None:
        return None
    parsed = renderer.parser.parse(one, [_tool(name) for name in NAMES])
    if parsed is None or [call.name for call in parsed.calls] != [NAMES[0]]:
        return None
    both = re.fullmatch(_pattern(2), two or "", re.DOTALL)
    before, middle, after = alone.groups()
    regular = both is not None and (before, middle, middle, after) == both.group(1, 2, 4, 5)
    return CallForm(before, middle, both[3] if both and regular else None, after)


def _pattern(calls: int) -> str:
    """A turn that makes so many calls; the groups are what stands around names and arguments."""
    parts = [
        rf'{name}(.*?)\{{\s*"expression"\s*:\s*"{word}"\s*\}}'
        for name, word in zip(NAMES[:calls], WORDS, strict=False)
    ]
    return rf"(.*?){'(.*?)'.join(parts)}(.*)"


def _calling(renderer: Renderer, calls: int) -> str | None:
    made = [
        ToolCall(f"probe000{index}", NAMES[index], json.dumps({"expression": WORDS[index]}))
        for index in range(calls)
    ]
    return _turn(renderer, Message("assistant", "", tuple(made)))


def _turn(renderer: Renderer, message: Message) -> str | None:
    """What the template writes for the model's turn, without thinking and without its end."""
    template, reasoning = renderer.template, renderer.reasoning
    tools = [_tool(name) for name in NAMES] if message.tool_calls else []
    try:
        prompt = template.render([QUESTION], tools, add_generation_prompt=True)
        whole = template.render([QUESTION, message], tools, add_generation_prompt=False)
    except RequestError:
        return None
    if not whole.startswith(prompt) and reasoning.open:
        prompt = prompt[: prompt.rfind(reasoning.open)] if reasoning.open in prompt else prompt
    if not whole.startswith(prompt):
        return None
    turn = whole[len(prompt) :]
    if reasoning.close and reasoning.close in turn:
        turn = turn.partition(reasoning.close)[2].lstrip("\n")
    ends = [template.token_text(id) for id in renderer.stop_ids]
    return turn[: min((at for end in ends if (at := turn.find(end)) >= 0), default=len(turn))]


def _tool(name: str) -> JsonValue:
    parameters: JsonValue = {"type": "object", "properties": {"expression": {"type": "string"}}}
    function: JsonValue = {"name": name, "description": "A probe.", "parameters": parameters}
    return {"type": "function", "function": function}
