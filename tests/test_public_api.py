"""The public API, frozen. A change here is a change for users: say so in the changelog."""

import inspect
import pickle
from pathlib import Path

import pytest

import whet
from whet import errors

_DATA = (
    "data: str | pathlib.Path | collections.abc.Sequence[typing.Any] | None = None, *, "
    "held_out: str | pathlib.Path | collections.abc.Sequence[typing.Any] | None = None, "
    "from_run: str | pathlib.Path | None = None"
)
_RESUMABLE = (
    "resume: bool = False, quiet: bool = False, **settings: JsonValue) "
    "-> whet.app.supervised.tuning.FineTuning"
)
SIGNATURES = {
    "APO": None,
    "GEPA": None,
    "PromptSearch": None,
    "ConfigError": None,
    "Credit": None,
    "Endpoint": "(*, base_url: str, api_key: str, model: str, reward_key: str = '', "
    "policies: tuple[str, ...] = ()) -> None",
    "Evaluation": "(run: pathlib.Path, models: collections.abc.Mapping[str, str], "
    "comparison: whet.app.evaluation.comparison.Comparison, results: pathlib.Path, "
    "picture: pathlib.Path, "
    "seconds: float, "
    "policies: collections.abc.Mapping[str, whet.app.evaluation.by_policy.PolicyResult]) -> None",
    "Group": None,
    "Hooks": "()",
    "PromptTemplate": "(*, template: str) -> None",
    "QueueCollector": None,
    "Result": "(run: pathlib.Path, steps: tuple[whet.types.training.StepRecord, ...], "
    "comparison: whet.app.evaluation.comparison.Comparison | None, seconds: float, "
    "failures: collections.abc.Mapping[str, int] = <factory>, problem: str | None = None, "
    "stopped: str | None = None, model_step: int | None = None, agent: str = '', "
    "trained_on: str = '') -> None",
    "Rollout": None,
    "RunConfig": None,
    "Service": "(url: str = '', *, reward: collections.abc.Callable[[JsonValue, typing.Any], "
    "float | collections.abc.Awaitable[float]] | None = None, max_turns: int = 10, "
    "concurrency: int | None = None, patience_s: float = 60.0) -> None",
    "StepRecord": None,
    "Trainer": "(*, algorithm: whet.protocols.Algorithm | whet.app.composition.driver.Driver | "
    "whet.app.verl.algorithm.VERL | dict[str, JsonValue] | str | None = None, "
    "tracer: str | None = None, n_workers: int | None = None, "
    "runner: dict[str, JsonValue] | str | None = None, "
    "resources: collections.abc.Mapping[str, object] | None = None, "
    "hooks: collections.abc.Sequence[whet.runners.hooks.Hooks] = (), "
    "judge: whet.runners.judges.judge.Judge | None = None, store: str | None = None, "
    "quiet: bool = False, **settings: JsonValue) -> None",
    "Trajectory": None,
    "VERL": "(config: collections.abc.Mapping[str, object] = <factory>, "
    "preset: Literal['tiny', 'one-gpu', 'node'] = 'one-gpu', python: str | None = None) -> None",
    "WhetError": None,
    "add_calls_from_spans": None,
    "algorithm": "(function: collections.abc.Callable[..., typing.Any]) -> "
    "whet.app.composition.driver.Driver",
    "build_algorithm": "(config: whet.config.run.RunConfig, *, "
    "teacher: whet.protocols.Scorer | None = None) -> whet.protocols.Algorithm",
    "command": "(arguments: collections.abc.Sequence[str], *, "
    "reward: Literal['output', 'exit', 'post'] = 'output', stdin: bool = False, "
    "sandbox: str | None = None) "
    "-> whet.runners.executors.command.CommandAgent",
    "dpo": f"({_DATA}, min_margin: float = 0.0, {_RESUMABLE}",
    "emit_message": "(text: str, **attributes: JsonValue) -> None",
    "emit_object": "(value: object, name: str = 'object', **attributes: JsonValue) -> None",
    "emit_reward": "(value: float, key: str = 'reward', *, call: str | None = None, "
    "turn: int | None = None, agent: str | None = None) -> None",
    "evaluate": "(agent: collections.abc.Callable[..., typing.Any] | object, "
    "tasks: str | pathlib.Path | collections.abc.Sequence[typing.Any], "
    "models: collections.abc.Mapping[str, str] | collections.abc.Sequence[str] = (), *, "
    "endpoint: str | None = None, key_variable: str = 'OPENAI_API_KEY', "
    "results: str | pathlib.Path | None = None, "
    "prompts: collections.abc.Mapping[str, collections.abc.Mapping[str, object]] | None = None, "
    "resume: bool = False, quiet: bool = False, "
    "**settings: JsonValue) -> whet.app.evaluation.evaluate.Evaluation",
    "judge": "(rubric: str | collections.abc.Sequence[str] | "
    "collections.abc.Mapping[str, float], *, base_url: str | None = None, model: str = 'judge', "
    "key_variable: str = 'OPENAI_API_KEY', samples: int = 1, temperature: float | None = None, "
    "max_tokens: int = 1024, timeout_s: float = 60.0, tries: int = 3, "
    "prices: tuple[float, float] = (0.0, 0.0), weight: float = 1.0, "
    "cache: str | pathlib.Path | None = '.whet/judge') -> whet.runners.judges.judge.Judge",
    "operation": "(name: Any = None, /, **attributes: JsonValue) -> Any",
    "plan_rollouts": "(tasks: collections.abc.Sequence[JsonValue], "
    "config: whet.config.run.RunConfig, *, "
    "group_rewards: collections.abc.Sequence[float | None] | None = None) "
    "-> collections.abc.Callable[[int], list[whet.types.rollouts.Rollout]]",
    "sft": f"({_DATA}, min_reward: float | None = None, best: int | None = None, {_RESUMABLE}",
    "rollout": "(agent: ~A) -> ~A",
    "serve": "(model: str | pathlib.Path, *, quiet: bool = False, **settings: JsonValue) "
    "-> collections.abc.Generator[whet.types.rollouts.Endpoint, None, None]",
    "show": "(run: str | pathlib.Path, *, step: int | None = None, worst: bool = False, "
    "failed: bool = False, rollout: str | None = None, limit: int = 3, "
    "dir: str | pathlib.Path = '.whet', store: str | None = None) -> None",
    "training_loop": None,
    "train": "(agent: collections.abc.Callable[..., typing.Any] | object, "
    "tasks: str | pathlib.Path | collections.abc.Sequence[typing.Any], *, "
    "held_out: str | pathlib.Path | collections.abc.Sequence[typing.Any] | None = None, "
    "algorithm: whet.protocols.Algorithm | dict[str, JsonValue] | str | None = None, "
    "resources: collections.abc.Mapping[str, object] | None = None, "
    "hooks: collections.abc.Sequence[whet.runners.hooks.Hooks] = (), "
    "judge: whet.runners.judges.judge.Judge | None = None, "
    "tracer: str | None = None, resume: bool = False, store: str | None = None, "
    "quiet: bool = False, **settings: JsonValue) -> whet.app.experiment.Result",
}
"""None: an exception, a type, a part of the loop, or the config, documented in docs/reference."""


def test_the_exported_names_are_these_and_at_most_38() -> None:
    assert sorted(whet.__all__) == sorted(SIGNATURES)
    assert len(whet.__all__) <= 38
    assert set(whet.__all__) <= set(dir(whet))


@pytest.mark.parametrize("name", [name for name, text in SIGNATURES.items() if text])
def test_a_signature_stays_as_it_is(name: str) -> None:
    found = str(inspect.signature(getattr(whet, name)))
    found = found.replace("'JsonValue'", "JsonValue").replace("pathlib._local", "pathlib")  # 3.13
    expected = SIGNATURES[name] or ""
    assert found.replace("typing.Any", "Any") == expected.replace("typing.Any", "Any")  # 3.14


def test_a_name_that_is_not_exported_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        whet.missing  # noqa: B018 - the attribute access is the test


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
