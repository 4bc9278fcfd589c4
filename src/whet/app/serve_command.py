"""`whet serve`: gateway and engine, following the weights that the run publishes."""

import argparse
import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
from pydantic import JsonValue

from whet.app.places import Place, allow_many_files, joined, place_of, say
from whet.app.published import PolicyFollower, PublishedPolicy, read_policy
from whet.app.signals import run_async, stoppable
from whet.app.wire import serve
from whet.app.working import POLICY
from whet.config import RunConfig, resolve
from whet.errors import NotFound
from whet.policies.catalogue import resolve_model
from whet.policies.local import LocalPolicy
from whet.protocols import Resources, Store
from whet.runners.gateways import PREFIX

ONLY_SAMPLED = {"gradient_checkpointing": False, "keep_reference": False}
"""Of the trainer's settings, what costs time or memory and does nothing here."""

LOOK_S = 0.5
"""How often a policy is looked for while there is none."""


def serve_command(args: argparse.Namespace, values: dict[str, JsonValue]) -> int:
    """Serve until told to stop."""
    allow_many_files()
    run_async(_serve, args, resolve(values))
    return 0


async def _serve(args: argparse.Namespace, config: RunConfig) -> None:
    async with stoppable() as stop:
        with stop.cancels():
            place = await place_of(args)
            async with joined(place) as store:
                await _serve_run(store, place, config, args.url)
    say("gateway stopped")


async def _serve_run(store: Store, place: Place, config: RunConfig, url: str | None) -> None:
    published = await _policy(store)
    policy = LocalPolicy(
        resolve_model(published.model, progress=say),
        published.trainer.model_copy(update=ONLY_SAMPLED),
        device=config.engine.device,
        seed=published.seed,
    )
    follower = PolicyFollower(policy, published, store)
    await follower.load_newest()
    serving = serve(policy, config, store, place.secret, prepare=follower.prepare)
    async with serving as gateway, _known(store, url or gateway.url):
        say(
            f"gateway listens at {gateway.url} for run {place.run}: "
            f"{published.model}, version {policy.version}"
        )
        await anyio.sleep_forever()


async def _policy(resources: Resources) -> PublishedPolicy:
    """What the run trains, once it says so."""
    told = False
    while True:
        try:
            return read_policy(await resources.latest(POLICY))
        except NotFound:
            if not told:
                told = True
                say("waiting for `whet train` to say which model to serve")
            await anyio.sleep(LOOK_S)


@asynccontextmanager
async def _known(resources: Resources, url: str) -> AsyncGenerator[None]:
    """Have runners find the gateway in the store, and no longer look for one that left."""
    name = PREFIX + hashlib.blake2b(url.encode(), digest_size=6).hexdigest()
    await resources.publish(name, {"url": url, "model": POLICY})
    try:
        yield
    finally:
        with anyio.move_on_after(5, shield=True):
            await resources.publish(name, None)
