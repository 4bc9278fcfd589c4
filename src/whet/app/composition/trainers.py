"""Trainer and algorithm of a config, the user's own functions included.

The trainer is in this process, in several of this machine, or at a Tinker service.
"""

import inspect
import json
import os
import sys
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

from anyio import to_thread
from pydantic import JsonValue

from whet.algorithms import DISTILLATION, build_algorithm, is_custom
from whet.config import LocalTrainerConfig, RunConfig, TinkerConfig, VerlConfig
from whet.engines.scorer import LocalScorer
from whet.errors import ConfigError, boundary, requires_extra
from whet.models.catalog import read_model_context, resolve_model
from whet.models.huggingface import LocalPolicy
from whet.protocols import Algorithm, Scorer, TrainingBackend
from whet.runners.loading import load_function
from whet.trainers.local import LocalTrainer
from whet.trainers.loss import LossFunction
from whet.trainers.parallel.data_parallel import DataParallelTrainer
from whet.trainers.parallel.ranks import start_ranks
from whet.trainers.parallel.sharded import ModelShard, ShardedTrainer, should_shard
from whet.types import Value

if TYPE_CHECKING:  # the client takes seconds to import
    from whet.models.tinker import TinkerPolicy

Progress = Callable[[str], None]

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
        try:
            yield TinkerTrainer(tinker_policy), tinker_policy
        finally:
            await tinker_policy.close()
        return
    if isinstance(config.trainer, VerlConfig):
        raise ConfigError("trainer.kind 'verl' is for training alone")
    if config.trainer.gpus > 1:
        async with _open_ranks(config, model) as (trainer, policy):
            yield trainer, policy
        return
    policy = load_policy(config, model)
    yield await open_local_trainer(policy, config), policy


@asynccontextmanager
async def _open_ranks(
    config: RunConfig, model: Path
) -> AsyncGenerator[tuple[DataParallelTrainer | ShardedTrainer, LocalPolicy]]:
    """Open a trainer of several processes, which load their models beside this one."""
    assert isinstance(config.trainer, LocalTrainerConfig)
    custom = load_loss(config.loss.name)
    with start_ranks(
        config.trainer.gpus,
        [sys.executable, "-m", RANK_MODULE],
        RankSettings(model=model, config=config),
        device=config.engine.device,
    ) as ranks:
        policy = load_policy(config, model)
        if should_shard(policy):
            whole = _load_whole(config, model, policy)

            def build() -> ModelShard:
                return ModelShard(policy, ranks.address, whole=whole, custom_loss=custom)

            part = await to_thread.run_sync(lambda: ranks.connect(policy.device, build, shard=True))
            trainer = ShardedTrainer(part, whole, ranks)
        else:
            whole = policy
            trainer = DataParallelTrainer(policy, ranks, custom_loss=custom)
            await trainer.connect()
        await load_start(trainer, config)
        yield trainer, whole


def _load_whole(config: RunConfig, model: Path, sharded: LocalPolicy) -> LocalPolicy:
    """The whole model beside a sharded one: where it samples, or else in host memory."""
    if config.engine.kind == "local":
        return load_policy(config, model)
    precision = "fp32" if sharded.dtype.itemsize == 4 else "bf16"
    settings = sharded.config.model_copy(update={"precision": precision})
    return LocalPolicy(model, settings, device="cpu", seed=config.seed)


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
    if trained < (limit or read_model_context(policy.folder)):
        raise ConfigError(
            f"the model encodes positions differently beyond {trained} tokens, and servers decide "
            f"that by their own context limit: set engine.max_context to {trained} or less"
        )
    if policy.config.weights == "lora" and any(".experts." in n for n in policy.get_trainable()):
        raise ConfigError(
            f"{config.engine.kind} does not load adapters of experts in PEFT's form: set "
            "trainer.lora_layers to attention, or set engine.kind to local"
        )


async def open_local_trainer(policy: LocalPolicy, config: RunConfig) -> LocalTrainer:
    """The trainer of a policy in this process, at the weights that training starts from."""
    trainer = LocalTrainer(policy, threads=os.cpu_count(), custom_loss=load_loss(config.loss.name))
    await load_start(trainer, config)
    return trainer


async def load_start(trainer: LocalTrainer | ShardedTrainer, config: RunConfig) -> None:
    """Load the weights that training starts from, and keep them if the loss refers to them."""
    if config.initial_weights is not None:
        await trainer.start_from(config.initial_weights)
    # New adapters have their reference without a copy: the model without them.
    is_new = config.initial_weights is None and config.trained_weights == "lora"
    if config.loss.kl > 0 and not is_new:
        await trainer.keep_reference()


def open_algorithm(config: RunConfig, model: Path, *, progress: Progress) -> Algorithm:
    """The algorithm of a config, one of ours or the user's own.

    Raises:
        ConfigError: it is unknown, or its settings do not fit.
    """
    if is_custom(config.algorithm.name):
        return load_algorithm(config.algorithm.name)
    if config.algorithm.name == DISTILLATION:
        return build_algorithm(config, teacher=_open_teacher(config, model, progress))
    return build_algorithm(config)


def load_algorithm(name: str) -> Algorithm:
    """The user's own algorithm, by `module:Class`. Raises ConfigError if it is not one."""
    found = load_function(name, "algorithm")
    if isinstance(found, type):
        with boundary(ConfigError, f"cannot make the algorithm {name!r}"):
            found = found()
    return check_credit(found)


def load_loss(name: str) -> LossFunction | None:
    """The user's own loss, by `module:function`; None for one of ours.

    Raises:
        ConfigError: it is not a loss.
    """
    if not is_custom(name):
        return None
    found = load_function(name, "loss")
    if not callable(found):
        raise ConfigError(f"the loss {name!r} is not a function: found {type(found).__name__}")
    try:
        inspect.signature(found).bind(None, None, None, None)
    except TypeError as error:
        raise ConfigError(
            f"a loss takes (logp, ratio, batch, config); {name!r} takes {inspect.signature(found)}"
        ) from error
    return cast(LossFunction, found)


def check_credit(algorithm: object) -> Algorithm:
    """Raise ConfigError unless the object has the method of an algorithm."""
    credit = getattr(algorithm, "credit", None)
    if not inspect.iscoroutinefunction(credit):
        raise ConfigError(
            f"an algorithm has a method `async def credit(self, groups, past)`; "
            f"{type(algorithm).__name__!r} has none"
        )
    try:
        inspect.signature(credit).bind([], [])
    except TypeError as error:
        raise ConfigError(
            f"credit takes (groups, past); that of {type(algorithm).__name__!r} takes "
            f"{inspect.signature(credit)}"
        ) from error
    return cast(Algorithm, algorithm)


def name_algorithm(algorithm: Algorithm) -> str:
    """The config's name of an object's class, by which a resumed run makes another object."""
    kind = type(algorithm)
    return f"{kind.__module__}:{kind.__qualname__}"


def _open_teacher(config: RunConfig, student: Path, progress: Progress) -> Scorer:
    assert config.algorithm.teacher is not None
    folder = resolve_model(config.algorithm.teacher, progress=progress)
    if read_vocabulary(folder) != read_vocabulary(student):
        raise ConfigError(
            f"the teacher {config.algorithm.teacher!r} has another tokenizer than "
            f"{config.model!r}: distillation compares token by token"
        )
    # Full weights as loaded: no adapters, and nothing trains them. A Tinker service computes the
    # student's log-probabilities in a precision of its own.
    trainer = config.trainer
    precision = trainer.precision if isinstance(trainer, LocalTrainerConfig) else "auto"
    frozen = LocalTrainerConfig(weights="full", precision=precision)
    return LocalScorer(LocalPolicy(folder, frozen, device=config.engine.device, seed=config.seed))


def read_vocabulary(folder: Path) -> JsonValue:
    """The vocabulary of a model: models with equal ones have the same token ids."""
    with boundary(ConfigError, f"cannot read the tokenizer of {str(folder)!r}"):
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        return [tokenizer["model"]["vocab"], tokenizer.get("added_tokens")]
