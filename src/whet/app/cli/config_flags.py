"""Command-line flags for every config key, and `--help-config`, which lists them."""

import argparse
import json
import sys
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

from whet.app.cli.flags import (
    AFTER,
    BOOLEAN,
    PREFIX,
    CommandParser,
    find_help_width,
    get_agent_command,
)
from whet.config import INTERNAL_KEYS, UNIONS, RunConfig, merge, read_toml

ALIASES = {
    "engine.kind": "--engine",
    "trainer.kind": "--trainer",
    "name": "--run",
    "supervised.epochs": "--epochs",
    "supervised.batch_size": "--batch-size",
    "supervised.beta": "--beta",
}
"""Other flags for some config keys."""

TRAINING_KEYS = {
    "model": ("model", "engine.kind", "trainer.kind", "trainer.weights"),
    "training": (
        *("steps", "tasks_per_step", "group_size", "adam.lr", "algorithm.name", "loss.name"),
        *("loop.name", "seed"),
    ),
    "running agents": (
        "runner.concurrency",
        "runner.processes",
        "runner.timeout_s",
        "evaluation.samples",
    ),
    "output": ("name", "dir", "tracking.names"),
}
"""The config keys that `--help` shows, by group; `--help-config` shows all of them."""

SHORT_HELP = {
    "model": "tiny, smollm2, Hub name, folder or run",
    "engine.kind": "local (this process), vllm or sglang",
    "engine.device": "auto, cpu or cuda",
    "engine.max_context": "longest sequence in tokens (default: the model's)",
    "engine.urls": "running servers, all with the same model and flags",
    "trainer.kind": "local (this process), tinker or verl",
    "trainer.weights": "lora (adapters) or full",
    "trainer.precision": "of sampling and training: auto, fp32 or bf16",
    "trainer.micro_batch_tokens": "tokens in one forward and backward pass",
    "trainer.gradient_checkpointing": "recompute activations: slower, less memory",
    "trainer.compile": "compile the layers for training",
    "steps": "optimizer steps",
    "tasks_per_step": "tasks in a step",
    "group_size": "rollouts of each task in a step",
    "adam.lr": "learning rate (default 1e-4, full weights 1e-6)",
    "algorithm.name": "grpo, rloo, ... or your module:Class",
    "loss.name": "ppo, gspo, ... or your file.py:function",
    "loop.name": "overlapped collects a step ahead",
    "seed": "seed of the task order and of new weights",
    "runner.concurrency": "attempts to run at once",
    "runner.processes": "agent processes, 0: in this one (default: from cores)",
    "runner.timeout_s": "seconds an attempt may take",
    "runner.temperature": "of training rollouts (default: as the agent asks)",
    "gateway.host": "address to listen on",
    "gateway.port": "port to listen on; 0 picks a free one",
    "gateway.models": "other model names that agents may ask for",
    "gateway.endpoints": "text-only models at other APIs, as NAME=MODEL@URL",
    "supervised.epochs": "passes over the data",
    "supervised.batch_size": "dialogues or pairs in an optimizer step",
    "supervised.held_out": "share to hold out without --held-out",
    "supervised.beta": "weight of the log-ratio to the model before training",
    "evaluation.greedy": "each task once at temperature 0",
    "evaluation.samples": "sampled rollouts of each held-out task",
    "evaluation.temperature": "temperature of the sampled rollouts",
    "evaluation.pass_threshold": "minimum reward of a pass, for pass@k",
    "name": "name of the run (default: from the date)",
    "dir": "folder of all runs, each in runs/NAME",
    "tracking.names": "jsonl, tensorboard, wandb, mlflow",
}
"""One line for each config key that a command's `--help` shows."""
NO_DEFAULTS: Mapping[str, str] = {}


def add_config_flags(
    parser: CommandParser,
    shown: Mapping[str, Sequence[str]],
    *,
    only: Container[str] | None = None,
    file: bool = True,
    defaults: Mapping[str, str] = NO_DEFAULTS,
) -> None:
    """Add a flag for every config key, or for `only` some keys and sections.

    Without `only`, the section `supervised` is left out: it is for `whet sft` and `whet dpo`.

    `--help` shows the keys in `shown`, by group; `--help-config` shows all. With a `file`,
    `--config` names a TOML file. `defaults` are those of the command by key, where they differ.
    """
    group_of = {key: title for title, keys in shown.items() for key in keys}
    fields = {
        key: field
        for key, field in list_config_fields()
        if (key.split(".")[0] != "supervised" if only is None else _is_among(key, only))
    }
    for key in (*group_of, *(key for key in fields if key not in group_of)):
        field, title = fields[key], group_of.get(key)
        names = [f"--{key.replace('_', '-')}", *([ALIASES[key]] if key in ALIASES else [])]
        parser.group(title or "help").add_argument(
            *names,
            dest=PREFIX + key,
            metavar=_format_metavar(field),
            type=READERS.get(get_origin(_unwrap_type(field.annotation)), str),
            help=_format_short_help(key, field, defaults) if title else argparse.SUPPRESS,
        )
    group = parser.group("help")
    group.title = "config and help"
    if file:
        group.add_argument("--config", metavar="FILE", help="TOML file with config keys; flags win")
    group.add_argument(
        "--help-config",
        action=_PrintConfigHelp,
        text=partial(format_config_help, fields),
        help=f"list all {len(fields)} config keys, which are flags, and exit",
    )


def _is_among(key: str, keys: Container[str]) -> bool:
    return key in keys or key.partition(".")[0] in keys


def read_config_values(args: argparse.Namespace) -> dict[str, JsonValue]:
    """The config keys of the command line, over those of the file that `--config` names."""
    values: dict[str, JsonValue] = {}
    for dest, text in vars(args).items():
        if dest.startswith(PREFIX) and text is not None:
            nested: JsonValue = text
            for part in reversed(dest.removeprefix(PREFIX).split(".")):
                nested = {part: nested}
            assert isinstance(nested, dict)
            values = merge(values, nested)
    if (after := getattr(args, AFTER, ())) and not get_agent_command(args):
        values = merge(values, {"engine": {"flags": list(after)}})
    file = getattr(args, "config", None)
    return merge(read_toml(Path(file)), values) if file else values


def list_config_fields(
    section: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Every key that users set with its field, in the order of the sections."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if name in INTERNAL_KEYS:
            continue
        if section is RunConfig and name in UNIONS:
            yield from _list_union_fields(name)
        elif isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from list_config_fields(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _list_union_fields(section: str) -> Iterator[tuple[str, FieldInfo]]:
    """The keys of a section with several kinds, each once, with the kinds that have it."""
    kinds = {str(member.model_fields["kind"].default): member for member in UNIONS[section]}
    summary = " ".join(f"`{kind}`: {_read_first_line(member)}" for kind, member in kinds.items())
    choices: Any = Literal[*kinds]  # Any: a type that is built at run time
    kind = FieldInfo(annotation=choices, default=next(iter(kinds)), description=summary)
    yield f"{section}.kind", kind
    for name in dict.fromkeys(name for member in kinds.values() for name in member.model_fields):
        having = [kind for kind, member in kinds.items() if name in member.model_fields]
        if name != "kind":
            field = copy(kinds[having[0]].model_fields[name])
            if len(having) < len(kinds):
                field.description = f"{', '.join(f'`{k}`' for k in having)}: {field.description}"
            yield f"{section}.{name}", field


def _read_first_line(member: type[BaseModel]) -> str:
    return " ".join((member.__doc__ or "").split()).partition(". ")[0].rstrip(".") + "."


def format_config_help(fields: Mapping[str, FieldInfo]) -> str:
    """The config keys by section: flag, type, default and meaning of each."""
    lines = ["Config keys. Each is a flag, and a key of the TOML file that --config names.", ""]
    last = ""
    for key, field in fields.items():
        section = key.rpartition(".")[0]
        if section != last:
            last = section
            lines += ["", f"[{section}]"]
        default = "" if field.default in (None, "") else f", default {show_default(field)}"
        lines.append(f"  --{key.replace('_', '-')}  {_format_type(field)}{default}")
        about = " ".join((field.description or "").split())
        wrapped = textwrap.wrap(about, find_help_width() - 6, break_on_hyphens=False)
        lines += [" " * 6 + line for line in wrapped]
    return "\n".join(lines) + "\n"


def show_default(field: FieldInfo) -> str:
    """The default value of a config key, as one would write it on the command line."""
    value = field.default
    if isinstance(value, tuple):
        return ",".join(map(str, cast(tuple[object, ...], value))) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


class _PrintConfigHelp(argparse.Action):
    def __init__(self, *, text: Callable[[], str], dest: str, **options: Any) -> None:
        super().__init__(dest=argparse.SUPPRESS, nargs=0, **options)
        self._text = text

    def __call__(self, parser: argparse.ArgumentParser, *args: object, **options: object) -> None:
        sys.stdout.write(self._text())
        parser.exit()


def _unwrap_type(annotation: object) -> object:
    """A field's type without `Annotated` and `| None`."""
    if get_origin(annotation) is Annotated:
        return _unwrap_type(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        members = [each for each in get_args(annotation) if each is not NoneType]
        return _unwrap_type(members[0]) if len(members) == 1 else annotation
    return annotation


def _list_choices(annotation: object) -> tuple[str, ...]:
    kind = _unwrap_type(annotation)
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def _format_metavar(field: FieldInfo) -> str:
    kind = _unwrap_type(field.annotation)
    if choices := _list_choices(kind):
        return "|".join(choices)
    names = {int: "N", float: "X", bool: BOOLEAN, Path: "DIR"}
    if get_origin(kind) is dict:
        return "JSON"
    return "A,B" if get_origin(kind) is tuple else names.get(cast(type, kind), "NAME")


def _format_type(field: FieldInfo) -> str:
    kind = _unwrap_type(field.annotation)
    if choices := _list_choices(kind):
        return "|".join(choices)
    if get_origin(kind) is tuple:
        inner = "|".join(_list_choices(get_args(kind)[0])) or "text"
        return f"list of {inner}, with commas"
    if get_origin(kind) is dict:
        return "JSON"
    names = {int: "integer", float: "number", bool: BOOLEAN, Path: "folder"}
    return names.get(cast(type, kind), "text")


def _format_short_help(key: str, field: FieldInfo, defaults: Mapping[str, str]) -> str:
    about = SHORT_HELP[key]
    if key in defaults:
        return f"{about.partition(' (default')[0]} (default {defaults[key]})"
    return about if field.default in (None, ()) else f"{about} (default {show_default(field)})"


def _split(text: str) -> list[str]:
    return text.split(",") if text else []


def _read_json(text: str) -> JsonValue:
    """A mapping; the config refuses anything else by its key."""
    try:
        return json.loads(text)
    except ValueError:
        return text


READERS: dict[object, Callable[[str], object]] = {tuple: _split, dict: _read_json}
"""How the flag of a list or of a mapping is read."""
