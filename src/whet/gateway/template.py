"""A model folder's tokenizer and chat templates, as Hugging Face writes them, without its library.

Only `tokenizers` and `jinja2` are needed, so a gateway in front of a remote engine starts in a
moment and carries no torch.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import NoReturn, cast

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import JsonValue
from tokenizers import Tokenizer

from whet.errors import ConfigError, RequestError, boundary
from whet.gateway.decoding import decoder_of
from whet.gateway.habits import Habits, find_habits
from whet.gateway.messages import Message
from whet.gateway.seams import Seams
from whet.gateway.sketch import Part, let_sketch, parts_of

REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,  # of Jinja's own filters
)
"""What comes out of a template that was given something it was not written for."""
NO_ARGUMENTS: Mapping[str, JsonValue] = {}


class ChatTemplate:
    """Turns conversations into text and text into ids, and ids into text."""

    def __init__(self, folder: Path, source: str | None = None) -> None:
        """Load what a model's folder holds; `source` stands in for the folder's own template."""
        with boundary(ConfigError, f"cannot load the tokenizer in {str(folder)!r}"):
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = _read_json(folder / "tokenizer_config.json")
            self._special_texts = _special_texts(config)
            self.eos_ids = self._eos_ids(folder)
        own = _template_sources(folder, config) if source is None else {"default": source}
        if "default" not in own:
            raise ConfigError(
                f"the model in {str(folder)!r} has no chat template: add chat_template.jinja"
            )
        with boundary(ConfigError, "cannot read the chat template"):
            environment = _environment()
            self._templates = {n: environment.from_string(s) for n, s in own.items()}
        self._sources = own
        self.source = "\n".join(own.values())
        """The text of all its templates: what a model writes is guessed from it."""
        self.tells_time = "strftime_now" in self.source
        """Whether the same conversation may be another prompt tomorrow."""
        added = self._tokenizer.get_added_tokens_decoder()
        self.atoms = frozenset(added)
        """Ids whose text is always one token, whatever stands beside it."""
        self.special = {id: token.content for id, token in added.items() if token.special}
        """The tokens that are markup, not text."""
        self.decode_all = decoder_of(self._tokenizer)
        """The text of ids, special tokens as they are written."""
        self.seams = Seams(self._tokenizer)
        """Where text may be cut before it is encoded."""
        self._habits = find_habits(self._render, self.source)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        *,
        add_generation_prompt: bool,
        arguments: Mapping[str, JsonValue] = NO_ARGUMENTS,
    ) -> str:
        """The text of a conversation. Raises RequestError with what the template objects to.

        `arguments` are the template's own, such as `enable_thinking`.
        """
        return self._render(self._habits, messages, tools, add_generation_prompt, arguments)

    def sketch(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        arguments: Mapping[str, JsonValue],
    ) -> Sequence[Part]:
        """What `render` gives up to the next turn, for messages in which texts are sketches.

        Raises:
            OpaqueError: the template looks at the texts.
            RequestError: as in `render`, or because a sketch is not a text.
        """
        return parts_of(
            self._render(self._habits, messages, tools, True, arguments, self._sketching)
        )

    @cached_property
    def _sketching(self) -> Mapping[str, Template]:
        environment = _environment()
        let_sketch(environment)
        return {n: environment.from_string(s) for n, s in self._sources.items()}

    def encode(self, text: str) -> list[int]:
        """The ids of text; special tokens written in it are recognised, none are added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self.decode_all([id for id in ids if id not in self.special])

    def token_text(self, id: int) -> str:
        """One id as text, a special token as it is written."""
        return self.decode_all([id])

    def token_id(self, text: str) -> int | None:
        """The id of a token, or None if the tokenizer has no such token."""
        return self._tokenizer.token_to_id(text)

    def _render(
        self,
        habits: Habits,
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        add_generation_prompt: bool,
        arguments: Mapping[str, JsonValue] = NO_ARGUMENTS,
        templates: Mapping[str, Template] | None = None,
    ) -> str:
        # Not by the tools alone: agents leave them out of a last request about their results.
        uses_tools = bool(tools) or any(m.tool_calls or m.role == "tool" for m in messages)
        named = "tool_use" if uses_tools and "tool_use" in self._templates else "default"
        given: dict[str, object] = {
            **self._special_texts,
            **arguments,
            "messages": [habits.given(message) for message in messages],
            "tools": list(tools) or None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return (templates or self._templates)[named].render(given)
        except (*REFUSALS, RecursionError) as error:
            raise RequestError(f"the chat template refuses this conversation: {error}") from error

    def _eos_ids(self, folder: Path) -> tuple[int, ...]:
        ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            eos = _read_json(folder / name).get("eos_token_id")
            ids += cast(list[int], eos if isinstance(eos, list) else [] if eos is None else [eos])
        id = self._tokenizer.token_to_id(self._special_texts.get("eos_token", ""))
        return tuple(dict.fromkeys([*ids, *([] if id is None else [id])]))


def _read_json(file: Path) -> dict[str, JsonValue]:
    return json.loads(file.read_text()) if file.exists() else {}


def _template_sources(folder: Path, config: dict[str, JsonValue]) -> dict[str, str]:
    """The folder's templates by name: in their own files, or in the tokenizer's config."""
    sources: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        sources["default"] = inline
    elif isinstance(inline, list):
        named = cast(list[dict[str, str]], inline)
        sources |= {entry["name"]: entry["template"] for entry in named}
    if (folder / "chat_template.jinja").exists():
        sources["default"] = (folder / "chat_template.jinja").read_text()
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        sources[file.stem] = file.read_text()
    return sources


def _special_texts(config: dict[str, JsonValue]) -> dict[str, str]:
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    found = {name: config[name] for name in names if config.get(name)}
    return {
        name: str(token["content"]) if isinstance(token, dict) else str(token)
        for name, token in found.items()
    }


class GenerationTag(Extension):
    """`{% generation %}` marks what a model wrote, for training libraries; here its body stands."""

    tags = {"generation"}  # noqa: RUF012 - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


DICT_NAMES = frozenset(dir(dict))


class _Environment(ImmutableSandboxedEnvironment):
    """Looks a key of a message up as such; Jinja first raises and catches an error."""

    def getattr(self, obj: object, attribute: str) -> object:
        if type(obj) is not dict or attribute in DICT_NAMES:
            return super().getattr(obj, attribute)
        found = cast(dict[str, object], obj)
        if attribute in found:
            return found[attribute]
        return self.undefined(obj=obj, name=attribute)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates may rely on: the settings, filters and functions Hugging Face gives them."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, object] = {"raise_exception": _raise, "strftime_now": _now}
    cast(dict[str, object], environment.globals).update(functions)
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


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
