"""Serves a model of this machine to agents, untouched: whatever it is made of."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from whet.app.sources import LocalModel
from whet.app.wire import serve
from whet.app.working import Gateway
from whet.config import RunConfig
from whet.gateway.service import Log
from whet.policies.local import LocalPolicy
from whet.trainers.local import LocalTrainer


@asynccontextmanager
async def serve_model(
    model: LocalModel, config: RunConfig, log: Log, secret: bytes
) -> AsyncGenerator[Gateway]:
    """The model at work."""
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
    async with serve(policy, config, log, secret) as gateway:
        yield gateway
