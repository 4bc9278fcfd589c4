"""A model folder's tokenizer and chat templates, as Hugging Face writes them, without its library.

Only `tokenizers` and `jinja2` are needed, so a gateway in front of a remote engine starts in a
moment and carries no torch.
"""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn, cast

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import JsonValue
from tokenizers import Tokenizer

from whet.errors import ConfigError, RequestError, boundary
from whet.gateway.messages import Message


class ChatTemplate:
    """Turns conversations into text and text into ids, and ids into text."""

    def __init__(self, folder: Path) -> None:
        with boundary(ConfigError, f"cannot load the tokenizer in {str(folder)!r}"):
            self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = json.loads((folder / "tokenizer_config.json").read_text())
            sources = _template_sources(folder, config)
            if "default" not in sources:
                raise ConfigError(
                    f"the model in {str(folder)!r} has no chat template: add chat_template.jinja"
                )
            environment = _environment()
            self._templates = {n: environment.from_string(s) for n, s in sources.items()}
        self._specials = {
            name: _token_text(config[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if config.get(name)
        }
        self.eos_ids = self._eos_ids(folder)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[JsonValue],
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The text of a conversation. Raises RequestError with what the template objects to."""
        named = "tool_use" if tools and "tool_use" in self._templates else "default"
        try:
            return self._templates[named].render(
                messages=[message.for_template() for message in messages],
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._specials,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template refuses this conversation: {error}") from error

    def encode(self, text: str) -> list[int]:
        """The ids of text; special tokens written in it are recognised, none are added."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, without special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token_text(self, id: int) -> str:
        """One id as text, a special token as it is written."""
        return self._tokenizer.decode([id], skip_special_tokens=False)

    def _eos_ids(self, folder: Path) -> tuple[int, ...]:
        ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            if (folder / name).exists():
                eos = json.loads((folder / name).read_text()).get("eos_token_id")
                ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
        if "eos_token" in self._specials:
            id = self._tokenizer.token_to_id(self._specials["eos_token"])
            ids += [] if id is None else [id]
        return tuple(dict.fromkeys(ids))


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


def _token_text(token: JsonValue) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _environment() -> ImmutableSandboxedEnvironment:
    """What templates may rely on: the settings, filters and functions Hugging Face gives them."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
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
