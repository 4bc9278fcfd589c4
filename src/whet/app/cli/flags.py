"""Parsers of the commands, and the flags they share: the agent, its tasks, every config key."""

import argparse
import difflib
import importlib
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from pydantic import JsonValue

from whet.app.composition.distributed import DEFAULT_STORE, STORE_VARIABLE
from whet.app.inputs import TaskFile, load_tasks
from whet.config import RunConfig
from whet.config.suggestion import explain_unknown
from whet.errors import ConfigError, MissingExtra, boundary
from whet.runners.agent import Agent, check_agent
from whet.runners.environments.environment import Split
from whet.runners.environments.hosted_agent import EnvironmentAgent
from whet.runners.loading import load_function

PREFIX = "config:"
"""Marks the destinations of config flags among a command's arguments."""
AFTER = "after"
"""The arguments after `--`: an agent's command, or flags of an inference server."""
DEFAULT_DIR = str(RunConfig.model_fields["dir"].default)
BOOLEAN = "true|false"
"""Metavar of a flag that is on or off."""
MIN_WIDTH, MAX_WIDTH = 40, 100
DEV_TASKS = 3
"""Tasks that `whet dev` runs by default."""


ArgumentGroup = Any  # argparse does not export its type


class CommandParser(argparse.ArgumentParser):
    """Parser of one command: errors in one line, no abbreviated flags, arguments in groups.

    A command's module is imported when the command is parsed, so that `whet --help` stays fast.
    Flags cannot be abbreviated, because a new config key would change what `--step` means.
    """

    def __init__(self, *, module: str = "", extra: str = "local", **options: Any) -> None:
        # Any: the options of ArgumentParser, passed on.
        super().__init__(**options, add_help=False, formatter_class=HelpFormatter)
        self._module = module
        self._extra = extra
        self._groups = dict[str, ArgumentGroup]()
        self.group("help").add_argument(
            "-h", "--help", action="help", help="show this text and exit"
        )

    def load(self) -> None:
        """Import the command's module and add its arguments; does nothing the second time."""
        module, self._module = self._module, ""
        if module:
            try:
                add_arguments = vars(importlib.import_module(module))["add_arguments"]
            except ModuleNotFoundError as error:
                raise MissingExtra.build(f"`{self.prog}` ({error})", self._extra) from error
            add_arguments(self)

    def group(self, title: str) -> ArgumentGroup:
        """The group of arguments with this title."""
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    def add_examples(self, *lines: str) -> None:
        """End the help with command lines to copy."""
        self.epilog = "\n".join(["examples:", *(f"  {line}" for line in lines)])

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - it has overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self.load()
        # Before argparse: it takes the value of an unknown flag for another argument, and
        # complains about that one instead.
        for argument in sys.argv[1:] if args is None else args:
            flag = argument.split("=")[0]
            if self._subparsers and not flag.startswith("-"):
                break  # the rest is for a command
            if flag.startswith("--") and flag not in self._option_string_actions:
                hint = explain_unknown(_convert_to_key(flag), self._map_flags_by_key())
                self.error(f"unknown flag {flag}" + (f", {hint}" if hint else ""))
        found, extra = super().parse_known_args(args, namespace or argparse.Namespace())
        if extra and not self._subparsers:  # here, so that the error names the command
            self.error(f"unrecognized arguments: {' '.join(extra)}{_explain_extra(found, extra)}")
        return found, extra

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        # Any: as argparse calls it. Of a misspelled choice it would list all.
        choices = [str(choice) for choice in action.choices or ()]
        close = difflib.get_close_matches(str(value), choices, n=1)
        if close and value not in choices:
            self.error(f"invalid choice: {value!r}, did you mean {close[0]!r}?")
        super()._check_value(action, value)

    def _map_flags_by_key(self) -> dict[str, str]:
        return {_convert_to_key(each): each for each in self._option_string_actions}

    def format_help(self) -> str:
        self._action_groups.sort(key=lambda group: group is self._groups["help"])  # to the end
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        stop = "" if message.endswith("?") else ";"
        self.exit(2, f"{self.prog}: {message}{stop} see `{self.prog} --help`\n")


def _convert_to_key(flag: str) -> str:
    """The config key of a flag."""
    return flag.removeprefix("--").replace("-", "_")


def find_help_width() -> int:
    """Columns of a help text: those of the terminal, if they are fewer than a file gets."""
    return max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size((MAX_WIDTH, 0)).columns))


class HelpFormatter(argparse.HelpFormatter):
    """Help with the metavar once, and a config flag by its shorter name: `--engine KIND`.

    A metavar that lists choices, which shell completion reads, is too long to stand beside a text.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=27, width=find_help_width())

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:  # examples
            return text
        return super()._fill_text(text, width, indent)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        if "." in action.dest:
            names = min(action.option_strings, key=len)
        value = self._format_args(action, "")
        value = "KIND" if "|" in value and value != BOOLEAN else value
        return names if action.nargs == 0 else f"{names} {value}"


def _explain_extra(found: argparse.Namespace, extra: Sequence[str]) -> str:
    """Return what may be meant by arguments that no flag takes; empty if unknown."""
    values = vars(found)
    if len(extra) == 1 and "run_folder" in values and _is_run(extra[0]):
        return f", did you mean --run {extra[0]}?"
    if len(extra) == 1 and values.get("model", "") is None:
        return f", did you mean --model {extra[0]}?"
    first = values.get("agent")
    if first and ":" not in first:  # the beginning of a command
        return f", did you mean `-- {shlex.join([first, *extra])}`, a command at the end?"
    return ""


def _is_run(name: str) -> bool:
    from whet.app.run_folder import RunFolder  # noqa: PLC0415 - only after an error

    try:
        return bool(RunFolder.find(name, Path(DEFAULT_DIR)))
    except ConfigError:
        return False


# ------------------------------------------------------------------- the agent and its tasks


def add_agent_flags(parser: CommandParser) -> None:
    """Add the three ways to name an agent: a function, an HTTP service, a command."""
    group = parser.group("agent and tasks")
    group.add_argument(
        "agent",
        nargs="?",
        metavar="AGENT",
        help="module:function or file.py:function, or -- COMMAND",
    )
    group.add_argument(
        "--service",
        metavar="URL",
        help="HTTP service instead of AGENT: URL or module:object",
    )
    group.add_argument(
        "--env",
        metavar="KIND:NAME",
        help="instead of AGENT and --tasks: reasoning-gym:NAME, ...",
    )
    group.add_argument(
        "--env-python",
        metavar="PYTHON",
        help="Python that has its package and whet[runner]",
    )
    group.add_argument(
        "--reward",
        choices=["output", "exit", "post"],
        metavar="FROM",
        help="reward of a command: output (default), exit or post",
    )
    group.add_argument(
        "--sandbox",
        metavar="NAME",
        help="run a command in subprocess, bubblewrap, docker:IMAGE",
    )
    group.add_argument(
        "--stdin", action="store_true", help="give a command its task on stdin as well"
    )


def add_tasks_flags(parser: CommandParser, *, held_out: bool) -> None:
    """Add `--tasks` and, for commands that train, `--held-out`."""
    group = parser.group("agent and tasks")
    group.add_argument(
        "--tasks",
        metavar="FILE",
        help="tasks as JSON lines; several: a.jsonl=0.7,b.jsonl=0.3",
    )
    if held_out:
        group.add_argument(
            "--held-out",
            metavar="FILE",
            help="tasks to evaluate on before and after training",
        )


def format_agent_arguments(args: argparse.Namespace) -> list[str]:
    """The arguments that name the same agent to another command; they must come last.

    Raises:
        ConfigError: there is not exactly one agent, or `--reward` is given without a command.
    """
    _check_one_agent(args)
    if after := get_agent_command(args):
        stdin = ["--stdin"] if args.stdin else []
        stdin += ["--sandbox", args.sandbox] if args.sandbox else []
        return [*(["--reward", args.reward] if args.reward else []), *stdin, "--", *after]
    if args.env:
        python = ["--env-python", args.env_python] if args.env_python else []
        return ["--env", args.env, *python]
    return ["--service", args.service] if args.service else [args.agent]


def format_command(
    name: str, args: argparse.Namespace, flags: Sequence[str], more: Sequence[str] = ()
) -> str:
    """A command line with the same agent, those of these flags that were given, and more words."""
    agent, after = split_after(format_agent_arguments(args) if has_agent(args) else [])
    words = ["whet", name, *agent]
    for flag in flags:
        if value := vars(args).get(flag):
            words += [f"--{flag.replace('_', '-')}", value]
    return shlex.join([*words, *more, *(["--", *after] if after else [])])


def has_agent(args: argparse.Namespace) -> bool:
    """Whether the command line names an agent."""
    return bool(args.agent or args.service or args.env or get_agent_command(args))


def load_agent(args: argparse.Namespace) -> Agent:
    """Import or build the agent. Raises ConfigError unless there is exactly one that can run."""
    _check_one_agent(args)
    if after := get_agent_command(args):
        from whet.runners.executors.command import command  # noqa: PLC0415 - only if needed

        return command(
            after, reward=args.reward or "output", stdin=args.stdin, sandbox=args.sandbox
        )
    if args.env:
        from whet.runners.environments.hosted_agent import load_environment  # noqa: PLC0415

        return load_environment(args.env, args.env_python)
    if args.service and "://" in args.service:
        from whet.runners.executors.http_service import Service  # noqa: PLC0415 - only if needed

        return Service(args.service)
    agent = load_function(args.service or args.agent)
    if args.service and isinstance(agent, type):
        with boundary(ConfigError, f"cannot create the service {args.service!r}"):
            agent = agent()
    check_agent(agent)
    return cast(Agent, agent)


def load_named_tasks(
    args: argparse.Namespace, agent: Agent | None, split: Split = "train"
) -> list[JsonValue]:
    """Tasks of `--tasks`, or those of a split of the environment.

    Raises:
        ConfigError: there are none.
    """
    if args.tasks is not None:
        return load_tasks(args.tasks)
    if isinstance(agent, EnvironmentAgent):
        return TaskFile(agent.list_tasks(split), agent.spec)
    raise ConfigError("no tasks: name a file with --tasks")


def load_named_held_out(args: argparse.Namespace, agent: Agent | None) -> list[JsonValue]:
    """Tasks of `--held-out`, or the held-out ones of the environment; empty without either."""
    if args.held_out is not None:
        return load_tasks(args.held_out)
    if isinstance(agent, EnvironmentAgent) and args.tasks is None:
        return agent.list_tasks("held_out")
    return []


def _check_one_agent(args: argparse.Namespace) -> None:
    named = [each for each in (args.agent, args.service, args.env, get_agent_command(args)) if each]
    if len(named) != 1:
        raise ConfigError(
            f"found {len(named)} agents, expected one: module:function, --service URL, --env NAME, "
            "or a command after --"
        )
    if args.env_python and not args.env:
        raise ConfigError("--env-python is only for --env: leave it out")
    if (args.reward is not None or args.stdin or args.sandbox) and not get_agent_command(args):
        flag = "--stdin" if args.stdin else "--sandbox" if args.sandbox else "--reward"
        raise ConfigError(f"{flag} is only for a command after --: leave it out")


# ------------------------------------------------------------------- arguments after `--`


def split_after(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split a command line at a lone `--`."""
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def get_agent_command(args: argparse.Namespace) -> list[str]:
    """The agent's command after `--`; arguments that begin with a dash are flags of a server."""
    after: list[str] = getattr(args, AFTER, [])
    return [] if not after or after[0].startswith("-") else after


def check_after(args: argparse.Namespace) -> None:
    """Refuse arguments after `--` if the command runs no agent, or starts no server."""
    after: list[str] = getattr(args, AFTER, [])
    if get_agent_command(args):
        is_used, what = hasattr(args, "agent"), "runs no agent"
    else:
        is_used, what = hasattr(args, f"{PREFIX}engine.flags"), "starts no server"
    if after and not is_used:
        raise ConfigError(f"this command {what}: leave out {' '.join(['--', *after])!r}")


# ------------------------------------------------------------------- output, and other processes


def add_resume_flag(parser: CommandParser, what: str) -> None:
    """Add `--resume [RUN]`."""
    parser.group("output").add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="RUN",
        help=f"continue {what}: the newest, or this one",
    )


def name_resumed_run(
    args: argparse.Namespace, values: dict[str, JsonValue]
) -> dict[str, JsonValue]:
    """Add to the settings the run that `--resume` names, by its name or its folder."""
    folder = Path(args.resume or "")
    if not args.resume:
        return values
    if folder.parent.name == "runs" and (folder / "config.json").is_file():
        return values | {"name": folder.name, "dir": str(folder.parent.parent)}
    return values | {"name": args.resume}


def add_output_flags(parser: CommandParser) -> None:
    """Add `--quiet` and `--json`."""
    group = parser.group("output")
    group.add_argument("--quiet", action="store_true", help="print warnings and errors only")
    group.add_argument(
        "--json",
        action="store_true",
        help="results as JSON at the end of stdout, rest on stderr",
    )


def add_samples_flag(parser: CommandParser, where: str = "") -> None:
    """Add `--samples`, the number of tasks that `whet dev` runs; `where` begins its help."""
    parser.group("agent and tasks").add_argument(
        "--samples", type=int, metavar="N", help=f"{where}tasks to run (default {DEV_TASKS})"
    )


def add_prompt_flag(parser: CommandParser) -> None:
    """Add `--prompt`, the prompts that an agent gets as resources."""
    parser.group("agent and tasks").add_argument(
        "--prompt",
        metavar="FILE",
        help="prompts: a .txt or .json file, or optimize-prompt run",
    )


def add_store_flags(parser: CommandParser) -> None:
    """Add the flags that name a run of a store: `--store --run --dir`."""
    group = parser.group("store")
    group.add_argument(
        "--store",
        default=os.environ.get(STORE_VARIABLE) or DEFAULT_STORE,
        metavar="URL",
        help=f"URL of `whet store`, or postgresql://... (default ${STORE_VARIABLE}, "
        f"else {DEFAULT_STORE})",
    )
    add_run_flag(parser)
    add_dir_flag(group, has_token=True)


def add_run_flag(parser: CommandParser, *, required: bool = False) -> None:
    """Add `--run`, the name of a run in a store."""
    default = "" if required else " (default 'default')"
    parser.group("store").add_argument(
        "--run",
        dest="run_name",
        required=required,
        metavar="NAME",
        help=f"name of the run{default}",
    )


def add_dir_flag(group: ArgumentGroup, *, has_token: bool = False) -> None:
    """Add `--dir`, the folder of runs, which for some commands has the store's token as well."""
    token = ", and of the store's token unless $WHET_STORE_TOKEN is set" if has_token else ""
    group.add_argument(
        "--dir",
        default=DEFAULT_DIR,
        metavar="DIR",
        help=f"folder of runs{token} (default {DEFAULT_DIR})",
    )


def add_listen_flags(group: ArgumentGroup, port: int, note: str = "") -> None:
    """Add `--host` and `--port`, where a server listens."""
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default 127.0.0.1)",
    )
    group.add_argument(
        "--port",
        type=int,
        default=port,
        metavar="N",
        help=f"port to listen on; 0 picks a free one (default {port}{note})",
    )
