"""The trainer of a config: in this process, in several of this machine, or at a Tinker service."""

import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from whet.app.composition.local_learning import load_loss, load_start, open_local_trainer
from whet.config import LocalTrainerConfig, RunConfig, TinkerConfig, VerlConfig
from whet.errors import ConfigError, requires_extra
from whet.models.catalog import model_context
from whet.models.huggingface import LocalPolicy
from whet.protocols import TrainingBackend
from whet.trainers.data_parallel import DataParallelTrainer
from whet.trainers.ranks import start_ranks
from whet.types import Value

if TYPE_CHECKING:  # the client takes seconds to import
    from whet.models.tinker import TinkerPolicy

RANK_MODULE = "whet.app.composition.training_rank"


class RankSettings(Value):
    """Settings of another process of a training."""

    model: Path
    config: RunConfig


@asynccontextmanager
async def open_trainer(
    config: RunConfig, model: Path
) -> AsyncGenerator[tuple[TrainingBackend, "LocalPolicy | TinkerPolicy"]]:
    """Open the trainer of a config, and the policy whose weights it updates."""
    if isinstance(config.trainer, TinkerConfig):
        with requires_extra("trainer.kind 'tinker'", "tinker"):
            from whet.models.tinker import TinkerPolicy  # noqa: PLC0415 - only if needed
            from whet.trainers.tinker import TinkerTrainer  # noqa: PLC0415
        tinker_policy = await TinkerPolicy.open(config)
        yield TinkerTrainer(tinker_policy), tinker_policy
        return
    if isinstance(config.trainer, VerlConfig):
        raise ConfigError("trainer.kind 'verl' is for `whet train` and whet.VERL alone")
    if config.trainer.gpus > 1:
        async with _open_ranks(config, model) as (trainer, policy):
            yield trainer, policy
        return
    policy = load_policy(config, model)
    yield await open_local_trainer(policy, config), policy


@asynccontextmanager
async def _open_ranks(
    config: RunConfig, model: Path
) -> AsyncGenerator[tuple[DataParallelTrainer, LocalPolicy]]:
    """Open a trainer of several processes, which load their models beside this one."""
    assert isinstance(config.trainer, LocalTrainerConfig)
    custom = load_loss(config.loss.name) if config.loss.is_custom else None
    with start_ranks(
        config.trainer.gpus,
        [sys.executable, "-m", RANK_MODULE],
        RankSettings(model=model, config=config),
        device=config.engine.device,
    ) as ranks:
        policy = load_policy(config, model)
        trainer = DataParallelTrainer(policy, ranks, custom_loss=custom)
        await trainer.connect()
        await load_start(trainer, config)
        yield trainer, policy


def load_policy(config: RunConfig, model: Path) -> LocalPolicy:
    """Load the model that a config trains. Raises ConfigError if it cannot."""
    assert isinstance(config.trainer, LocalTrainerConfig)
    policy = LocalPolicy(model, config.trainer, device=config.engine.device, seed=config.seed)
    if config.engine.kind != "local":
        check_served(policy, config)
    return policy


def check_served(policy: LocalPolicy, config: RunConfig) -> None:
    """Check that what servers sample can be trained. Raises ConfigError."""
    trained, limit = policy.context_length, config.engine.max_context
    if trained < (limit or model_context(policy.folder)):
        raise ConfigError(
            f"the model encodes positions otherwise beyond {trained} tokens, and servers do so by "
            f"their own limit: set engine.max_context to {trained} or less"
        )
    if policy.config.weights == "lora" and any(".experts." in n for n in policy.trainable()):
        raise ConfigError(
            f"{config.engine.kind} does not load adapters of experts in PEFT's form: set "
            "trainer.lora_layers to attention, or sample with --engine local"
        )
