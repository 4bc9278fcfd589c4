"""`whet tinker-server`: serve the local trainer and engine to the `tinker` client."""

import argparse
import os
from pathlib import Path

import anyio

from whet.app.cli.config_flags import add_config_flags, config_values
from whet.app.cli.flags import CommandParser
from whet.app.composition.distributed import print_line, raise_file_limit
from whet.config import RunConfig, resolve
from whet.errors import ConfigError, requires_extra
from whet.io.process import follow_supervisor, stoppable
from whet.io.server import AppServer
from whet.io.threads import run_async
from whet.models.catalog import resolve_model
from whet.store.http.token import make_token

FOLDER = "tinker"
"""Folder of checkpoints, in `--dir`."""
KEY = "tinker.key"
VARIABLE = "TINKER_API_KEY"
"""Environment variable with the API key; the client reads the same one."""
PREFIX = "tml-"
"""The client accepts only keys with this prefix."""
PORT = 4748
TRAINER_KEYS = tuple(
    f"trainer.{key}"
    for key in ("precision", "micro_batch_tokens", "gradient_checkpointing", "compile")
)
"""The trainer's settings that the server decides; its clients decide the others."""


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet tinker-server`."""
    parser.usage = "whet tinker-server [options]"
    group = parser.group("server")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on (default 127.0.0.1)",
    )
    group.add_argument(
        "--port",
        type=int,
        default=PORT,
        metavar="N",
        help=f"port to listen on; 0 picks a free one (default {PORT})",
    )
    group.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="NAME",
        help="model name on the Hub, for clients on other machines (default: the model's folder); "
        "further ones are other names of the same model",
    )
    group.add_argument(
        "--engines",
        type=int,
        default=2,
        metavar="N",
        help="sets of weights that can be sampled from at once (default 2)",
    )
    shown = {"server": ("dir",), "model": ("model", "engine.device", *TRAINER_KEYS)}
    add_config_flags(parser, shown, only=("model", "dir", "engine", *TRAINER_KEYS), file=False)
    parser.set_defaults(run=run_tinker_server)


def run_tinker_server(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    follow_supervisor()
    config = resolve(config_values(args))
    raise_file_limit()
    run_async(_serve, args, config)
    return 0


def name_folder(folder: str) -> str:
    """The name by which clients load the tokenizer of a folder.

    They read a name with two slashes as that of a variant, `org/model/variant`, and what follows
    a colon as another.
    """
    if ":" in folder:
        raise ConfigError(
            f"clients cut the model folder {folder!r} at its colon: rename it, or give --name"
        )
    return f"{folder}/" if folder.count("/") == 2 else folder


async def _serve(args: argparse.Namespace, config: RunConfig) -> None:
    if args.engines < 1:
        raise ConfigError(f"invalid --engines {args.engines}: expected at least 1")
    if config.engine.kind != "local":
        raise ConfigError(
            f"found engine.kind {config.engine.kind!r}, but this server samples from the model in "
            "its own process: leave out --engine"
        )
    key = make_token(config.dir, file=KEY, variable=VARIABLE, prefix=PREFIX)
    if not key.value.startswith(PREFIX):
        raise ConfigError(
            f"invalid key in ${VARIABLE}: the client requires keys that begin with {PREFIX!r}"
        )
    with requires_extra("`whet tinker-server`", "local,tinker"):
        from whet.app.tinker_server.app import build_server  # noqa: PLC0415 - imports torch
        from whet.app.tinker_server.local_backend import (  # noqa: PLC0415
            BaseModel,
            LocalRuns,
            LocalSamplers,
        )
        from whet.app.tinker_server.storage import Storage  # noqa: PLC0415
    folder = resolve_model(config.model, progress=print_line)
    base = BaseModel(folder, config)
    place = str(folder.absolute())
    name, *aliases = args.name or [name_folder(place)]
    samplers = LocalSamplers(
        base, name, (config.model, place), engines=args.engines, aliases=tuple(aliases)
    )
    storage = Storage(Path(config.dir) / FOLDER)
    app = build_server(LocalRuns(base), samplers, storage, key.value)
    server = AppServer(app, host=args.host, port=args.port, name="tinker-server")
    try:
        print_line(f"serving {config.model} at {server.url}")
        print_line(f"export TINKER_BASE_URL={server.url}")
        if VARIABLE not in os.environ:
            print_line(f"export {VARIABLE}=$(cat {(config.dir / KEY).absolute()})")
        async with stoppable() as stop:
            with stop.cancel_on_request():
                await anyio.sleep_forever()
    finally:
        server.close()
        with anyio.CancelScope(shield=True):
            await samplers.close()
    print_line("server stopped")
