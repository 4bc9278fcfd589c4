"""Serve a model or a run of this machine at an OpenAI-compatible URL, for `evaluate.py`."""

import argparse
import asyncio
import tempfile
from pathlib import Path

import whet


def main(args: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    model = Path(args.model)
    if (model / "model").is_dir():  # a run
        model = model / "model"
    with tempfile.TemporaryDirectory() as folder:
        gateway = {"port": args.port, "allow_unattributed": True}
        serve.run(idle, model=str(model), dir=folder, gateway=gateway, quiet=True)
    return 0


@whet.algorithm
async def serve(gateway: whet.Endpoint) -> None:
    """Print the address; whet serves the model while this function runs."""
    print(f"export OPENAI_BASE_URL={gateway.base_url} OPENAI_API_KEY={gateway.api_key}")
    print(f"model: {gateway.model}", flush=True)
    await asyncio.Event().wait()


def idle(task: object) -> float:
    """An agent that is never run: nothing is enqueued."""
    return 0.0
