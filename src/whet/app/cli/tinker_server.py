"""`whet tinker-server`: serve the local trainer and engine to the `tinker` client."""

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from whet.app.cli.config_flags import add_config_flags, read_config_values
from whet.app.cli.flags import CommandParser, add_listen_flags
from whet.app.composition.distributed import print_line, raise_file_limit
from whet.config import RunConfig, resolve
from whet.errors import ConfigError, requires_extra
from whet.io.process import follow_supervisor, handle_stop_signals
from whet.io.server import AppServer
from whet.io.threads import run_async, shorten_thread_turns
from whet.models.catalog import resolve_model
from whet.store.http.token import make_token
from whet.store.sqlite import SQLiteStore

if TYPE_CHECKING:
    from whet.app.tinker_server.backend import ModelNames

FOLDER = "tinker"
"""Folder of checkpoints, in `--dir`."""
KEY = "tinker.key"
VARIABLE = "TINKER_API_KEY"
"""Environment variable with the API key; the client reads the same one."""
PREFIX = "tml-"
"""The client accepts only keys with this prefix."""
PORT = 4748
DEFAULT_MODEL = str(RunConfig.model_fields["model"].default)
TRAINER_KEYS = tuple(
    f"trainer.{key}"
    for key in ("precision", "micro_batch_tokens", "gradient_checkpointing", "compile")
)
"""The trainer's settings that the server decides; its clients decide the others."""


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet tinker-server`."""
    parser.usage = "whet tinker-server [options]"
    group = parser.group("server")
    add_listen_flags(group, PORT)
    group.add_argument(
        "--engines",
        type=int,
        default=2,
        metavar="N",
        help="sets of weights of a model that can be sampled from at once (default 2)",
    )
    parser.group("model").add_argument(
        "--model",
        action="append",
        default=[],
        metavar="[NAME=]MODEL",
        help="a model name or folder; NAME is its name on the Hub, for clients on other machines "
        f"(default: its folder); repeatable, for several models or names (default {DEFAULT_MODEL})",
    )
    shown = {"server": ("dir",), "model": ("engine.device", *TRAINER_KEYS)}
    add_config_flags(parser, shown, only=("dir", "engine", *TRAINER_KEYS), file=False)
    parser.set_defaults(run=run_tinker_server)


def run_tinker_server(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    follow_supervisor()
    config = resolve(read_config_values(args))
    raise_file_limit()
    run_async(_serve, args, config)
    return 0


def read_models(values: Sequence[str]) -> dict[str, list[str]]:
    """Read `[NAME=]MODEL` values: the names of each model, in their order.

    Raises:
        ConfigError: a name or a model is empty.
    """
    names: dict[str, list[str]] = {}
    for value in values:
        name, is_named, model = value.partition("=") if "=" in value else ("", "", value)
        if is_named and not (name and model):
            raise ConfigError(f"invalid --model {value!r}: expected [NAME=]MODEL")
        names.setdefault(model, []).extend([name] if is_named else [])
    return names


def _find_folders(models: Mapping[str, Sequence[str]]) -> "list[ModelNames]":
    """Find the folders of models; what leads to one folder is one model, with all its names."""
    from whet.app.tinker_server.backend import ModelNames  # noqa: PLC0415 - imports torch

    found: dict[Path, ModelNames] = {}
    for source, names in models.items():
        folder = resolve_model(source, progress=print_line)
        known = found.get(folder, ModelNames(folder, (), ()))
        found[folder] = ModelNames(folder, (*known.sources, source), (*known.names, *names))
    return list(found.values())


async def _serve(args: argparse.Namespace, config: RunConfig) -> None:
    if args.engines < 1:
        raise ConfigError(f"invalid --engines {args.engines}: expected at least 1")
    if config.engine.kind != "local":
        raise ConfigError(
            f"found engine.kind {config.engine.kind!r}, but this server samples from models in "
            "its own process: leave out --engine"
        )
    models = read_models(args.model or [DEFAULT_MODEL])
    key = make_token(config.dir, file=KEY, variable=VARIABLE, prefix=PREFIX)
    if not key.value.startswith(PREFIX):
        raise ConfigError(
            f"invalid key in ${VARIABLE}: the client requires keys that begin with {PREFIX!r}"
        )
    with requires_extra("`whet tinker-server`", "local,tinker"):
        from whet.app.tinker_server.app import build_server  # noqa: PLC0415 - imports torch
        from whet.app.tinker_server.backend import open_models  # noqa: PLC0415
        from whet.app.tinker_server.inference import OPENAI_PREFIX  # noqa: PLC0415
        from whet.app.tinker_server.storage import Storage  # noqa: PLC0415
    storage = Storage(Path(config.dir) / FOLDER)
    async with AsyncExitStack() as stack:
        temporary = stack.enter_context(tempfile.TemporaryDirectory())
        log = await stack.enter_async_context(SQLiteStore(Path(temporary) / "store.db"))
        opened = open_models(_find_folders(models), config, engines=args.engines)
        served = await stack.enter_async_context(opened)
        stack.enter_context(shorten_thread_turns())
        app = build_server(served, storage, log, key.value)
        server = AppServer(app, host=args.host, port=args.port, name="tinker-server")
        stack.callback(server.close)
        print_line(f"serving {', '.join(models)} at {server.url}")
        print_line(f"export TINKER_BASE_URL={server.url}")
        if VARIABLE not in os.environ:
            print_line(f"export {VARIABLE}=$(cat {(config.dir / KEY).absolute()})")
        print_line(f"OpenAI-compatible: {server.url}{OPENAI_PREFIX}, with the same key")
        async with handle_stop_signals() as stop:
            with stop.cancel_on_request():
                await anyio.sleep_forever()
    print_line("server stopped")
