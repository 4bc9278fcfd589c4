"""The config: files, merging, validation, defaults and schedules."""

from pathlib import Path

import pytest
from pydantic import JsonValue

from whet.app.cli.config_flags import list_config_fields
from whet.config import AdamConfig, RunConfig, merge, read_toml, resolve
from whet.errors import ConfigError


def test_flags_win_over_the_file_and_leave_its_other_keys(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = 5\n[adam]\nlr = 0.5\nbeta2 = 0.8\n")

    config = resolve(merge(read_toml(file), {"adam": {"lr": "0.25"}, "group_size": "4"}))

    assert config.steps == 5
    assert config.group_size == 4
    assert config.adam.lr == 0.25
    assert config.adam.beta2 == 0.8
    assert config.adam.weight_decay == RunConfig().adam.weight_decay


def test_merging_leaves_its_arguments_as_they_were() -> None:
    base: dict[str, JsonValue] = {"adam": {"lr": 1.0}}
    assert merge(base, {"adam": {"beta2": 0.5}}) == {"adam": {"lr": 1.0, "beta2": 0.5}}
    assert base == {"adam": {"lr": 1.0}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepz": 3}, "unknown config key 'stepz': did you mean 'steps'"),
        ({"max_tokens": 9}, "the agent sends max_tokens in its own requests"),
        ({"learning_rate": 1}, "unknown config key 'learning_rate': did you mean 'adam.lr'"),
        ({"adam": {"learning_rate": 1}}, "key 'adam.learning_rate': did you mean 'adam.lr'"),
        ({"runner": {"gpus": 2}}, "unknown config key 'runner.gpus': did you mean 'trainer.gpus'"),
        ({"dir": "a\udcff"}, r"config key 'dir': expected UTF-8, found 'a.udcff'"),
        (
            {"gateway": {"models": ["\udcff"]}},
            r"config key 'gateway.models': expected UTF-8, found",
        ),
        ({"steps": "many"}, "config key 'steps': .* found 'many'"),
        ({"steps": -1}, "config key 'steps': .* found -1"),
        ({"adam": {"lr": "nan"}}, "config key 'adam.lr'"),
        ({"trainer": {"weights": "half"}}, "config key 'trainer.weights': .*'lora' or 'full'"),
        ({"name": "a/b"}, "'name': expected letters, digits, '_', '.' and '-', .* found 'a/b'"),
        ({"adam": 3}, "config key 'adam'"),
        (
            {"selection": {"models": ["j"]}, "gateway": {"endpoints": ["j=gpt@https://h/v1"]}},
            "selection.models names 'j', which is gpt@https://h/v1 .* cannot be trained",
        ),
    ],
)
def test_an_invalid_value_is_named_in_one_line(values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(values)  # pyright: ignore[reportArgumentType]
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_toml_or_not_there_is_named(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match=r"cannot read the config .*run\.toml"):
        read_toml(file)
    file.write_text("steps = = 3")
    with pytest.raises(ConfigError, match=r"run\.toml' is not TOML: .*line 1"):
        read_toml(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_toml(file)


def test_a_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().steps = 3


def test_there_are_at_most_130_keys_with_those_of_every_kind() -> None:
    assert len([*list_config_fields()]) <= 130


# --------------------------------------------------------------------------- what goes together


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"engine": {"urls": ["http://a"]}},
            "config key 'engine.urls' does not apply to engine.kind 'local', but to 'vllm' and "
            "'sglang': 'local' has device, kv_tokens, max_context",
        ),
        ({"engine": {"kind": "vllm", "kv_tokens": 2048}}, "config key 'engine.kv_tokens' does not"),
        ({"engine": {"cache": 1}}, "unknown config key 'engine.cache': engine.kind 'local' has"),
        ({"engine": {"kind": "trt"}}, "config key 'engine.kind': expected one of local, vllm, sg"),
        ({"engine": 3}, "config key 'engine': expected a section with keys, found 3"),
        (
            {"engine": {"kind": "sglang"}},
            "config section 'engine': engine.kind 'sglang' needs urls",
        ),
        (
            {"engine": {"kind": "vllm", "urls": ["http://a"], "flags": ["--x"]}},
            "config section 'engine': command, flags and replicas are for servers that whet starts",
        ),
        (
            {"trainer": {"kind": "tinker", "weights": "full"}},
            "config key 'trainer.weights' does not apply to trainer.kind 'tinker', but to 'local'",
        ),
        ({"trainer": {"base_url": "http://a"}}, "config key 'trainer.base_url' does not apply to"),
        ({"trainer": {"kind": "tinker"}, "engine": {"device": "cpu"}}, "engine.device is not supp"),
        (
            {"trainer": {"kind": "tinker"}, "loss": {"kl": 1}},
            "loss.kl is not supported with trainer",
        ),
        ({"loss": {"name": "dro", "dual_clip": 2}}, "config section 'loss': dual_clip has no"),
        ({"loss": {"normalize": "constant"}}, "config section 'loss': tokens_per_rollout and"),
    ],
)
def test_keys_that_do_not_go_together_are_one_line(
    values: dict[str, JsonValue], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(values)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def rates(steps: int, **settings: object) -> list[float]:
    adam = AdamConfig.model_validate({"lr": 1.0} | settings)
    return [adam.build_step(step, steps, "lora").lr for step in range(steps)]


def test_the_learning_rate_depends_on_the_weights_unless_it_is_given() -> None:
    for weights, rate in [("lora", 1e-4), ("full", 1e-6)]:
        config = resolve({"trainer": {"weights": weights}})
        assert config.adam.build_step(0, 1, config.trained_weights).lr == rate
        assert AdamConfig(lr=0.5).build_step(0, 1, config.trained_weights).lr == 0.5
    assert resolve({"trainer": {"kind": "tinker"}}).trained_weights == "lora"


def test_mini_batches_are_of_whole_tasks() -> None:
    resolve({"loop": {"mini_batches": 4}, "tasks_per_step": 4})
    with pytest.raises(ConfigError, match="mini_batches is 5, but a step has 4 tasks"):
        resolve({"loop": {"mini_batches": 5}, "tasks_per_step": 4})


def test_schedules_are_what_their_names_say() -> None:
    assert rates(3) == [1.0] * 3
    assert rates(5, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(4, schedule="linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates(4, schedule="cosine") == pytest.approx([1.0, 0.853553, 0.5, 0.146447], rel=1e-5)
    assert rates(6, schedule="linear", warmup_steps=2) == pytest.approx(
        [1 / 3, 2 / 3, 1.0, 0.75, 0.5, 0.25]
    )
    assert rates(2, schedule="linear", warmup_steps=9) == pytest.approx([0.1, 0.2])
