"""The `whet` command: its subcommands, one module each, and how their errors are reported."""

import argparse
import gc
import importlib.metadata
import logging
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import NamedTuple, TextIO

from whet.app.cli.flags import AFTER, CommandParser, check_after, split_after
from whet.errors import WhetError
from whet.io.process import treat_sigterm_as_interrupt
from whet.io.text import escape_control_characters, escape_lines


class CommandInfo(NamedTuple):
    """A subcommand of `whet`, defined in the module of its name unless another is named."""

    help: str
    extra: str = "local"
    """The extra to install if an import of its module fails."""
    module: str = ""
    """Its module, if it is not in this folder."""


COMMANDS = {
    "start here": {
        "demo": CommandInfo("train a small model on this machine, in minutes"),
        "models": CommandInfo("list models, download one, or merge an adapter into its base model"),
        "doctor": CommandInfo(
            "check whether a model, a run or a recording gives exact training tokens"
        ),
        "completion": CommandInfo(
            "print a script that completes commands in your shell",
            module="whet.app.shell_completion",
        ),
    },
    "train and evaluate": {
        "dev": CommandInfo("run your agent on a few tasks without training, and show every call"),
        "train": CommandInfo("train the model behind your agent"),
        "sft": CommandInfo(
            "train a model on dialogues, or on the best rollouts of a run",
            module="whet.app.supervised.cli",
        ),
        "dpo": CommandInfo(
            "train a model on preference pairs, or on those of a run",
            module="whet.app.supervised.cli",
        ),
        "optimize-prompt": CommandInfo(
            "search for better prompts of your agent", module="whet.app.prompts.optimize_prompt"
        ),
        "chat": CommandInfo(
            "talk to a trained or any other model", module="whet.app.inspection.terminal_chat"
        ),
        "eval": CommandInfo("compare models on the tasks of your agent", "gateway"),
    },
    "look at results": {
        "runs": CommandInfo("list the runs of a folder", module="whet.app.inspection.run_list"),
        "rollouts": CommandInfo(
            "list rollouts of a run by status, reward, step, group, agent or text",
            "gateway",
            module="whet.app.dashboard.rollout_table",
        ),
        "show": CommandInfo(
            "show the rollouts of a run: calls, tokens, rewards, advantages, failures",
            "gateway",
            module="whet.app.inspection.show",
        ),
        "view": CommandInfo(
            "look at runs in a browser, in the terminal, or in one HTML file",
            "gateway",
            module="whet.app.dashboard.view",
        ),
        "rescore": CommandInfo(
            "score the stored rollouts of a run with another reward or judge",
            "gateway",
            module="whet.app.rescoring",
        ),
        "clean": CommandInfo(
            "delete runs of `whet dev`, or those you name", module="whet.app.inspection.run_list"
        ),
    },
    "run in several processes": {
        "up": CommandInfo(
            "start store, serve, runner and train on this machine, restart them if needed"
        ),
        "store": CommandInfo("serve the database of a run, or maintain it", "gateway"),
        "serve": CommandInfo(
            "serve the model of a run to agents and follow its new weights, or any model by itself"
        ),
        "runner": CommandInfo("run your agent on the rollouts that a run has queued", "runner"),
        "tinker-server": CommandInfo("serve training and sampling to the `tinker` client"),
    },
}
"""The subcommands by group, as `whet --help` lists them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. An error that the user can fix is one line on stderr and exit code 2."""
    tune_gc()
    before, after = split_after((sys.argv[1:] if argv is None else argv) or ["--help"])
    try:
        with treat_sigterm_as_interrupt():
            return _run(before, after)
    except WhetError as error:
        sys.stderr.write(wrap_line(f"whet: {describe(error)}", sys.stderr) + "\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("whet: stopped\n")
        return 130


def _run(before: Sequence[str], after: Sequence[str]) -> int:
    args = build_parser().parse_args(before, argparse.Namespace(**{AFTER: after}))
    _configure_logging(args.log)
    check_after(args)
    from whet.app.cli.display import escape_output  # noqa: PLC0415 - `--help` needs no rich

    escape_output()
    return args.run(args)


def describe(error: WhetError) -> str:
    """Return an error in one line, with what to do if it is a full disk."""
    line = escape_control_characters(" ".join((error.command_text or str(error)).split()))
    if "No space left on device" in line or "disk is full" in line:
        line += (
            "; make room on the disk, then continue with --resume; if `whet runs` does not list "
            "the run, it had not begun: start it again"
        )
    return line


def tune_gc() -> None:
    """Collect garbage in cycles a tenth as often, and the oldest generation a hundredth.

    A call through the gateway allocates hundreds of small values and no cycle, and its session
    stays cached: a full collection finds nothing and pauses every call meanwhile.
    """
    gc.set_threshold(10_000, 10, 100)


def wrap_line(line: str, stream: TextIO) -> str:
    """Break a long line between words for a terminal, which itself breaks lines within words."""
    if not stream.isatty():
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(
        line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


class StderrHandler(logging.Handler):
    """Writes to the current `sys.stderr`: a progress bar replaces it to stay below the lines."""

    def emit(self, record: logging.LogRecord) -> None:
        level, _, rest = escape_lines(self.format(record)).partition(":")
        sys.stderr.write(wrap_line(f"{level.lower()}:{rest}", sys.stderr) + "\n")


def _configure_logging(level: str | None) -> None:
    """Show our warnings, and errors of all libraries; with a level, everything from it on."""
    source = " %(name)s" if level else ""
    logging.basicConfig(
        level=(level or "error").upper(),
        format=f"%(levelname)s{source}: %(message)s",
        handlers=[StderrHandler()],
    )
    logging.getLogger("whet").setLevel((level or "warning").upper())


def build_parser() -> CommandParser:
    """The parser of `whet`; a subcommand's own arguments are added when it is parsed."""
    parser = RootParser(
        prog="whet", description="Train AI agents with RL: keep your agent, change its base URL."
    )
    group = parser.group("help")
    group.add_argument("--version", action="version", version=f"whet {_read_version()}")
    parser.group("options").add_argument(
        "--log", choices=["debug", "info", "warning", "error"], help="log level"
    )
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", parser_class=CommandParser, title="commands"
    )
    for each in COMMANDS.values():
        for name, command in each.items():
            commands.add_parser(
                name,
                description=f"{command.help[0].upper()}{command.help[1:]}.",
                module=command.module or f"whet.app.cli.{name.replace('-', '_')}",
                extra=command.extra,
            )
    return parser


class RootParser(CommandParser):
    """The parser of `whet` itself, whose help lists the commands by group."""

    def format_help(self) -> str:
        lines = ["usage: whet COMMAND [options]", "", str(self.description)]
        for title, commands in COMMANDS.items():
            lines += ["", f"{title}:"]
            lines += [f"  whet {name:<15} {command.help}" for name, command in commands.items()]
        return "\n".join(
            [
                *lines,
                "",
                "`whet COMMAND --help` shows the flags of a command. Before it: --version, and",
                "--log debug|info|warning|error for log lines on stderr (default warning).",
                "Exit codes: 0 done; 1 every attempt of `dev` or `eval` failed; 2 an error, in",
                "one line on stderr; 130 stopped by Ctrl-C.",
                "",
            ]
        )


def _read_version() -> str:
    try:
        return importlib.metadata.version("whet")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
