"""Write the generated pages of docs/reference: the Python API and the commands.

python scripts/document_reference.py
"""

import argparse
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import GenericAlias

import whet
from whet.app.cli.flags import CommandParser
from whet.app.cli.main import build_parser
from whet.types import Value

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"


def python_api() -> str:
    """The page of every public name: signature and docstring."""
    text = "# Python API\n\nEvery name of `import whet`. Names are imported on first use.\n"
    for name in whet.__all__:
        found = getattr(whet, name)
        text += f"\n## `whet.{name}`\n\n```python\n{signature(name, found)}\n```\n"
        if not isinstance(found, GenericAlias):
            text += f"\n{inspect.getdoc(found) or ''}\n"
        if inspect.isclass(found) and not issubclass(found, Exception):
            text += "".join([*fields(found), *methods(found)])
    return re.sub(r"\n{3,}", "\n\n", text)


def signature(name: str, found: object) -> str:
    """The definition of a name, as code."""
    if isinstance(found, GenericAlias):
        return re.sub(r"[a-z.]+\.", "", f"{name} = {found}")
    if inspect.isclass(found) and issubclass(found, Exception):
        return f"class {name}({found.__mro__[1].__name__})"
    if hasattr(found, "model_fields"):
        return f"class {name}"
    prefix = "class " if inspect.isclass(found) else "def "
    found = inspect.signature(found)  # type: ignore[arg-type]
    parameters = [
        each.replace(annotation=shorten(each.annotation)) for each in found.parameters.values()
    ]
    returned = shorten(found.return_annotation)
    return f"{prefix}{name}{found.replace(parameters=parameters, return_annotation=returned)}"


def shorten(annotation: object) -> object:
    """An annotation that is printed without modules, and without quotes around names."""
    return annotation if annotation is inspect.Signature.empty else Annotation(annotation)


class Annotation:
    """A shortened annotation."""

    def __init__(self, annotation: object) -> None:
        self._text = inspect.formatannotation(annotation)

    def __repr__(self) -> str:
        text = re.sub(r"\b(?:\w+\.)+(?=\w)", "", self._text)
        text = re.sub(r"(Literal\[[^]]*\])|'", lambda found: found[1] or "", text)
        # Versions of Python print these otherwise: unions are names and bars since 3.14.
        return re.sub(r"Union\[(\w+), (Literal\[[^]]*\])\]", r"\1 | \2", text)


def fields(found: type) -> Iterator[str]:
    """The fields of a value; those of the config have a page of their own."""
    if issubclass(found, Value):
        for name, field in found.model_fields.items():
            meaning = f": {' '.join(field.description.split())}" if field.description else ""
            yield f"\n- `{name}`{meaning}\n"


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
