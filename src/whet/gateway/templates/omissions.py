"""Find what a chat template leaves out of requests: probed at start-up, marked on the calls.

System messages are moved to where the template shows them before (`ChatTemplate.arrange`).
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise, takewhile

from whet.errors import RequestError
from whet.gateway.messages import Message, ToolCall
from whet.gateway.templates.chat_template import PROBE_TEXT, ChatTemplate
from whet.gateway.templates.suffix import QUESTION, TOOL
from whet.types import Omission

PROBED = f"{PROBE_TEXT}1"
"""Text that is looked for in the prompt."""
CALLS = tuple(
    ToolCall(f"call_{number}", "calculator", f'{{"expression": "{text}"}}')
    for number, text in ((1, "2 + 3"), (2, PROBED))
)
RESULT = Message("tool", "5", tool_call_id="call_1")
ANSWER = Message("assistant", "5")
PROBES: Mapping[Omission, Sequence[Message]] = {
    Omission.SYSTEM: [Message("system", PROBED), QUESTION],
    Omission.LATE_SYSTEM: [
        QUESTION,
        Message("assistant", "5"),
        Message("system", PROBED),
        QUESTION,
    ],
    Omission.USER: [Message("user", PROBED), QUESTION],
    Omission.CALL_TEXT: [QUESTION, Message("assistant", PROBED, CALLS[:1]), RESULT],
    Omission.SECOND_CALL: [
        *(QUESTION, Message("assistant", "", CALLS)),
        *(RESULT, RESULT._replace(tool_call_id="call_2")),
    ],
    Omission.LONE_RESULT: [QUESTION, Message("tool", PROBED, tool_call_id="call_1")],
    Omission.NAME: [QUESTION._replace(name=PROBED)],
}


def detect_omissions(template: ChatTemplate, *, renders_tools: bool) -> frozenset[Omission]:
    """Find what the template leaves out; what it refuses is not left out."""
    return frozenset(
        omission
        for omission, messages in PROBES.items()
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
        return PROBED not in template.render(messages, tools, add_generation_prompt=True)
    except RequestError:
        return False


def find_omissions(
    left_out: frozenset[Omission], messages: Sequence[Message], request: Sequence[Message]
) -> tuple[Omission, ...]:
    """Return what a prompt lacks of a request, of which `messages` at its end are rendered anew."""
    found = [omission for omission in Omission if omission in left_out]
    found = [omission for omission in found if _occurs(omission, messages, request)]
    # Sampled turns are served as they were sampled, without the name that an echo may have.
    echoes = request[: len(request) - len(messages)]
    if Omission.NAME not in found and any(m.name and m.role == "assistant" for m in echoes):
        found.append(Omission.NAME)
    return tuple(found)


def _occurs(omission: Omission, messages: Sequence[Message], request: Sequence[Message]) -> bool:
    roles = [message.role for message in messages]
    begins = len(messages) == len(request)
    leading = len([*takewhile(lambda role: role == "system", roles)]) if begins else 0
    match omission:
        case Omission.SYSTEM:
            return leading > 0
        case Omission.LATE_SYSTEM:
            return "system" in roles[leading:]
        case Omission.USER:
            return ("user", "user") in pairwise(roles)
        case Omission.CALL_TEXT:
            return any(m.tool_calls and m.content.strip() for m in messages)
        case Omission.SECOND_CALL:
            return any(len(m.tool_calls) > 1 for m in messages)
        case Omission.LONE_RESULT:
            called = {call.id for message in request for call in message.tool_calls}
            return any(m.role == "tool" and m.tool_call_id not in called for m in messages)
        case Omission.NAME:
            return any(m.name for m in messages)
