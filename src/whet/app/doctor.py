"""`whet doctor`: how exact a run can be, or was.

Of a model or a template: what the chat template allows, told before a run depends on it. Of a
run: what its records prove, and what would be trained. Of recorded traffic: what re-tokenising it
would have cost. Needs neither weights nor torch.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import cast

import anyio
from pydantic import JsonValue

from whet.app.addresses import DATABASE, STORE_VARIABLE
from whet.app.drift import drift_report
from whet.app.folder import RunFolder
from whet.app.traffic import traffic_report
from whet.errors import ConfigError
from whet.gateway.render import Renderer
from whet.gateway.template import ChatTemplate
from whet.policies.catalogue import resolve_model
from whet.protocols import Store
from whet.store.opening import open_store
from whet.store.token import FOLDER

ROWS = ("mode", "close", "drops_thinking", "tools", "parser", "reasoning")


def template_verdict(
    folder: Path, template: Path | None = None, *, keep_thinking: bool = False
) -> dict[str, JsonValue]:
    """What is found out about the template of a model's folder, or about another for its tokenizer.

    Raises:
        ConfigError: there is no tokenizer or no template, or one of them cannot be read.
    """
    if template is not None and not template.is_file():
        raise ConfigError(f"there is no template file {str(template)!r}")
    source = None if template is None else template.read_text()
    return Renderer(ChatTemplate(folder, source), keep_thinking=keep_thinking).verdict.to_json()


def run_doctor(args: argparse.Namespace) -> int:
    """Print what was found out: a table, or with `--json` one JSON object."""
    if args.store and not args.run_folder:
        raise ConfigError("--store says where a run's records are: name the run with --run")
    if args.run_folder:
        found = anyio.run(_drift, _run_of(args.run_folder), args.store)
        text = describe_counts(found)
    elif args.traffic:
        found = traffic_report(Path(args.traffic), ChatTemplate(_folder(args)))
        text = describe_counts(found)
    else:
        found = template_verdict(_folder(args), Path(args.template) if args.template else None)
        text = describe(found)
    sys.stdout.write((json.dumps(found, ensure_ascii=False) if args.json else text) + "\n")
    return 0


def _run_of(named: str) -> RunFolder:
    """A run by its folder, or by the name it has in this folder."""
    by_name = RunFolder(FOLDER / "runs" / named)
    return by_name if by_name.config_file.exists() else RunFolder(Path(named))


async def _drift(folder: RunFolder, store: str | None) -> dict[str, JsonValue]:
    selection = folder.config().selection
    async with _records(folder, store) as records:
        return await drift_report(records, selection)


def _records(folder: RunFolder, store: str | None) -> Store:
    """Of a run: at the store that is named, in its own file, or in the file of `whet store`.

    Raises:
        ConfigError: they are in none of these.
    """
    path = folder.path.resolve()
    if store is None and folder.store.exists():
        return open_store(folder.store)
    shared = path.parent.parent / DATABASE
    if address := store or os.environ.get(STORE_VARIABLE) or (shared if shared.exists() else None):
        return open_store(address, run=path.name)
    raise ConfigError(
        f"the records of {str(folder.path)!r} are not on this machine: name their store with "
        f"--store, or set {STORE_VARIABLE}"
    )


def describe_counts(found: dict[str, JsonValue]) -> str:
    """A report of numbers for a reader; nested ones, such as forks by cause, indented."""
    lines: list[str] = []
    for name, value in found.items():
        if isinstance(value, dict):
            lines.append(f"{name.replace('_', ' ')}")
            lines += [f"  {below:<33} {_number(count)}" for below, count in value.items()]
        else:
            lines.append(f"{name.replace('_', ' '):<36}{_number(value)}")
    return "\n".join(lines)


def _number(value: JsonValue) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else "none" if value is None else str(value)


def describe(verdict: dict[str, JsonValue]) -> str:
    """The verdict for a reader."""
    lines = [f"{name.replace('_', ' '):<16}{_shown(verdict[name])}" for name in ROWS]
    causes = cast(list[str], verdict["causes"])
    lines += [f"{'cause' if not i else '':<16}{cause}" for i, cause in enumerate(causes)]
    probes = cast(dict[str, list[str] | dict[str, str]], verdict["probes"])
    for kind, found in probes.items():
        lines.append(f"{kind:<16}{len(found)}")
        why = found if isinstance(found, dict) else dict.fromkeys(found, "")
        lines += [f"  {name}{': ' if cause else ''}{cause}" for name, cause in why.items()]
    return "\n".join(lines)


def _folder(args: argparse.Namespace) -> Path:
    if args.template and not args.tokenizer:
        raise ConfigError("a template needs a tokenizer: --template FILE.jinja --tokenizer DIR")
    if args.tokenizer:
        return Path(args.tokenizer)
    if not args.model:
        raise ConfigError(
            "say what to look at: --model NAME, --template FILE --tokenizer DIR, --run DIR, or "
            "--traffic FILE --model NAME"
        )
    return resolve_model(args.model)


def _shown(value: JsonValue) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
