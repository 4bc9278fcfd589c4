"""Algorithm and local trainer of a config, the user's own functions included."""

import inspect
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from whet.algorithms import DISTILLATION, build_algorithm, is_custom
from whet.config import LocalTrainerConfig, RunConfig
from whet.engines.scorer import LocalScorer
from whet.errors import ConfigError, boundary
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy
from whet.protocols import Algorithm, Scorer
from whet.runners.loading import load_function
from whet.trainers.local import LocalTrainer
from whet.trainers.loss import LossFunction

Progress = Callable[[str], None]


async def open_local_trainer(policy: LocalPolicy, config: RunConfig) -> LocalTrainer:
    """The trainer of a policy in this process, at the weights that training starts from."""
    custom = load_loss(config.loss.name) if config.loss.is_custom else None
    trainer = LocalTrainer(policy, threads=os.cpu_count(), custom_loss=custom)
    await load_start(trainer, config)
    return trainer


async def load_start(trainer: LocalTrainer, config: RunConfig) -> None:
    """Load the weights that training starts from, and keep them if the loss refers to them."""
    if config.start is not None:
        await trainer.start_from(config.start)
    # New adapters have their reference without a copy: the model without them.
    if config.loss.kl > 0 and (config.start is not None or config.trained_weights == "full"):
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


def load_loss(name: str) -> LossFunction:
    """The user's own loss, by `module:function`. Raises ConfigError if it is not one."""
    found = load_function(name, "loss")
    if not callable(found):
        raise ConfigError(f"the loss {name!r} is not a function")
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


def algorithm_name(algorithm: Algorithm) -> str:
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
