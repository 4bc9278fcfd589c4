"""Serves a model of this machine to agents, untouched: whatever it is made of."""

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from whet.app.local_sampler import local_sampler
from whet.app.published import describe_policy
from whet.app.sampler import Sampler, serve, served_sampler
from whet.app.sources import LocalModel
from whet.app.working import Gateway
from whet.config import RunConfig
from whet.errors import ConfigError
from whet.gateway.service import Log
from whet.policies.local import LocalPolicy
from whet.trainers.local import LocalTrainer

logger = logging.getLogger(__name__)


@asynccontextmanager
async def serve_model(
    model: LocalModel, config: RunConfig, log: Log, secret: bytes, place: Path
) -> AsyncGenerator[Gateway]:
    """The model at work. What its servers need, if it has any, is kept in `place`."""
    make = _here(model, config) if config.engine.kind == "local" else _there(model, config, place)
    async with make as sampler, serve(sampler, config, log, secret) as gateway:
        yield gateway


@asynccontextmanager
async def _here(model: LocalModel, config: RunConfig) -> AsyncGenerator[Sampler]:
    # A checkpoint is of weights as its run trained them; anything else is sampled as it stands.
    trained = model.config.trainer if model.config else None
    policy = LocalPolicy(
        model.folder,
        trained or config.trainer.model_copy(update={"weights": "full"}),
        device=config.engine.device,
        seed=model.config.seed if model.config else 0,
        adapter=model.adapter,
    )
    if model.checkpoint is not None:
        await LocalTrainer(policy).restore(model.checkpoint)
    async with local_sampler(policy, config) as sampler:
        yield sampler


@asynccontextmanager
async def _there(model: LocalModel, config: RunConfig, place: Path) -> AsyncGenerator[Sampler]:
    if model.checkpoint is not None:
        raise ConfigError(
            f"the checkpoint {model.source!r} is sampled from by --engine local alone: servers "
            "load adapters and model folders"
        )
    policy = describe_policy(config, model.folder, 0, "")
    servers = served_sampler(
        model.folder, policy, config, place=place, adapter=model.adapter, say=logger.info
    )
    async with servers as sampler:
        yield sampler
