"""`whet serve`: gateway and engine of a run, which load the weights that training publishes.

With `--model` a trained or any other model is served by itself, without a run or a store.
"""

import argparse
from pathlib import Path

import anyio

from whet.app.cli.config_flags import add_config_flags, read_config_values
from whet.app.cli.flags import CommandParser, add_store_flags
from whet.app.composition.distributed import (
    StoreAddress,
    connect_store,
    find_store,
    print_line,
    raise_file_limit,
)
from whet.app.composition.gateway_server import (
    advertise,
    check_own_process,
    serve_published,
)
from whet.app.composition.samplers import open_sampler
from whet.app.composition.weight_sync import PublishedPolicy, read_policy
from whet.config import RunConfig, resolve
from whet.errors import NotFound
from whet.io.process import follow_supervisor, handle_stop_signals
from whet.io.threads import run_async
from whet.models.catalog import resolve_model
from whet.protocols import Resources, Store
from whet.runners.agent import POLICY

POLL_INTERVAL_S = 0.5
"""Seconds between polls for the run's policy, until it is published."""

SHOWN = {
    "engine": ("engine.kind", "engine.device", "engine.max_context", "engine.urls"),
    "gateway": ("gateway.host", "gateway.port", "gateway.models", "gateway.endpoints"),
}


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet serve`."""
    parser.usage = "whet serve [--model MODEL] [options] [-- flags of the inference server]"
    parser.group("model").add_argument(
        "--model",
        metavar="MODEL",
        help="run, adapter, checkpoint or model, without a store",
    )
    add_store_flags(parser)
    add_config_flags(parser, SHOWN, only=("engine", "gateway"), file=False)
    parser.group("gateway").add_argument(
        "--url",
        metavar="URL",
        help="public URL for runners (default: the gateway's own)",
    )
    parser.add_examples(
        "whet serve --model mine --gateway.port 8000",
        "whet serve --store http://127.0.0.1:4747 --run mine",
    )
    parser.set_defaults(run=run_serve)


def run_serve(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C."""
    follow_supervisor()
    config = resolve(read_config_values(args))
    raise_file_limit()
    run_async(_serve if args.model is None else _serve_alone, args, config)
    return 0


async def _serve(args: argparse.Namespace, config: RunConfig) -> None:
    async with handle_stop_signals() as stop:
        with stop.cancel_on_request():
            name = args.run_name or "MODEL"
            alone = f"; `whet serve --model {name}` serves a model by itself"
            address = await find_store(args.store, args.run_name, Path(args.dir), or_else=alone)
            async with connect_store(address) as store:
                await _serve_run(store, address, config, args, alone)
    print_line("gateway stopped")


async def _serve_alone(args: argparse.Namespace, config: RunConfig) -> None:
    from whet.app.composition.standalone import serve_alone  # noqa: PLC0415 - imports torch

    async with handle_stop_signals() as stop:
        with stop.cancel_on_request():
            config = config.model_copy(update={"dir": Path(args.dir)})
            async with serve_alone(args.model, config, print_line) as served:
                endpoint = served.own_endpoint
                names = ", ".join(map(repr, endpoint.policies or (endpoint.model,)))
                models = "models" if endpoint.policies else "model"
                print_line(f"{args.model} listens at {endpoint.base_url}, {models} {names}")
                print_line(
                    f"export OPENAI_BASE_URL={endpoint.base_url} OPENAI_API_KEY={endpoint.api_key}"
                )
                await anyio.sleep_forever()
    print_line("gateway stopped")


async def _serve_run(
    store: Store, address: StoreAddress, config: RunConfig, args: argparse.Namespace, alone: str
) -> None:
    check_own_process(config)
    published = await _wait_for_policy(store, alone)
    model = resolve_model(published.model, progress=print_line)
    folder = Path(args.dir) / "serve" / address.run
    opened = open_sampler(model, published, config, folder=folder, progress=print_line)
    async with opened as sampler:
        serving = serve_published(sampler, published, config, store, address.secret, print_line)
        async with serving as gateway, advertise(store, args.url or gateway.url):
            print_line(
                f"gateway listens at {gateway.url} for run {address.run}: "
                f"{published.model}, version {sampler.weights.version}"
            )
            await anyio.sleep_forever()


async def _wait_for_policy(resources: Resources, alone: str) -> PublishedPolicy:
    """The policy of the run, once `whet train` has published it."""
    is_waiting = False
    while True:
        try:
            return read_policy(await resources.latest(POLICY))
        except NotFound:
            if not is_waiting:
                is_waiting = True
                print_line(f"waiting for `whet train` to publish the model to serve{alone}")
            await anyio.sleep(POLL_INTERVAL_S)
