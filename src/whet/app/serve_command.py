"""`whet serve`: gateway and engine, following the weights that the run publishes."""

import argparse
import hashlib
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
from pydantic import JsonValue

from whet.app.places import Place, allow_many_files, joined, place_of, say
from whet.app.published import PolicyFollower, PublishedPolicy, read_policy
from whet.app.sampler import Sampler, serve, served_sampler
from whet.app.signals import run_async, stoppable
from whet.config import EngineConfig, RunConfig, resolve
from whet.errors import ConfigError, MissingExtra, NotFound
from whet.policies.catalogue import resolve_model
from whet.protocols import Resources, Store
from whet.runners.given import POLICY
from whet.store.sql import DEFAULT_RUN
from whet.types import GATEWAY_PREFIX

Arguments = argparse.Namespace

ONLY_SAMPLED = {"gradient_checkpointing": False, "keep_reference": False}
"""Of the trainer's settings, what costs time or memory and does nothing here."""

LOOK_S = 0.5
"""How often a policy is looked for while there is none."""


def serve_command(args: Arguments, values: dict[str, JsonValue]) -> int:
    """Serve until told to stop."""
    allow_many_files()
    run_async(_serve, args, resolve(values))
    return 0


async def _serve(args: Arguments, config: RunConfig) -> None:
    async with stoppable() as stop:
        with stop.cancels():
            place = await place_of(args)
            async with joined(place) as store:
                await _serve_run(store, place, config, args)
    say("gateway stopped")


async def _serve_run(store: Store, place: Place, config: RunConfig, args: Arguments) -> None:
    published = await _policy(store)
    model = resolve_model(published.model, progress=say)
    async with _sampler(model, published, config, args) as sampler:
        follower = PolicyFollower(sampler.weights, published, store)
        await follower.load_newest()
        serving = serve(sampler, config, store, place.secret, prepare=follower.prepare, say=say)
        async with serving as gateway, _known(store, args.url or gateway.url):
            say(
                f"gateway listens at {gateway.url} for run {place.run}: "
                f"{published.model}, version {sampler.weights.version}"
            )
            await anyio.sleep_forever()


@asynccontextmanager
async def _sampler(
    model: Path, published: PublishedPolicy, config: RunConfig, args: Arguments
) -> AsyncGenerator[Sampler]:
    if published.trainer.kind == "tinker":
        yield await _at_tinker(model, published, config)
        return
    if config.engine.kind != "local":
        place = Path(args.dir) / "serve" / (args.run_name or DEFAULT_RUN)
        async with served_sampler(model, published, config, place=place, say=say) as sampler:
            yield sampler
        return
    try:
        from whet.app.local_sampler import local_sampler  # noqa: PLC0415 - torch, only if needed
        from whet.policies.local import LocalPolicy  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise MissingExtra.of(f"the local engine ({error})", "local") from error
    policy = LocalPolicy(
        model,
        published.trainer.model_copy(update=ONLY_SAMPLED),
        device=config.engine.device,
        seed=published.seed,
    )
    async with local_sampler(policy, config) as sampler:
        yield sampler


async def _at_tinker(model: Path, published: PublishedPolicy, config: RunConfig) -> Sampler:
    if config.engine != EngineConfig():
        raise ConfigError(
            "the run trains at a Tinker service, which samples too: leave out the flags --engine.*"
        )
    try:
        from whet.app.tinker_sampler import tinker_sampler  # noqa: PLC0415 - only if needed
    except ModuleNotFoundError as error:
        raise MissingExtra.of(f"trainer.kind 'tinker' ({error})", "tinker") from error
    return await tinker_sampler(model, published, config)


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
    name = GATEWAY_PREFIX + hashlib.blake2b(url.encode(), digest_size=6).hexdigest()
    await resources.publish(name, {"url": url, "model": POLICY})
    try:
        yield
    finally:
        with anyio.move_on_after(5, shield=True):
            await resources.publish(name, None)
