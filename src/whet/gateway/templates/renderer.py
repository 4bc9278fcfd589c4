"""Render prompts; only the new part of a continued conversation, so sampled ids stay as they are.

Every continuation is checked against a render of the whole conversation: the served prompt is what
the template writes, except for the sampled turns. Where that is not so, the prompt is rendered in
full and starts a row of its own. Which conversations that concerns is reported at start-up.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from whet.errors import ConfigError, RequestError
from whet.gateway.graph import Turn
from whet.gateway.messages import Message, ToolCall, join_extensions
from whet.gateway.parsers.formats import NO_PARSER, choose_parser, choose_reasoning
from whet.gateway.parsers.harmony import HarmonyParser
from whet.gateway.templates.chat_template import QUESTION, ChatTemplate, remove_words
from whet.gateway.templates.suffix import (
    PLACEHOLDER,
    TOOL,
    Continuation,
    Mismatch,
    SuffixCutter,
    find_continuation,
)
from whet.gateway.templates.verify import TemplateVerifier, build_report, detect_omissions
from whet.types import Fork, Omission

logger = logging.getLogger(__name__)

KEEP_THINKING: Mapping[str, JsonValue] = {
    "preserve_thinking": True,
    "truncate_history_thinking": False,
    "clear_thinking": False,
}
"""Variables that make templates keep the earlier thinking that they drop by default."""
UNREADABLE = (
    "the model's chat template writes tool calls in a format that is not known here, so they could "
    "not be read (`whet doctor` shows the known formats)"
)
PROMPT_END = 32
"""Ids at the end of a prompt that show whether it ends inside a thinking block."""


class RenderedPrompt(NamedTuple):
    """A rendered prompt, or the part of it after a stored turn."""

    text: str
    """The whole prompt as the template writes it, with its own rendering of sampled turns."""
    ids: Sequence[int]
    """The ids to be served, after those of the stored turn if there is one."""


class Renderer:
    """Render conversations to prompts, for one model."""

    def __init__(self, template: ChatTemplate, *, keep_thinking: bool = False) -> None:
        """Verify the template. With `keep_thinking`, thinking it would drop stays in the prompt."""
        self.template = template
        self.parser = choose_parser(template.source)
        """Parser of the model's tool calls."""
        self.reasoning = choose_reasoning(template.source)
        """Format of the model's thinking; harmony formats mark it in headers instead."""
        known = {name: value for name, value in KEEP_THINKING.items() if name in template.source}
        self._template_kwargs = known if keep_thinking else {}
        self.renders_tools = self._shows("calculator", [QUESTION], (TOOL,))
        """Whether the prompt shows the tools of a request to the model."""
        called = Message("assistant", "", _probe_calls())
        result = Message("tool", "5", tool_call_id="call_1")
        self._renders_calls = self._shows_turn([called, result])
        called = Message("assistant", "", _probe_calls("0"))
        self._renders_results = self._shows_turn([called, result._replace(content=PLACEHOLDER)])
        headers = self.parser if isinstance(self.parser, HarmonyParser) else None
        syntax = (*self.parser.format.special_tokens, self.reasoning.open, self.reasoning.close)
        self._suffixes = SuffixCutter(
            template,
            self._template_kwargs,
            renders_tools=self.renders_tools,
            keep_thinking=keep_thinking,
            thinking=headers.thinking_block if headers else self.reasoning.build_pattern(),
            turn_syntax=() if headers else syntax,
        )
        self.stop_ids = self._suffixes.stop_ids
        """Ids at which sampling stops."""
        end = self._suffixes.turn_ends.get(Continuation(has_calls=False, next_role="user"))
        self.end_of_turn_id = end.token_id if end else None
        """Id that ends an assistant turn, or None if the template writes none."""
        prompt = self.template.decode_all(self._render_question()[-PROMPT_END:])
        self.prompt_opens_thinking = self.reasoning.ends_open(prompt)
        """Whether a plain prompt ends inside a thinking block."""
        self._reads_calls = self._read_back(headers is not None)
        self.omissions = detect_omissions(
            template, renders_tools=self.renders_tools and self._renders_results
        )
        """What the prompt lacks of requests that have it."""
        verifier = TemplateVerifier(
            template,
            self._suffixes,
            renders_tools=self.renders_tools and self._renders_results,
            can_think=bool(headers or self.reasoning.open),
            always_thinks=self.prompt_opens_thinking,
        )
        self.report = build_report(
            verifier.run(),
            end_of_turn=end.token if end else "",
            closes_thinking=self.reasoning.ends_closed(prompt),
            tools=self.renders_tools,
            system=_describe_rules(template),
            parser=self.parser.format.name if self._reads_calls else "none",
            reasoning=self.parser.format.name if headers else self.reasoning.name,
            omissions=self.omissions,
        )
        self._warn()

    def _render_question(self) -> Sequence[int]:
        try:
            return self.render_full([QUESTION], ()).ids
        except RequestError as error:
            raise ConfigError(
                f"the chat template renders no conversation without tools: {error}; a template for "
                "requests with tools alone belongs in additional_chat_templates/tool_use.jinja"
            ) from error

    def _warn(self) -> None:
        """Log what will not work as a user may expect."""
        if self.renders_tools and not self._reads_calls:
            logger.warning("requests with tools are refused: %s", UNREADABLE)
        if self.report.mode == "per-call":
            logger.warning(
                "the chat template cannot be continued turn by turn: one row per call causes=%s",
                "; ".join(self.report.causes),
            )
        if serious := self.omissions - {Omission.NAME}:  # hardly any template shows names
            logger.warning(
                "the chat template leaves out parts of requests; calls that have some are marked "
                "parts=%s",
                ", ".join(sorted(serious)),
            )

    def render_full(
        self, messages: Sequence[Message], tools: Sequence[JsonValue], now: float | None = None
    ) -> RenderedPrompt:
        """Render a whole conversation to a prompt; `now` as in `ChatTemplate.render`.

        Raises:
            RequestError: the template rejects the conversation, or would leave some of it out.
        """
        self._check_shown(messages, tools)
        text = self.template.render(
            messages,
            tools,
            add_generation_prompt=True,
            template_kwargs=self._template_kwargs,
            now=now,
        )
        return RenderedPrompt(text, self.template.encode(text))

    def render_suffix(
        self,
        path: Sequence[Turn],
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        text: str | None = None,
    ) -> RenderedPrompt | Mismatch:
        """Render what follows the stored turns of `path`, with `messages` after the last one.

        `text` is that of the prompt for the last turn, if known. A truncated turn is closed, as
        context.

        Raises:
            RequestError: as in `render_full`.
        """
        if self.report.mode == "per-call":
            return Mismatch(Fork.TEMPLATE, self.report.causes[0])
        self._check_shown(messages, tools)
        text = self._restore_text(path, tools) if text is None else text
        if text is None:
            return Mismatch(Fork.TEMPLATE, "the template does not write the stored prompt again")
        return self._render_after(path, messages, tools, text)

    def _render_after(
        self,
        path: Sequence[Turn],
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        text: str,
    ) -> RenderedPrompt | Mismatch:
        turn, tokens = path[-1].message, path[-1].generation.tokens
        extended = bool(messages) and messages[0].extends
        if extended:
            [turn], messages = join_extensions([turn, messages[0]]), messages[1:]
        try:
            full = self._suffixes.render(
                [*_list_messages(path), turn, *messages], tools, path[0].call.created
            )
        except RequestError as error:
            return Mismatch(Fork.TEMPLATE, str(error))
        suffix = self._suffixes.cut(text, full, turn, messages)
        if isinstance(suffix, Mismatch):
            return suffix
        if extended:
            own = full[: len(full) - len(suffix)].removeprefix(text)
            sampled = self.template.decode(tokens)
            ids = self._suffixes.encode_extension(own, suffix, path[-1].message, sampled)
        else:
            last = tokens[-1] if tokens else None
            ids = self._suffixes.encode_suffix(suffix, turn, messages, last)
        return ids if isinstance(ids, Mismatch) else RenderedPrompt(full, ids)

    def _restore_text(self, path: Sequence[Turn], tools: Sequence[JsonValue]) -> str | None:
        """Render the prompt of the last turn again; None if it is not the one that was served."""
        *before, last = path
        try:
            if not before:
                text = self._suffixes.render(last.context, tools, last.call.created)
                ids: Sequence[int] = self.template.encode(text)
            else:
                text = self._suffixes.render(_list_messages(before), tools, path[0].call.created)
                prompt = self._render_after(before, last.context, tools, text)
                if isinstance(prompt, Mismatch):
                    return None
                text, ids = prompt
        except RequestError:
            return None
        return text if tuple(ids) == last.call.prompt_suffix else None

    def find_turn_end(self, turn: Message, messages: Sequence[Message]) -> int | None:
        """Return the id that ends a turn before these messages, or None if none does."""
        end = self._suffixes.turn_ends.get(find_continuation(turn, messages))
        return end.token_id if end else None

    def render_turn(
        self, before: Sequence[Message], turn: Message, tools: Sequence[JsonValue]
    ) -> tuple[list[int], list[int]]:
        """Render a written assistant turn: its prompt, and the ids a model would sample for it.

        The turn is what the template itself writes after the prompt, up to and including the
        token that ends a turn.

        Raises:
            RequestError: as in `render_full`, or the template does not write the turn after its
                own prompt.
        """
        self._check_shown([*before, turn], tools)
        prompt, whole = (
            self.template.render(
                messages, tools, add_generation_prompt=opens, template_kwargs=self._template_kwargs
            )
            for messages, opens in (([*before], True), ([*before, turn], False))
        )
        if not whole.startswith(prompt):
            opens = self.ends_in_thinking(self.template.encode(prompt))
            hint = "; the prompt opens a thinking block: give the turn its 'reasoning_content'"
            raise RequestError(
                "the chat template writes this assistant turn differently from the prompt for it"
                + (hint if opens and not turn.reasoning else "")
            )
        text = whole.removeprefix(prompt)
        for key, part in (("reasoning_content", turn.reasoning), ("content", turn.content)):
            if part.strip() not in text and "</think>" not in part:
                raise RequestError(f"the chat template does not write the {key!r} of this turn")
        return self._split_turn(prompt, text, turn)

    def _split_turn(self, prompt: str, text: str, turn: Message) -> tuple[list[int], list[int]]:
        before, whole = self.template.encode(prompt), self.template.encode(prompt + text)
        ids = whole[len(before) :]
        if whole[: len(before)] != before:
            # A token reaches from the prompt into the turn, where a sampler starts a new one.
            ids = self.template.encode(text)
            if self.template.decode_all(before + ids) != self.template.decode_all(whole):
                raise RequestError("the turn is encoded differently after its prompt")
        stops = [index for index, id in enumerate(ids) if id in self.stop_ids]
        if stops:
            if self.template.decode(ids[stops[0] + 1 :]).strip():
                token = self.template.get_token_text(ids[stops[0]])
                raise RequestError(f"the turn contains {token!r}, which ends a turn")
            return before, ids[: stops[0] + 1]
        # Some templates write the end of a turn only before the next message.
        next_role = "tool" if turn.tool_calls else "user"
        end = self._suffixes.turn_ends.get(Continuation(bool(turn.tool_calls), next_role))
        if end is None:
            raise RequestError("the chat template does not end the assistant's turn here")
        prefix = "" if turn.tool_calls or text.endswith(end.prefix) else end.prefix
        return before, [*ids, *self.template.encode(prefix), end.token_id]

    def ends_in_thinking(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends inside a thinking block, so that the turn starts there."""
        if not self.reasoning.open:
            return False
        return self.reasoning.ends_open(self.template.decode_all(prompt[-PROMPT_END:]))

    def _check_shown(self, messages: Sequence[Message], tools: Sequence[JsonValue]) -> None:
        """Raise RequestError for what the template would silently leave out."""
        if tools and not self.renders_tools:
            raise RequestError(
                "tools: the model's chat template does not show tools to the model; leave them "
                "out, or give the model a template that does"
            )
        if tools and not self._reads_calls:
            raise RequestError(f"tools: {UNREADABLE}; leave them out, or use another model")
        if not self._renders_results and any(m.role == "tool" for m in messages):
            raise RequestError("messages: the model's chat template does not show tool results")
        if not self._renders_calls and any(m.tool_calls for m in messages):
            raise RequestError("messages: the model's chat template does not show tool calls")

    def _shows(
        self, text: str, messages: Sequence[Message], tools: Sequence[JsonValue] = ()
    ) -> bool:
        try:
            return text in self.template.render(messages, tools, add_generation_prompt=True)
        except RequestError:
            return False

    def _read_back(self, has_headers: bool) -> bool:
        """Whether the parser reads the call that the template writes, if it writes any."""
        if self.parser is NO_PARSER:
            return False
        if not self.renders_tools or self._suffixes.hides_calls:
            return True
        call = Message("assistant", "", _probe_calls())
        result = Message("tool", "5", tool_call_id="call_1")
        try:
            prompt = self._suffixes.render([QUESTION], (TOOL,), now=0.0)
            full = self._suffixes.render([QUESTION, call, result], (TOOL,), now=0.0)
        except RequestError:
            return True  # it is refused whenever it occurs
        turn = full.removeprefix(prompt)
        if turn == full:  # the prompt opens thinking, which is not shown in the history
            turn = full.rpartition(QUESTION.content)[2]
        at = turn.find(PLACEHOLDER)
        syntax = (*self.parser.format.special_tokens, self.reasoning.open, self.reasoning.close)
        if (end := self.find_turn_end(call, [result])) is not None:
            turn = turn[: turn.find(self.template.get_token_text(end), at)]
        else:  # the result follows in the same turn
            turn = turn[: max(at, *(turn.rfind(tag) + len(tag) for tag in syntax))]
        if not has_headers:
            special = self.template.special_tokens.values()
            turn = remove_words(turn, (t for t in special if not any(t in word for word in syntax)))
        if self.reasoning.close:
            turn = turn.rpartition(self.reasoning.close)[2]
        parsed = self.parser.parse(turn, (TOOL,))
        return parsed is not None and [(c.name, c.parse_arguments()) for c in parsed.calls] == [
            (c.name, c.parse_arguments()) for c in call.tool_calls
        ]

    def _shows_turn(self, messages: Sequence[Message]) -> bool:
        """Whether calls or results are rendered; True if the template rejects them."""
        try:
            text = self.template.render([QUESTION, *messages], (), add_generation_prompt=True)
        except RequestError:
            return True
        return PLACEHOLDER in text


def _describe_rules(template: ChatTemplate) -> str:
    rules = ["leading ones are joined"] if template.joins_system else []
    rules += ["later ones are shown as the user's"] if template.moves_system else []
    return ", ".join(rules) or "as sent"


def _list_messages(path: Sequence[Turn]) -> list[Message]:
    """The conversation up to the last turn of a path, which is not included."""
    earlier = [m for turn in path[:-1] for m in (*turn.context, turn.message)]
    return join_extensions([*earlier, *path[-1].context])


def _probe_calls(argument: str = PLACEHOLDER) -> tuple[ToolCall, ...]:
    return (ToolCall("call_1", "calculator", json.dumps({"expression": argument})),)
