"""`whet doctor`: check whether conversations give, or gave, exact training tokens.

For a model or a template: what its chat template allows, before a run depends on it. For a run:
what its records prove, and what would be trained. For recorded traffic: which tokens re-tokenizing
it would have changed. Needs neither weights nor torch.
"""

import argparse
import json
import sys
from pathlib import Path

import anyio
from pydantic import JsonValue

from whet.app.cli.flags import DEFAULT_DIR, CommandParser
from whet.app.composition.distributed import STORE_VARIABLE
from whet.app.inspection.exactness import build_exactness_report
from whet.app.inspection.template_report import build_template_report, describe_template
from whet.app.inspection.traffic import build_traffic_report
from whet.app.run_folder import RunFolder
from whet.errors import ConfigError, boundary
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.models.catalog import resolve_model

UNUSED_BESIDE = {
    "run": ("model", "template", "tokenizer", "traffic"),
    "traffic": ("template",),
    "tokenizer": ("model",),
}
"""By flag, the flags that the check which it chooses does not use."""


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet doctor`."""
    parser.usage = "whet doctor --model NAME | --template FILE --tokenizer DIR | --run RUN"
    group = parser.group("what to check")
    group.add_argument("--model", metavar="NAME", help="a model, by name or folder")
    group.add_argument("--template", metavar="FILE", help="a chat template file")
    group.add_argument(
        "--tokenizer", metavar="DIR", help="folder with the tokenizer for --template"
    )
    group.add_argument("--run", dest="run_folder", metavar="RUN", help="a run, by name or folder")
    group.add_argument(
        "--store",
        metavar="URL",
        help=f"store with the records of --run (default: its folder, else ${STORE_VARIABLE})",
    )
    group.add_argument(
        "--traffic",
        metavar="FILE",
        help="recorded Chat Completions calls as JSON lines, for the tokenizer of --model",
    )
    parser.group("output").add_argument(
        "--json", action="store_true", help="print one JSON object instead of a table"
    )
    parser.set_defaults(run=run_doctor)


def check_template(
    folder: Path, template: Path | None = None, *, keep_thinking: bool = False
) -> dict[str, JsonValue]:
    """Verify the chat template of a model folder, or another template with its tokenizer.

    Raises:
        ConfigError: tokenizer or template is missing or cannot be read.
    """
    if template is not None and not template.is_file():
        raise ConfigError(f"no template file at {str(template)!r}")
    with boundary(ConfigError, f"cannot read the template {str(template)!r}"):
        source = None if template is None else template.read_text()
    return build_template_report(
        Renderer(ChatTemplate(folder, source), keep_thinking=keep_thinking)
    )


def run_doctor(args: argparse.Namespace) -> int:
    """Print the report: a table, or with `--json` one JSON object."""
    _check_flags(args)
    if args.run_folder:
        found = anyio.run(
            _check_run, RunFolder.find(args.run_folder, Path(DEFAULT_DIR)), args.store
        )
        text = describe_counts(found)
    elif args.traffic:
        found = build_traffic_report(Path(args.traffic), ChatTemplate(_find_model_folder(args)))
        text = describe_counts(found)
    else:
        found = check_template(
            _find_model_folder(args), Path(args.template) if args.template else None
        )
        text = describe_template(found)
    sys.stdout.write((json.dumps(found, ensure_ascii=False) if args.json else text) + "\n")
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    """Raise ConfigError for a flag that another would make useless."""
    if args.store and not args.run_folder:
        raise ConfigError("--store is only for --run: name the run with --run")
    values = {**vars(args), "run": args.run_folder}
    for flag, unused in UNUSED_BESIDE.items():
        for other in unused:
            if values[flag] and values[other]:
                raise ConfigError(f"found --{flag} and --{other}: leave one out")


async def _check_run(folder: RunFolder, store: str | None) -> dict[str, JsonValue]:
    selection = folder.read_config().selection
    async with folder.open_records(store) as records:
        return await build_exactness_report(records, selection)


def describe_counts(found: dict[str, JsonValue]) -> str:
    """Format a report of counts; nested ones, such as forks by cause, are indented."""
    lines: list[str] = []
    for name, value in found.items():
        if isinstance(value, dict) and value:
            lines.append(f"{name.replace('_', ' ')}")
            lines += [f"  {key:<33} {_format_number(count)}" for key, count in value.items()]
        else:
            lines.append(f"{name.replace('_', ' '):<36}{_format_number(value)}")
    return "\n".join(lines)


def _format_number(value: JsonValue) -> str:
    if value is None or value == {}:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _find_model_folder(args: argparse.Namespace) -> Path:
    if args.template and not args.tokenizer:
        raise ConfigError("--template needs --tokenizer DIR")
    if args.tokenizer:
        return Path(args.tokenizer)
    if not args.model:
        raise ConfigError(
            "nothing to check: give --model NAME, --template FILE --tokenizer DIR, --run RUN, or "
            "--traffic FILE --model NAME"
        )
    return resolve_model(args.model)
