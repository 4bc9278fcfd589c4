"""`whet tinker-server`: the local trainer and engine behind the wire of the `tinker` client."""

import argparse
import os
from pathlib import Path

import anyio

from whet.app.places import allow_many_files, say
from whet.app.signals import run_async, stoppable
from whet.app.tinker_workshop import Base, LocalRuns, LocalSamplers
from whet.config import RunConfig
from whet.errors import ConfigError
from whet.policies.catalogue import resolve_model
from whet.serving import AppServer
from whet.store.token import make_token
from whet.tinker_server.app import build_server
from whet.tinker_server.records import Records

FOLDER = "tinker"
"""Of checkpoints, in the run directory."""
KEY = "tinker.key"
VARIABLE = "TINKER_API_KEY"
"""Holds the key where clients look for it too."""
PREFIX = "tml-"
"""The client takes no other keys."""


def tinker_server_command(args: argparse.Namespace, config: RunConfig) -> int:
    """Serve until told to stop."""
    allow_many_files()
    run_async(_serve, args, config)
    return 0


async def _serve(args: argparse.Namespace, config: RunConfig) -> None:
    if args.engines < 1:
        raise ConfigError(f"--engines is at least 1; found {args.engines}")
    if config.engine.kind != "local":
        raise ConfigError(
            f"engine.kind is {config.engine.kind!r}, but this server samples from the model in its "
            "own process: leave --engine out"
        )
    key = make_token(config.dir, file=KEY, variable=VARIABLE, prefix=PREFIX)
    if not key.value.startswith(PREFIX):
        raise ConfigError(f"the client takes no key that does not begin with {PREFIX!r}")
    folder = resolve_model(config.model, progress=say)
    base = Base(folder, config)
    place = str(folder.absolute())
    samplers = LocalSamplers(base, args.name or place, (config.model, place), engines=args.engines)
    records = Records(Path(config.dir) / FOLDER)
    app = build_server(LocalRuns(base), samplers, records, key.value)
    server = AppServer(app, host=args.host, port=args.port, name="tinker-server")
    try:
        say(f"serving {config.model} at {server.url}")
        say(f"export TINKER_BASE_URL={server.url}")
        if VARIABLE not in os.environ:
            say(f"export {VARIABLE}=$(cat {(config.dir / KEY).absolute()})")
        async with stoppable() as stop:
            with stop.cancels():
                await anyio.sleep_forever()
    finally:
        server.close()
        with anyio.CancelScope(shield=True):
            await samplers.close()
    say("server stopped")
