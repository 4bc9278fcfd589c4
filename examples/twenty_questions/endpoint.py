"""A model or a run of this machine behind an OpenAI-compatible URL, for `evaluate.py`."""

import argparse
import secrets
import tempfile
from pathlib import Path

import anyio

from whet.app.local_models import serve_model
from whet.app.signals import run_async, stoppable
from whet.app.sources import read_models
from whet.config import resolve
from whet.store.sqlite import SQLiteStore


def main(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    run_async(serve, args.model, args.port)
    return 0


async def serve(model: str, port: int) -> None:
    [found] = read_models([f"player={model}"], None, print)
    config = resolve({"gateway": {"port": port, "allow_unattributed": True}})
    with tempfile.TemporaryDirectory() as folder:
        async with (
            stoppable() as stop,
            SQLiteStore(Path(folder) / "store.db") as store,
            serve_model(found, config, store, secrets.token_bytes(16), Path(folder)) as gateway,
        ):
            own = gateway.own_endpoint
            print(f"export OPENAI_BASE_URL={own.base_url} OPENAI_API_KEY={own.api_key}")
            print(f"model: {own.model}", flush=True)
            with stop.cancels():
                await anyio.sleep_forever()
