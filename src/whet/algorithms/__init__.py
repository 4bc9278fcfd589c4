"""Credit assignment algorithms, one file each, without torch."""

import difflib
from collections.abc import Callable, Sequence

from whet.algorithms.best_of_n import BestOfN
from whet.algorithms.distillation import Distillation
from whet.algorithms.greedy import GreedyOutputs
from whet.algorithms.grpo import GRPO
from whet.algorithms.positive import PositiveOnly
from whet.algorithms.reinforce import Reinforce
from whet.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from whet.algorithms.returns import explain_unread
from whet.algorithms.rloo import RLOO
from whet.config import AlgorithmConfig, RunConfig, changed_keys
from whet.errors import ConfigError
from whet.protocols import Algorithm, Scorer
from whet.types import Reward

BY_NAME: dict[str, Callable[[AlgorithmConfig], Algorithm]] = {
    "grpo": GRPO,
    "rloo": RLOO,
    "reinforce": Reinforce,
    "reinforce++": ReinforcePlusPlus,
    "positive": PositiveOnly,
    "greedy": GreedyOutputs,
    "best_of_n": BestOfN,
}
"""Algorithms that need only their config."""

DISTILLATION = "distillation"

READ_BY_ALL = {"name", "oversample", "reward_keys", "logged_keys"}
READ_BY: dict[str, set[str]] = {
    "grpo": {"credit", "discount", "divide_by_std"},
    "rloo": {"credit", "discount"},
    "reinforce": {"baseline_decay"},
    "reinforce++": {"credit", "discount", "group_baseline"},
    "positive": set(),
    "greedy": {"success_threshold"},
    "best_of_n": set(),
    DISTILLATION: {"teacher"},
}
"""Further config keys that each algorithm reads."""

COMPARE_WITHIN_GROUPS = {"grpo", "rloo", "best_of_n"}


def is_custom(name: str) -> bool:
    """Return whether the name is a custom algorithm: `module:Class` or `file.py:Class`."""
    return ":" in name


def explain_unread_reward(reward: Reward, configs: Sequence[AlgorithmConfig]) -> str:
    """Return why no algorithm of a run reads a reward; empty if one does, or is not built in."""
    reasons = [
        "" if is_custom(config.name) else explain_unread(reward, config) for config in configs
    ]
    return reasons[0] if reasons and all(reasons) else ""


def check_algorithm(config: RunConfig) -> None:
    """Validate the algorithm's settings before a run starts.

    Raises:
        ConfigError: unknown algorithm, or a setting it does not read or support.
    """
    chosen = config.algorithm
    name = chosen.name
    if name not in READ_BY and not is_custom(name):
        close = difflib.get_close_matches(name, READ_BY, n=1)
        raise ConfigError(
            f"unknown algorithm {name!r}{f', perhaps {close[0]!r}' if close else ''}: "
            f"choose among {', '.join(READ_BY)}, or name your own as module:Class"
        )
    for key, field in AlgorithmConfig.model_fields.items():
        unread = key not in READ_BY.get(name, set[str]()) | READ_BY_ALL
        if unread and getattr(chosen, key) != field.default:
            raise ConfigError(f"the algorithm {name!r} does not read algorithm.{key}: leave it out")
    if chosen.discount != 1 and chosen.credit != "turn":
        raise ConfigError(
            "algorithm.discount needs algorithm.credit 'turn': set that, or leave it out"
        )
    if name == DISTILLATION and chosen.teacher is None:
        raise ConfigError("distillation needs a teacher: set algorithm.teacher to a model")
    _check_rollouts(config)


def _check_rollouts(config: RunConfig) -> None:
    name, temperature = config.algorithm.name, config.runner.temperature
    compares = name in COMPARE_WITHIN_GROUPS or config.algorithm.group_baseline
    if compares and config.group_size < 2:
        raise ConfigError(f"{name!r} compares the rollouts of a task: set group_size to 2 or more")
    if name == "greedy" and config.group_size > 1:
        raise ConfigError("greedy generations of one task are identical: set group_size to 1")
    if name == "greedy" and temperature is not None:
        raise ConfigError("'greedy' samples at temperature 0: leave runner.temperature out")
    if name == DISTILLATION and (config.length.is_active or changed_keys(config.failure_reward)):
        key = "length" if config.length.is_active else "failure_reward"
        raise ConfigError(f"distillation reads no rewards: leave {key} out")
    if name == DISTILLATION and temperature not in (None, 1.0):
        raise ConfigError("distillation samples at temperature 1: set runner.temperature to 1")


def build_algorithm(config: RunConfig, *, teacher: Scorer | None = None) -> Algorithm:
    """Build the built-in algorithm that a config names; `teacher` is for distillation."""
    check_algorithm(config)
    if config.algorithm.name == DISTILLATION:
        assert teacher is not None
        return Distillation(config.algorithm, teacher)
    return BY_NAME[config.algorithm.name](config.algorithm)
