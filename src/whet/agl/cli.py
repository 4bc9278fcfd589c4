"""The `agl` command: `agl store` and `agl vllm`."""

import argparse
import asyncio
import os
import shutil
import sys
from collections.abc import Sequence

from whet.agl.store.base import LightningStore
from whet.agl.store.memory import InMemoryLightningStore
from whet.agl.store.sqlite import SqliteLightningStore
from whet.errors import ConfigError, WhetError, requires_extra

UNSUPPORTED = {
    "prometheus": "metrics are at `/metrics` of `whet store`",
    "agentops": "spans are stored without AgentOps",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; an error that the user can fix is one line and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        match words:
            case ["vllm", *rest]:
                return run_vllm(rest)
            case [name, *_] if name in UNSUPPORTED:
                raise ConfigError(f"`agl {name}` is not supported: {UNSUPPORTED[name]}")
            case _:
                args = build_parser().parse_args(words)
                return run_store(args)
    except WhetError as error:
        sys.stderr.write(f"agl: {' '.join(str(error).split())}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of `agl`."""
    parser = argparse.ArgumentParser(
        prog="agl", description="Commands of Agent Lightning 0.3, by whet."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    store = commands.add_parser("store", help="serve a store to algorithms and runners")
    store.add_argument("--host", default="127.0.0.1", help="address to listen on")
    store.add_argument("--port", type=int, default=4747, help="port to listen on, 0 for any")
    store.add_argument("--file", help="SQLite file of the store; without one it is in memory")
    store.add_argument("--backend", choices=["memory", "mongo"], default="memory")
    store.add_argument("--log-level", default="INFO", help="accepted, and not used")
    commands.add_parser("vllm", help="run `vllm` with the arguments that follow")
    return parser


def run_store(args: argparse.Namespace) -> int:
    """Serve a store until stopped."""
    if args.backend == "mongo":
        raise ConfigError("the backend 'mongo' is not supported: use --file for a SQLite file")
    with requires_extra("`agl store`", "gateway"):
        from whet.agl.store.server import LightningStoreServer  # noqa: PLC0415 - needs the extra
    inner: LightningStore = (
        SqliteLightningStore(args.file) if args.file else InMemoryLightningStore()
    )

    async def serve() -> None:
        server = LightningStoreServer(inner, args.host, args.port)
        await server.start()
        sys.stdout.write(f"store at {server.endpoint}; its token is WHET_STORE_TOKEN or in .whet\n")
        sys.stdout.flush()
        try:
            await asyncio.Event().wait()
        finally:
            await server.stop()

    asyncio.run(serve())
    return 0


def run_vllm(arguments: Sequence[str]) -> int:
    """Replace this process by `vllm`, which returns token ids by itself since 0.10.2."""
    program = shutil.which("vllm")
    if program is None:
        raise ConfigError("`agl vllm` runs the program `vllm`, which is missing: pip install vllm")
    os.execv(program, [program, *arguments])
