"""`whet completion`: a script that completes commands, flags, values and runs in a shell."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

from whet.app.cli.flags import DEFAULT_DIR, CommandParser
from whet.errors import MissingExtra

SHELLS = ("bash", "zsh", "fish")

EPILOG = f"""where to put it:
  bash   whet completion bash > ~/.local/share/bash-completion/completions/whet
  zsh    whet completion zsh > ~/.whet.zsh, and in ~/.zshrc: source ~/.whet.zsh
  fish   whet completion fish > ~/.config/fish/completions/whet.fish

Runs are completed from {DEFAULT_DIR}/runs in the current folder."""

RUN_METAVARS = frozenset({"RUN", "MODEL", "SOURCE", "[NAME=]MODEL"})
"""Metavars of arguments that may be a run."""
RUN_FLAGS = frozenset({"--model", "--run", "--resume"})

ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
"""Lets zsh use bash's completion function."""

FISH_RUNS = f"(command ls {DEFAULT_DIR}/runs 2>/dev/null)"

BASH = """\
# Completion of `whet` for bash and zsh, written by `whet completion`.
_whet() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}"
    local command="" word before="" words="" values=""
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        if [[ $word != -* && $before != --log ]]; then command=$word; break; fi
        before=$word
    done
    case "$command $prev" in
{values}
    esac
    case "$prev" in
        {run_flags}) values="$(command ls {runs} 2>/dev/null)" ;;
    esac
    case "$command" in
{words}
        "") words="{commands}" ;;
    esac
    case "$command" in
        {run_commands}) [[ $cur != -* ]] && words="$words $(command ls {runs} 2>/dev/null)" ;;
    esac
    [[ -n $values ]] && words=$values
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
    [[ -n $command && $cur != -* ]] && COMPREPLY+=($(compgen -f -- "$cur"))
}}
complete -o filenames -F _whet whet
"""


class Command(NamedTuple):
    """A command of `whet` with its flags and those of its actions."""

    name: str
    """Empty for `whet` itself."""
    help: str
    actions: tuple[str, ...]
    flags: tuple[argparse.Action, ...]
    takes_run: bool


def add_arguments(parser: CommandParser) -> None:
    """Add the argument of `whet completion`."""
    parser.usage = "whet completion bash|zsh|fish"
    parser.epilog = EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.group("shell").add_argument(
        "shell", choices=SHELLS, metavar="SHELL", help="bash, zsh or fish"
    )
    parser.set_defaults(run=run_completion)


def run_completion(args: argparse.Namespace) -> int:
    """Print the script for a shell."""
    from whet.app.cli.main import build_parser  # noqa: PLC0415 - it lists this command

    commands = list(read_commands(build_parser()))
    script = write_fish(commands) if args.shell == "fish" else write_bash(commands)
    sys.stdout.write((ZSH if args.shell == "zsh" else "") + script)
    return 0


def read_commands(root: argparse.ArgumentParser) -> Iterator[Command]:
    """Read `whet` and its commands from their parsers."""
    yield Command("", "", (), tuple(a for a in _list_arguments(root) if a.option_strings), False)
    for name, parser in _list_parsers(root).items():
        try:
            cast(CommandParser, parser).load()
        except MissingExtra:  # its flags are not known without it
            yield Command(name, parser.description or "", (), (), takes_run=False)
            continue
        actions = _list_parsers(parser)
        every = [a for each in (parser, *actions.values()) for a in _list_arguments(each)]
        yield Command(
            name,
            parser.description or "",
            tuple(actions),
            tuple(a for a in every if a.option_strings),
            takes_run=any(not a.option_strings and a.metavar in RUN_METAVARS for a in every),
        )


def _list_arguments(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return parser._actions  # argparse has no other list


def _list_parsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found: dict[str, argparse.ArgumentParser] = {}
    for action in _list_arguments(parser):
        if isinstance(action.choices, dict):  # of subcommands: other choices are sequences
            found |= cast(dict[str, argparse.ArgumentParser], action.choices)
    return found


def _list_long_names(flags: Iterable[argparse.Action]) -> list[str]:
    return [n for flag in flags for n in flag.option_strings if n.startswith("--")]


def _list_values(flag: argparse.Action) -> list[str]:
    """The values of a flag: its choices, or those of a metavar such as `local|vllm`."""
    if flag.choices is not None:
        return [str(each) for each in flag.choices]
    metavar = str(flag.metavar or "")
    return metavar.split("|") if "|" in metavar else []


# ------------------------------------------------------------------- the scripts


def write_bash(commands: Sequence[Command]) -> str:
    """Write the function that bash calls, and zsh by its `bashcompinit`."""
    root, *below = commands
    words = {c.name: " ".join([*c.actions, *sorted(set(_list_long_names(c.flags)))]) for c in below}
    return BASH.format(
        values=_format_cases(_list_value_cases(commands), "values"),
        words=_format_cases(words, "words"),
        commands=" ".join([*(c.name for c in below), *_list_long_names(root.flags)]),
        run_commands="|".join(c.name for c in below if c.takes_run),
        run_flags="|".join(sorted(RUN_FLAGS)),
        runs=f"{DEFAULT_DIR}/runs",
    )


def _list_value_cases(commands: Sequence[Command]) -> dict[str, str]:
    """The values of each flag by a pattern of `COMMAND FLAG`, for any command if all have them."""
    by_flag: dict[str, dict[str, str]] = {}
    for command in commands:
        for flag in command.flags:
            for name in _list_long_names([flag]):
                by_flag.setdefault(name, {})[command.name] = " ".join(_list_values(flag))
    cases: dict[str, str] = {}
    for name, values in by_flag.items():
        differ = len(set(values.values())) > 1
        every = values if differ else {"*": next(iter(values.values()))}
        cases |= {f"{command}\\ {name}": text for command, text in every.items() if text}
    return cases


def _format_cases(values: dict[str, str], variable: str) -> str:
    return "\n".join(f'        {name}) {variable}="{text}" ;;' for name, text in values.items())


def write_fish(commands: Sequence[Command]) -> str:
    """Write one `complete` line for each command, action and flag."""
    root, *below = commands
    lines = ["# Completion of `whet` for fish, written by `whet completion fish`."]
    for flag in root.flags:
        lines += _format_fish_flag("__fish_use_subcommand", flag)
    for command in below:
        about = f"{command.name} -d {_quote(command.help)}"
        lines.append(f"complete -c whet -n __fish_use_subcommand -f -a {about}")
        condition = _quote(f"__fish_seen_subcommand_from {command.name}")
        for action in command.actions:
            lines.append(f"complete -c whet -n {condition} -a {action}")
        if command.takes_run:
            lines.append(f"complete -c whet -n {condition} -a {_quote(FISH_RUNS)}")
        for flag in command.flags:
            lines += _format_fish_flag(condition, flag)
    return "\n".join(lines) + "\n"


def _format_fish_flag(condition: str, flag: argparse.Action) -> Iterator[str]:
    hidden = not flag.help or flag.help == argparse.SUPPRESS
    about = "" if hidden else f" -d {_quote(str(flag.help))}"
    values = " ".join(_list_values(flag))
    for name in _list_long_names([flag]):
        takes = "" if flag.nargs == 0 else " -r"
        if name in RUN_FLAGS:
            takes = f" -r -a {_quote(FISH_RUNS)}"
        elif values:
            takes = f" -x -a {_quote(values)}"  # no file names
        yield f"complete -c whet -n {condition} -l {name[2:]}{takes}{about}"


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
