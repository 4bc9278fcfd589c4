"""The commands of a run in several processes: store, serve, runner, up; and `tinker-server`."""

import argparse
import os
from pathlib import Path
from typing import Any

from whet.app.addresses import DEFAULT_STORE, PORT, STORE_VARIABLE
from whet.app.agents import add_agent_flags, load_agent
from whet.app.flags import OneLineParser, add_config_flags, config_values
from whet.app.loading import with_extra
from whet.app.signals import follow_supervisor
from whet.config import RunConfig, merge, read_toml, resolve
from whet.errors import ConfigError

GRACE_S = 20.0
DEFAULT_DIR = str(RunConfig.model_fields["dir"].default)

TINKER_PORT = 4748
TINKER_KEYS = tuple(
    f"trainer.{key}"
    for key in ("precision", "micro_batch_tokens", "gradient_checkpointing", "compile")
)
"""What of the trainer's settings is the server's to say; the rest is its clients'."""

Commands = Any  # argparse does not export the type of what `add_subparsers` gives


def add_process_commands(commands: Commands) -> None:
    """Add them to the `whet` command."""
    _add_store(commands)
    _add_serve(commands)
    _add_runner(commands)
    _add_up(commands)
    _add_tinker_server(commands)


def add_place_flags(parser: argparse.ArgumentParser, store: str | None) -> None:
    """Which run of which store."""
    known = os.environ.get(STORE_VARIABLE)
    parser.add_argument(
        "--store",
        default=known or store,
        metavar="URL",
        help=f"where `whet store` listens, or a postgresql:// URL [{STORE_VARIABLE}, or {store}]",
    )
    _add_run_flag(parser)
    _add_dir_flag(parser)


def _add_run_flag(parser: argparse.ArgumentParser, *, required: bool = False) -> None:
    said = "the run's name" if required else "the run's name [default]"
    parser.add_argument(
        "--run", dest="run_name", default=None, required=required, metavar="NAME", help=said
    )


def _add_dir_flag(parser: argparse.ArgumentParser) -> None:
    said = f"has the store's token, unless WHET_STORE_TOKEN is it [{DEFAULT_DIR}]"
    parser.add_argument("--dir", default=DEFAULT_DIR, help=said)


# ------------------------------------------------------------------- whet store


def _add_store(commands: Commands) -> None:
    store = commands.add_parser("store", help="serve a store to the processes of a run")
    store.add_argument("--db", default=None, metavar="DB", help="a SQLite file or PostgreSQL's URL")
    store.add_argument("--host", default="127.0.0.1", help="the address to listen on [127.0.0.1]")
    store.add_argument("--port", type=int, default=PORT, help=f"0 takes any free one [{PORT}]")
    _add_dir_flag(store)
    store.set_defaults(run=_store)
    actions = store.add_subparsers(metavar="ACTION", parser_class=OneLineParser)
    for action, does in {
        "size": "say what every run keeps",
        "vacuum": "give the space of what was forgotten back to the disk",
        "prune": "forget the calls of rollouts that ended long ago",
        "drop": "forget a run",
        "export": "write a run to a file",
        "import": "read a run from a file that export wrote",
    }.items():
        parser = actions.add_parser(action, help=does, description=does)
        parser.add_argument("--db", default=None, metavar="DB", help="[store.db in --dir]")
        parser.add_argument("--store", default=None, metavar="URL", help="a served store instead")
        _add_run_flag(parser, required=action in ("drop", "export", "import"))
        _add_dir_flag(parser)
        if action == "prune":
            parser.add_argument("--older-than", required=True, metavar="AGE", help="such as 7d")
        if action in ("export", "import"):
            parser.add_argument("file")
        parser.set_defaults(run=_retain, action=action)


def _store(args: argparse.Namespace) -> int:
    follow_supervisor()
    return with_extra("whet.app.store_command", "serve_store", "gateway")(args)


def _retain(args: argparse.Namespace) -> int:
    return with_extra("whet.app.store_command", "retain", "gateway")(args)


# ------------------------------------------------------------------- whet serve


def _add_serve(commands: Commands) -> None:
    serve = commands.add_parser("serve", help="serve the model that a run trains")
    add_place_flags(serve, DEFAULT_STORE)
    serve.add_argument("--url", default=None, help="what runners are told, if it is not our own")
    add_config_flags(serve, only=("engine", "gateway"))
    serve.set_defaults(run=_serve)


def _serve(args: argparse.Namespace) -> int:
    follow_supervisor()
    values = config_values(args)
    resolve(values)
    return with_extra("whet.app.serve_command", "serve_command")(args, values)


# ------------------------------------------------------------------- whet runner


def _add_runner(commands: Commands) -> None:
    runner = commands.add_parser("runner", help="run your agent on what a run has queued")
    add_agent_flags(runner)
    add_place_flags(runner, DEFAULT_STORE)
    runner.add_argument("--concurrency", type=int, default=64, help="attempts at once [64]")
    runner.add_argument(
        "--processes", type=int, default=0, metavar="N", help="one attempt in each; 0 uses none [0]"
    )
    runner.add_argument(
        "--hooks", action="append", default=[], metavar="NAME", help="module:Class, to be called"
    )
    runner.add_argument(
        "--lease", type=float, default=30.0, metavar="S", help="silent so long, it is dead [30]"
    )
    runner.add_argument(
        "--tracer", default=None, metavar="X", help="keep its SDK's spans: otel, openai-agents"
    )
    runner.add_argument(
        "--grace", type=float, default=GRACE_S, metavar="S", help="for attempts when told to stop"
    )
    runner.add_argument(
        "--gateway", default=None, metavar="URL", help="or none, for agents without [of the store]"
    )
    runner.add_argument("--name", default=None, help="its own; after a kill, its old work is free")
    runner.set_defaults(run=_runner)


def _runner(args: argparse.Namespace) -> int:
    follow_supervisor()
    flags = {"concurrency": args.concurrency, "processes": args.processes, "lease_s": args.lease}
    config = resolve({"runner": {**flags, "tracer": args.tracer}})
    agent = load_agent(args)
    return with_extra("whet.app.runner_command", "runner_command", "runner")(
        agent, config.runner, args
    )


# ------------------------------------------------------------------- whet up


def _add_up(commands: Commands) -> None:
    up = commands.add_parser("up", help="train with store, serve, runner and train on this machine")
    add_agent_flags(up)
    up.add_argument("--tasks", required=True, help="training tasks, one JSON value a line")
    up.add_argument("--held-out", default=None, help="tasks to evaluate on before and after")
    up.add_argument("--config", default=None, metavar="FILE", help="a TOML file")
    up.add_argument("--runners", type=int, default=1, help="how many runner processes [1]")
    up.add_argument("--db", default=None, metavar="DB", help="[store.db in --dir]")
    add_config_flags(up)
    up.set_defaults(run=_up)


def _up(args: argparse.Namespace) -> int:
    values = merge(read_toml(Path(args.config)) if args.config else {}, config_values(args))
    config = resolve(values)
    if args.runners < 1:
        raise ConfigError(f"--runners is at least 1; found {args.runners}")
    return with_extra("whet.app.supervisor", "supervise")(args, config, values)


# ------------------------------------------------------------------- whet tinker-server


def _add_tinker_server(commands: Commands) -> None:
    server = commands.add_parser("tinker-server", help="serve training to the `tinker` client")
    server.add_argument("--host", default="127.0.0.1", help="the address to listen on [127.0.0.1]")
    server.add_argument(
        "--port", type=int, default=TINKER_PORT, help=f"0 takes any free one [{TINKER_PORT}]"
    )
    server.add_argument(
        "--name", default=None, help="of the model on the Hub, for clients elsewhere [its folder]"
    )
    server.add_argument(
        "--engines", type=int, default=2, help="sets of weights that are sampled from at once [2]"
    )
    add_config_flags(server, only=("model", "dir", "engine", *TINKER_KEYS))
    server.set_defaults(run=_tinker_server)


def _tinker_server(args: argparse.Namespace) -> int:
    follow_supervisor()
    config = resolve(config_values(args))
    command = with_extra("whet.app.tinker_command", "tinker_server_command", "local,tinker")
    return command(args, config)
