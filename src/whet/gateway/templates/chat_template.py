"""Load a tokenizer and its chat templates, and detect the message format they expect.

Only `tokenizers` and `jinja2` are needed, so a gateway in front of a remote engine starts fast and
does not import torch.

Some templates want content as a list of parts, some null where a turn has only tool calls, some
arguments as JSON text, some ids of nine letters, and thinking has three names. A template that gets
the wrong format silently drops text, so a format is right if the text shows up in the prompt.
"""

import hashlib
import json
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from types import GeneratorType
from typing import Literal, NoReturn, cast

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import JsonValue
from tokenizers import Tokenizer

from whet.errors import ConfigError, RequestError, boundary
from whet.gateway.messages import Message, ToolCall

PROBE_TEXT = "0whet0shown0"
"""Text that no template alters: no white space, no markup."""
JOINT = "\n\n"
"""Text between a system message and the message that it is joined to."""
THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")

ThinkingKey = Literal["reasoning_content", "reasoning", "thinking", "content"]

QUESTION = Message("user", "What is 2 + 3?")
PROBE_CALL_TURN = Message(
    "assistant", "", (ToolCall("call_1", "calculator", f'{{"a": "{PROBE_TEXT}"}}'),)
)
RESULT = Message("tool", "5", tool_call_id="call_1")


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """The format of the messages that a template expects."""

    content_parts: bool = False
    """Content as a list of parts."""
    null_content: bool = False
    """Null, rather than empty content, beside tool calls."""
    json_arguments: bool = False
    """Tool arguments as JSON text, rather than as an object."""
    short_ids: bool = False
    """Tool-call ids of nine letters and digits, rather than the gateway's own."""
    thinking_key: ThinkingKey = "reasoning_content"
    """Key of the thinking; in `content` it stands between think tags before the text."""

    def convert(self, message: Message) -> dict[str, JsonValue]:
        """Convert a canonical message to this format."""
        value = message.to_template()
        if message.reasoning:
            del value["reasoning_content"]
            if self.thinking_key == "content":
                inline = f"<think>\n{message.reasoning}\n</think>\n\n{message.content}"
                value["content"] = inline
            else:
                value[self.thinking_key] = message.reasoning
        if self.null_content and message.tool_calls and not value["content"]:
            value["content"] = None
        if self.content_parts and value["content"] is not None:
            value["content"] = [{"type": "text", "text": value["content"]}]
        calls = cast(list[dict[str, JsonValue]], value.get("tool_calls", []))
        for converted, call in zip(calls, message.tool_calls, strict=True):
            if self.json_arguments:
                converted["function"] = {"name": call.name, "arguments": call.arguments}
            if self.short_ids:
                converted["id"] = _shorten_id(call.id)
        if self.short_ids and message.tool_call_id:
            value["tool_call_id"] = _shorten_id(message.tool_call_id)
        return value


def _restore_model_ids(messages: Sequence[Message]) -> Sequence[Message]:
    """Replace the gateway's ids of tool calls with those that the model wrote."""
    ids = {call.id: call.model_id for m in messages for call in m.tool_calls if call.model_id}
    if not ids:
        return messages
    return [
        m._replace(
            tool_calls=tuple(call._replace(id=ids.get(call.id, call.id)) for call in m.tool_calls),
            tool_call_id=ids.get(m.tool_call_id, m.tool_call_id),
        )
        for m in messages
    ]


def _shorten_id(id: str) -> str:
    if len(id) == 9 and id.isalnum():  # the model's own
        return id
    return hashlib.blake2b(id.encode(), digest_size=8).hexdigest()[:9]


Render = Callable[[MessageFormat, Sequence[Message], Sequence[JsonValue], bool], str]
"""Renders messages and tools in a format, with or without a generation prompt."""


def detect_message_format(render: Render, source: str) -> MessageFormat:
    """Find the format in which the template shows all text; the default one if none does."""

    def renders_text(candidate: MessageFormat, dialogue: Sequence[Message]) -> bool:
        for generation_prompt in (True, False):  # some templates reject one of them
            try:
                if PROBE_TEXT in render(candidate, dialogue, (), generation_prompt):
                    return True
            except RequestError:
                pass
        return False

    def find_first(
        candidates: Iterable[MessageFormat], *dialogues: Sequence[Message]
    ) -> MessageFormat | None:
        return next((c for c in candidates for d in dialogues if renders_text(c, d)), None)

    # The formats are detected one after the other, each on top of those before it.
    plain = MessageFormat()
    contents = [plain, replace(plain, content_parts=True)]
    found = find_first(contents, [Message("user", PROBE_TEXT)]) or plain
    call_formats = [
        replace(found, null_content=null, json_arguments=json, short_ids=short)
        for short in (False, True)
        for json in (False, True)
        for null in (False, True)
    ]
    found = (
        find_first(call_formats, [QUESTION, PROBE_CALL_TURN, RESULT], [QUESTION, PROBE_CALL_TURN])
        or found
    )
    thinking = [replace(found, thinking_key=key) for key in THINKING_KEYS if key in source]
    if "</think>" in source:
        thinking.append(replace(found, thinking_key="content"))
    answer = Message("assistant", "It is 5.", reasoning=PROBE_TEXT)
    call = PROBE_CALL_TURN._replace(
        reasoning=PROBE_TEXT, tool_calls=(ToolCall("call_1", "f", "{}"),)
    )
    return find_first(thinking, [QUESTION, answer], [QUESTION, call, RESULT]) or found


TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,  # raised by Jinja's own filters
)
"""Errors a template may raise on input it was not written for."""
NO_KWARGS: Mapping[str, JsonValue] = {}


class ChatTemplate:
    """Render conversations to text, encode text to token ids, and decode ids."""

    def __init__(self, folder: Path, source: str | None = None) -> None:
        """Load a model folder; `source` replaces the folder's own template."""
        with boundary(ConfigError, f"cannot load the tokenizer in {str(folder)!r}"):
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = _read_json(folder / "tokenizer_config.json")
            self._special_texts = _read_special_texts(config)
            self.eos_ids = self._read_eos_ids(folder)
        sources = _read_template_sources(folder, config) if source is None else {"default": source}
        if "default" not in sources:
            raise ConfigError(
                f"the model in {str(folder)!r} has no chat template: add chat_template.jinja"
            )
        with boundary(ConfigError, "cannot read the chat template"):
            environment = _build_environment()
            self._templates = {n: environment.from_string(s) for n, s in sources.items()}
        self._sources = sources
        self.source = "\n".join(sources.values())
        """The text of all templates; the output formats of the model are detected in it."""
        self.depends_on_time = "strftime_now" in self.source
        """Whether the same conversation may render to another prompt at another time."""
        added = self._tokenizer.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        """Ids of added tokens: their text is always one token, whatever stands beside it."""
        self.byte_ids = find_byte_ids(self._tokenizer)
        """Ids of bytes. Several in a row are text only if all of them together are UTF-8."""
        self.special_tokens = {id: token.content for id, token in added.items() if token.special}
        """Text of the special tokens by id."""
        self.message_format = detect_message_format(self._render, self.source)
        """The format of the messages that the templates expect."""
        self.joins_system, self.moves_system = self._detect_system_rules()
        """Whether leading system messages are joined to one, and whether later ones become the
        user's, since the template would refuse or omit them."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        *,
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, JsonValue] = NO_KWARGS,
        now: float | None = None,
    ) -> str:
        """Render a conversation to text.

        `template_kwargs` are variables of the template itself, such as `enable_thinking`. `now` is
        the time that the template shows, in seconds since the epoch, if not the present.

        Raises:
            RequestError: the template rejects the conversation.
        """
        return self._render(
            self.message_format,
            self.arrange(messages),
            tools,
            add_generation_prompt,
            template_kwargs,
            now,
        )

    def find_line(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        offset: int,
        *,
        template_kwargs: Mapping[str, JsonValue] = NO_KWARGS,
        now: float | None = None,
    ) -> str:
        """Return the line of the template that writes a character of the prompt, with its number.

        Text that a macro writes is found at the line that calls the macro. "" if there is none.
        """
        arranged = self.arrange(messages)
        name = self._choose_template(arranged, tools)
        template = self._templates[name]
        variables = self._build_variables(
            self.message_format, arranged, tools, True, template_kwargs, now
        )
        written = template.root_render_func(template.new_context(variables))
        pieces = cast("GeneratorType[str, None, None]", written)
        end = 0
        for piece in pieces:
            end += len(piece)
            if end > offset and pieces.gi_frame is not None:
                number = template.get_corresponding_lineno(pieces.gi_frame.f_lineno)
                return f"line {number}: {self._sources[name].splitlines()[number - 1].strip()}"
        return ""

    def arrange(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Place system messages where the template shows them, by the two rules above."""
        leading = len([*takewhile(lambda message: message.role == "system", messages)])
        arranged = list(messages[:leading])
        if self.joins_system and leading > 1:
            arranged = [Message("system", JOINT.join(m.content for m in arranged))]
        joinable = False  # whether the last message may take up a message of the user
        for message in messages[leading:]:
            moved = self.moves_system and message.role == "system"
            added = message._replace(role="user") if moved else message
            last = arranged[-1] if arranged else None
            if last and last.role == added.role == "user" and (moved or joinable):
                arranged[-1] = last._replace(content=last.content + JOINT + added.content)
                joinable = joinable and moved
            else:
                arranged.append(added)
                joinable = moved
        return arranged

    def encode(self, text: str) -> list[int]:
        """Encode text; special tokens written in it are recognized, none are added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_all(self, ids: Sequence[int]) -> str:
        """Decode ids with special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def get_token_text(self, id: int) -> str:
        """Text of one id, also of a special token."""
        return self.decode_all([id])

    def find_token_id(self, text: str) -> int | None:
        """Id of a token, or None if the vocabulary does not have it."""
        return self._tokenizer.token_to_id(text)

    def _render(
        self,
        message_format: MessageFormat,
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, JsonValue] = NO_KWARGS,
        now: float | None = None,
    ) -> str:
        template = self._templates[self._choose_template(messages, tools)]
        variables = self._build_variables(
            message_format, messages, tools, add_generation_prompt, template_kwargs, now
        )
        try:
            return template.render(variables)
        except (*TEMPLATE_ERRORS, RecursionError) as error:
            raise RequestError(
                f"the chat template refuses this conversation: {error}{_find_raising_line(error)}"
            ) from error

    def _choose_template(self, messages: Sequence[Message], tools: Sequence[JsonValue]) -> str:
        # `tools` may be empty: agents leave them out of a last request about tool results.
        uses_tools = bool(tools) or any(m.tool_calls or m.role == "tool" for m in messages)
        return "tool_use" if uses_tools and "tool_use" in self._templates else "default"

    def _build_variables(
        self,
        message_format: MessageFormat,
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        add_generation_prompt: bool,
        template_kwargs: Mapping[str, JsonValue],
        now: float | None,
    ) -> dict[str, object]:
        variables: dict[str, object] = {
            **self._special_texts,
            **template_kwargs,
            "messages": [message_format.convert(m) for m in _restore_model_ids(messages)],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        if self.depends_on_time:
            time = datetime.now() if now is None else datetime.fromtimestamp(now)
            variables["strftime_now"] = time.strftime
        return variables

    def _detect_system_rules(self) -> tuple[bool, bool]:
        first, second = (Message("system", PROBE_TEXT + text) for text in ("1", "2"))
        answer = Message("assistant", "It is 5.")

        def renders_system(*messages: Message) -> bool:
            try:
                text = self._render(self.message_format, messages, (), True)
            except RequestError:
                return False
            return all(m.content in text for m in messages if m.role == "system")

        if not renders_system(first, QUESTION):
            return False, False  # no system messages at all
        later = [[second], [answer, second, QUESTION]]
        return not renders_system(first, second, QUESTION), not all(
            renders_system(*before, QUESTION, *after) for before in ([first], []) for after in later
        )

    def _read_eos_ids(self, folder: Path) -> tuple[int, ...]:
        ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            eos = _read_json(folder / name).get("eos_token_id")
            ids += cast(list[int], eos if isinstance(eos, list) else [] if eos is None else [eos])
        id = self._tokenizer.token_to_id(self._special_texts.get("eos_token", ""))
        return tuple(dict.fromkeys([*ids, *([] if id is None else [id])]))


def remove_words(text: str, words: Iterable[str]) -> str:
    """Remove all occurrences of words in one pass; one that only then appears stays."""
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), "", text) if longest_first else text


def find_byte_ids(tokenizer: Tokenizer) -> frozenset[int]:
    """Ids that a tokenizer with byte fallback decodes to single bytes."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = {name: id for name in names if (id := tokenizer.token_to_id(name)) is not None}
    return frozenset(
        id for name, id in ids.items() if tokenizer.decode([id], skip_special_tokens=False) != name
    )


def _read_json(file: Path) -> dict[str, JsonValue]:
    return json.loads(file.read_text()) if file.exists() else {}


def _read_template_sources(folder: Path, config: dict[str, JsonValue]) -> dict[str, str]:
    """Templates by name, from files of their own or from the tokenizer's config."""
    sources: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        sources["default"] = inline
    elif isinstance(inline, list):
        entries = cast(list[dict[str, str]], inline)
        sources |= {entry["name"]: entry["template"] for entry in entries}
    if (folder / "chat_template.jinja").exists():
        sources["default"] = (folder / "chat_template.jinja").read_text()
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        sources[file.stem] = file.read_text()
    return sources


def _read_special_texts(config: dict[str, JsonValue]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    found = {name: config[name] for name in names if config.get(name)}
    return {
        name: str(token["content"]) if isinstance(token, dict) else str(token)
        for name, token in found.items()
    }


def _find_raising_line(error: Exception) -> str:
    """Return the template line where an error was raised, to append to its message."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    return f" (line {lines[-1]} of the template)" if lines else ""


DICT_ATTRIBUTES = frozenset(dir(dict))


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox that looks up a key of a message directly, without trying an attribute first."""

    def getattr(self, obj: object, attribute: str) -> object:
        """Return an attribute, or else an item."""
        if type(obj) is not dict or attribute in DICT_ATTRIBUTES:
            return super().getattr(obj, attribute)
        items = cast(dict[str, object], obj)
        return items[attribute] if attribute in items else self.undefined(obj=obj, name=attribute)


class GenerationTag(Extension):
    """Render `{% generation %}` as its body; training libraries use it to mask model output."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _build_environment() -> ImmutableSandboxedEnvironment:
    """A sandboxed Jinja environment with the settings, filters and functions of transformers."""
    environment = TemplateEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    cast(dict[str, object], environment.globals)["raise_exception"] = _raise_template_error
    return environment


def _to_json(
    value: JsonValue,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_template_error(message: str) -> NoReturn:
    raise TemplateError(message)
