"""The algorithm of a run: one of ours by name, or the user's own."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from whet.algorithms import DISTILLATION, build_algorithm, check_algorithm, is_own
from whet.app.loading import load_function
from whet.config import RunConfig, TrainerConfig
from whet.engines.scorer import LocalScorer
from whet.errors import ConfigError, boundary
from whet.policies.catalogue import resolve_model
from whet.policies.local import LocalPolicy
from whet.protocols import Algorithm, Scorer


def name_of(algorithm: Algorithm) -> str:
    """How a config names an object's class, so that a resumed run can make another."""
    kind = type(algorithm)
    return f"{kind.__module__}:{kind.__qualname__}"


def open_algorithm(
    config: RunConfig, student: Path, *, progress: Callable[[str], None]
) -> Algorithm:
    """The algorithm a config names.

    Raises:
        ConfigError: there is none, or its settings do not fit.
    """
    check_algorithm(config)
    if is_own(config.algorithm.name):
        return _own(config.algorithm.name)
    if config.algorithm.name == DISTILLATION:
        return build_algorithm(config, teacher=_teacher(config, student, progress))
    return build_algorithm(config)


def check_named(config: RunConfig) -> None:
    """Refuse a name of the user's own that leads nowhere, before anything is started."""
    if is_own(config.algorithm.name):
        _own(config.algorithm.name)


def check_own(algorithm: object) -> Algorithm:
    """Refuse what gives no credit, before anything is started."""
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


def _own(spec: str) -> Algorithm:
    found = load_function(spec, "algorithm")
    if isinstance(found, type):
        with boundary(ConfigError, f"cannot make the algorithm {spec!r}"):
            found = found()
    return check_own(found)


def _teacher(config: RunConfig, student: Path, progress: Callable[[str], None]) -> Scorer:
    assert config.algorithm.teacher is not None
    folder = resolve_model(config.algorithm.teacher, progress=progress)
    if _vocabulary(folder) != _vocabulary(student):
        raise ConfigError(
            f"the teacher {config.algorithm.teacher!r} has another tokenizer than "
            f"{config.model!r}: distillation compares token by token"
        )
    # All weights as they are: no adapters, and nobody trains them.
    frozen = TrainerConfig(weights="full")
    return LocalScorer(LocalPolicy(folder, frozen, device=config.engine.device, seed=config.seed))


def _vocabulary(folder: Path) -> JsonValue:
    with boundary(ConfigError, f"cannot read the tokenizer of {str(folder)!r}"):
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        return [tokenizer["model"]["vocab"], tokenizer.get("added_tokens")]
