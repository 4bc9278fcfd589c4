"""The public API, frozen. A change here is a change for users: say so in the changelog."""

import inspect
import pickle
from pathlib import Path

import pytest

import whet
from whet import errors

SIGNATURES = {
    "ConfigError": None,
    "Endpoint": "(*, base_url: str, api_key: str, model: str) -> None",
    "Evaluation": "(run: pathlib.Path, models: collections.abc.Mapping[str, str], "
    "comparison: whet.app.comparison.Comparison, results: pathlib.Path, picture: pathlib.Path, "
    "seconds: float) -> None",
    "Hooks": "()",
    "PromptTemplate": "(*, template: str) -> None",
    "Result": "(run: pathlib.Path, steps: tuple[whet.types.learned.StepRecord, ...], "
    "comparison: whet.app.comparison.Comparison | None, seconds: float) -> None",
    "Rollout": None,
    "RunConfig": None,
    "Service": "(url: str = '', *, reward: collections.abc.Callable[[JsonValue, typing.Any], "
    "float | collections.abc.Awaitable[float]] | None = None, max_turns: int = 10, "
    "concurrency: int | None = None, patience_s: float = 60.0) -> None",
    "Trainer": "(*, algorithm: whet.protocols.Algorithm | whet.app.algorithm.OwnAlgorithm | "
    "dict[str, JsonValue] | str | None = None, tracer: str | None = None, "
    "n_workers: int | None = None, "
    "resources: collections.abc.Mapping[str, object] | None = None, "
    "hooks: collections.abc.Sequence[whet.runners.hooks.Hooks] = (), store: str | None = None, "
    "quiet: bool = False, **settings: JsonValue) -> None",
    "WhetError": None,
    "algorithm": "(function: collections.abc.Callable[..., typing.Any]) -> "
    "whet.app.algorithm.OwnAlgorithm",
    "command": "(arguments: collections.abc.Sequence[str], *, "
    "reward: Literal['output', 'exit'] = 'output') -> whet.runners.command.Command",
    "emit_message": "(text: str, **attributes: JsonValue) -> None",
    "emit_object": "(value: object, name: str = 'object', **attributes: JsonValue) -> None",
    "emit_reward": "(value: float, key: str = 'reward', *, call: str | None = None, "
    "turn: int | None = None, agent: str | None = None) -> None",
    "evaluate": "(agent: collections.abc.Callable[..., typing.Any] | object, "
    "tasks: str | pathlib.Path | collections.abc.Sequence[JsonValue], "
    "models: collections.abc.Mapping[str, str] | collections.abc.Sequence[str] = (), *, "
    "endpoint: str | None = None, key_variable: str = 'OPENAI_API_KEY', "
    "results: str | pathlib.Path | None = None, resume: bool = False, quiet: bool = False, "
    "**settings: JsonValue) -> whet.app.evaluator.Evaluation",
    "operation": "(name: Any = None, /, **attributes: JsonValue) -> Any",
    "rollout": "(agent: ~A) -> ~A",
    "train": "(agent: collections.abc.Callable[..., typing.Any] | object, "
    "tasks: str | pathlib.Path | collections.abc.Sequence[JsonValue], *, "
    "held_out: str | pathlib.Path | collections.abc.Sequence[JsonValue] | None = None, "
    "algorithm: whet.protocols.Algorithm | dict[str, JsonValue] | None = None, "
    "resources: collections.abc.Mapping[str, object] | None = None, "
    "hooks: collections.abc.Sequence[whet.runners.hooks.Hooks] = (), "
    "tracer: str | None = None, resume: bool = False, store: str | None = None, "
    "quiet: bool = False, **settings: JsonValue) -> whet.app.training.Result",
}
"""None: an exception, a noun of types.py, or the config, whose keys docs/configuration.md lists."""


def test_the_exported_names_are_these_and_at_most_20() -> None:
    assert sorted(whet.__all__) == sorted(SIGNATURES)
    assert len(whet.__all__) <= 20
    assert set(whet.__all__) <= set(dir(whet))


@pytest.mark.parametrize("name", [name for name, text in SIGNATURES.items() if text])
def test_a_signature_stays_as_it_is(name: str) -> None:
    found = str(inspect.signature(getattr(whet, name)))
    assert found.replace("'JsonValue'", "JsonValue") == SIGNATURES[name]


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        whet.trian  # noqa: B018 - the attribute access is the test


def test_the_package_is_typed_for_its_users() -> None:
    assert (Path(whet.__file__).parent / "py.typed").exists()


def test_every_error_survives_pickling() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type)]
    ours = [kind for kind in kinds if issubclass(kind, errors.WhetError)]
    assert len(ours) > 10
    for kind in ours:
        copy = pickle.loads(pickle.dumps(kind("why")))
        assert type(copy) is kind
        assert str(copy) == "why"
