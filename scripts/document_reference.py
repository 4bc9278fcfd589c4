"""Write the generated pages of docs/reference: the Python API and the commands.

python scripts/document_reference.py
"""

import argparse
import inspect
import json
import os
import re
from collections.abc import Iterator, Sequence
from enum import Enum
from inspect import Parameter
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel

import whet
from whet.app.cli.flags import MAX_WIDTH, CommandParser
from whet.app.cli.main import build_parser

MAX_LINE = 88
LEADING_MODULES = re.compile(r"(?<!\w)(?:[a-z_]\w*\.)+(?=\w)")
REFERENCE = Path(__file__).parent.parent / "docs" / "reference"


def python_api() -> str:
    """The page of every public name: signature and docstring."""
    text = "# Python API\n\nEvery name of `import whet`. Names are imported on first use.\n"
    for name in whet.__all__:
        found = getattr(whet, name)
        text += f"\n## `whet.{name}`\n\n```python\n{signature(name, found)}\n```\n"
        if not isinstance(found, GenericAlias):
            text += f"\n{inspect.getdoc(found) or ''}\n"
        if found is whet.RunConfig:
            text += "\nIts keys are those of the [configuration](configuration.md).\n"
        elif inspect.isclass(found) and not issubclass(found, Exception):
            text += "".join([*fields(found), *methods(found)])
    return re.sub(r"\n{3,}", "\n\n", text)


def signature(name: str, found: object) -> str:
    """The definition of a name, as code: on one line if it fits, else a parameter a line."""
    if isinstance(found, GenericAlias):
        return f"{name} = {annotate(found)}"
    if inspect.isclass(found) and issubclass(found, Exception):
        return f"class {name}({found.__mro__[1].__name__})"
    if found is whet.RunConfig:
        return f"class {name}"
    assert callable(found)
    made = inspect.signature(found)
    prefix = "async def " if inspect.iscoroutinefunction(found) else "def "
    end = f" -> {annotate(made.return_annotation)}"
    if inspect.isclass(found):
        prefix, end = "class ", ""
    parts = [*list_parameters([*made.parameters.values()])]
    line = f"{prefix}{name}({', '.join(parts)}){end}"
    if len(line) <= MAX_LINE:
        return line
    return f"{prefix}{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){end}"


def list_parameters(parameters: Sequence[Parameter]) -> Iterator[str]:
    """Each parameter as code, and the marks of those that are positional or keyword only."""
    kinds = [parameter.kind for parameter in parameters]
    for number, parameter in enumerate(parameters):
        before, after = kinds[:number], kinds[number + 1 : number + 2]
        if parameter.kind is Parameter.KEYWORD_ONLY and parameter.kind not in before:
            yield "*"
        text = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        text += parameter.name
        if parameter.annotation is not Parameter.empty:
            text += f": {annotate(parameter.annotation)}"
        if parameter.default is not Parameter.empty:
            text += f" = {show(parameter.default)}"
        yield text
        if parameter.kind is Parameter.POSITIONAL_ONLY and parameter.kind not in after:
            yield "/"


def annotate(annotation: object) -> str:
    """An annotation as one writes it, without the modules of names and the limits of values."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if isinstance(annotation, str):
        return LEADING_MODULES.sub("", annotation)
    if annotation is NoneType or annotation is None:
        return "None"
    if annotation is ...:
        return "..."
    if isinstance(annotation, list):  # the parameters of a callable
        return f"[{', '.join(map(annotate, cast(list[object], annotation)))}]"
    if origin is Annotated:
        return annotate(arguments[0])
    if origin in (Union, UnionType):
        return " | ".join(map(annotate, arguments))
    if origin is Literal:
        return f"Literal[{', '.join(map(show, arguments))}]"
    name: str = getattr(origin or annotation, "__name__", str(annotation))
    return f"{name}[{', '.join(map(annotate, arguments))}]" if arguments else name


def show(default: object) -> str:
    """A default value as one writes it."""
    if isinstance(default, Enum):
        return str(default) if not isinstance(default, str) else json.dumps(default.value)
    if isinstance(default, str):
        return json.dumps(default)
    if isinstance(default, tuple):
        items = [show(each) for each in cast(tuple[object, ...], default)]
        return f"({', '.join(items)}{',' * (len(items) == 1)})"
    if isinstance(default, BaseModel):
        return f"{type(default).__name__}()"
    return "..." if type(default).__module__ == "dataclasses" else repr(default)  # a factory


def fields(found: type) -> Iterator[str]:
    """The documented fields of a stored value."""
    if issubclass(found, BaseModel):
        for name, field in found.model_fields.items():
            if field.description:
                yield f"\n- `{name}`: {' '.join(field.description.split())}\n"


def methods(found: type) -> Iterator[str]:
    """The public methods that a class defines itself."""
    for name, method in vars(found).items():
        documented = inspect.getdoc(method) if inspect.isfunction(method) else None
        if documented and not name.startswith("_"):
            yield f"\n- `{name}`: {' '.join(documented.split())}\n"


def commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of its subcommands, with their arguments."""
    if isinstance(parser, CommandParser):
        parser.load()
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from commands(below)


def cli() -> str:
    """The page of every command: its help."""
    os.environ["COLUMNS"] = str(MAX_WIDTH)  # whatever the terminal has
    text = "# Commands\n\nThe help of every command. The keys of the config are flags too:"
    text += " `--help-config` lists them, and so does [configuration](configuration.md).\n\n"
    text += "An error that you can fix is one line on stderr and exit code 2; Ctrl-C is exit code"
    text += " 130.\n"
    for parser in commands(build_parser()):
        text += f"\n## `{parser.prog}`\n\n```text\n{parser.format_help().rstrip()}\n```\n"
    return text


PAGES = {"python-api.md": python_api, "cli.md": cli}

if __name__ == "__main__":
    for name, write in PAGES.items():
        (REFERENCE / name).write_text(write())
