"""Command-line flags for every key of the config: `--adam.lr 1e-4` sets `lr` of `[adam]`."""

import argparse
import difflib
import sys
from collections.abc import Container, Iterator, Sequence
from typing import NoReturn, get_origin

from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from whet.config import RunConfig, merge
from whet.errors import ConfigError

PREFIX = "config:"
AFTER = "after"
"""Where a command's arguments keep what was after `--`: flags of a server that it starts."""


class OneLineParser(argparse.ArgumentParser):
    """Says what is wrong in one line, and takes no shortened flag: a new key would change it."""

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - it has overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        # Before argparse: it takes the value of an unknown flag for something else, and complains
        # of that instead.
        for argument in sys.argv[1:] if args is None else args:
            flag = argument.split("=")[0]
            if self._subparsers and not flag.startswith("-"):
                break  # the rest is for a command
            if flag.startswith("--") and flag not in self._option_string_actions:
                close = difflib.get_close_matches(flag, self._option_string_actions, n=1)
                self.error(f"unknown flag {flag}" + (f", perhaps {close[0]}" if close else ""))
        return super().parse_known_args(args, namespace or argparse.Namespace())

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists what there is\n")


def add_config_flags(parser: argparse.ArgumentParser, only: Container[str] | None = None) -> None:
    """A flag for each key, or for some keys and sections, with its own description."""
    group = parser.add_argument_group("config", "every key of the config, as in its TOML file")
    for key, field in config_leaves():
        if only is not None and not (key in only or key.split(".")[0] in only):
            continue
        group.add_argument(
            f"--{key.replace('_', '-')}",
            dest=PREFIX + key,
            metavar="X",
            default=None,
            type=_split if get_origin(field.annotation) is tuple else str,
            help=_describe(field),
        )
    if only is None or "engine" in only:
        same = "the same as --engine.kind"
        group.add_argument("--engine", dest=f"{PREFIX}engine.kind", metavar="KIND", help=same)
    if only is None:
        same = "the same as --trainer.kind"
        group.add_argument("--trainer", dest=f"{PREFIX}trainer.kind", metavar="KIND", help=same)


def config_values(args: argparse.Namespace) -> dict[str, JsonValue]:
    """The keys the flags set, nested as in the config."""
    values: dict[str, JsonValue] = {}
    for dest, text in vars(args).items():
        if dest.startswith(PREFIX) and text is not None:
            nested: JsonValue = text
            for part in reversed(dest.removeprefix(PREFIX).split(".")):
                nested = {part: nested}
            assert isinstance(nested, dict)
            values = merge(values, nested)
    if (after := getattr(args, AFTER, ())) and not command_in(args):
        values = merge(values, {"engine": {"flags": list(after)}})
    return values


def command_in(args: argparse.Namespace) -> list[str]:
    """The agent's command after `--`: what begins with a dash are flags of an engine's server."""
    after: list[str] = getattr(args, AFTER, [])
    return [] if not after or after[0].startswith("-") else after


def check_after(args: argparse.Namespace) -> None:
    """Refuse what is after `--` if the command runs no such agent, or starts no such server."""
    after: list[str] = getattr(args, AFTER, [])
    if command_in(args):
        taken, what = hasattr(args, "agent"), "runs no agent of yours"
    else:
        taken, what = hasattr(args, f"{PREFIX}engine.flags"), "starts no server"
    if after and not taken:
        raise ConfigError(f"this command {what}: leave out {' '.join(['--', *after])!r}")


def split_after(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """What is before and after a lone `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def config_leaves(
    section: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Every key of the config, as flags and documentation name it."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from config_leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _split(text: str) -> list[str]:
    return text.split(",") if text else []


def _describe(field: FieldInfo) -> str:
    said = (field.description or "").replace("%", "%%")
    return f"{said} [{field.default}]".strip()
