"""The config of an algorithm is checked before anything is started."""

import pytest

from whet.algorithms import BY_NAME, READ_BY, build_algorithm, check_algorithm
from whet.config import AlgorithmConfig, RunConfig, resolve
from whet.errors import ConfigError


def config(algorithm: dict[str, object], **values: object) -> RunConfig:
    return resolve({"algorithm": algorithm, **values})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", BY_NAME)
def test_a_name_gives_its_algorithm(name: str) -> None:
    values = {"group_size": 1} if name == "greedy" else {}
    assert type(build_algorithm(config({"name": name}, **values))) is BY_NAME[name]


def test_every_key_is_read_by_some_algorithm() -> None:
    read = {key for keys in READ_BY.values() for key in keys}
    assert read | {"name", "oversample", "reward_keys", "logged_keys"} == set(
        AlgorithmConfig.model_fields
    )


@pytest.mark.parametrize(
    ("algorithm", "values", "message"),
    [
        ({"name": "gpro"}, {}, "unknown algorithm 'gpro', perhaps 'grpo'"),
        ({"name": "rloo", "divide_by_std": True}, {}, "'rloo' does not read .*divide_by_std"),
        (
            {"name": "mine.py:Mine", "success_threshold": 0.5},
            {},
            "does not read algorithm.success_threshold",
        ),
        ({"name": "positive", "credit": "turn"}, {}, "'positive' does not read algorithm.credit"),
        ({"name": "reinforce", "credit": "turn"}, {}, "does not read algorithm.credit"),
        ({"discount": 0.9}, {}, "needs algorithm.credit 'turn'"),
        ({"name": "grpo"}, {"group_size": 1}, "set group_size to 2 or more"),
        ({"name": "best_of_n"}, {"group_size": 1}, "set group_size to 2 or more"),
        (
            {"name": "reinforce++", "group_baseline": True},
            {"group_size": 1},
            "set group_size to 2 or more",
        ),
        ({"name": "greedy"}, {}, "set group_size to 1"),
        (
            {"name": "greedy"},
            {"group_size": 1, "runner": {"temperature": 0.7}},
            "leave runner.temperature out",
        ),
        ({"name": "distillation"}, {}, "set algorithm.teacher"),
        (
            {"name": "distillation", "teacher": "tiny"},
            {"runner": {"temperature": 0.7}},
            "set runner.temperature to 1",
        ),
    ],
)
def test_what_cannot_be_honored_is_refused(
    algorithm: dict[str, object], values: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_algorithm(config(algorithm, **values))
    assert "\n" not in str(caught.value)
