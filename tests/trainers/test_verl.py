"""The parts of the verl trainer that need no verl: settings, rows, advantages, the loss."""

from pathlib import Path
from typing import Any

import pytest
import torch

import whet
from whet.config import RunConfig, resolve
from whet.errors import ConfigError
from whet.trainers.verl.advantages import build_estimator, grpo, reinforce_plus_plus, rloo
from whet.trainers.verl.entries import SessionResult, build_entries
from whet.trainers.verl.settings import PRESETS, build_overrides
from whet.types import GenerationId, Row, SampledSegment

G = GenerationId("g")
PROMPT = {"raw_prompt": [], "data_source": "whet", "reward_model": {"ground_truth": ""}}


def configure(*overrides: str, **settings: Any) -> RunConfig:
    return resolve({"trainer": {"kind": "verl", "overrides": list(overrides)}, **settings})


def translate(config: RunConfig) -> dict[str, Any]:
    places = {name: Path(f"/{name}") for name in ("model", "folder", "tasks")}
    return dict(build_overrides(config, **places, held_out=None))


def test_settings_of_whet_become_keys_of_verl_and_its_own_keys_pass_through() -> None:
    config = configure(
        "actor_rollout_ref.actor.clip_ratio_high=0.28",
        'trainer.logger=["console", "wandb"]',
        steps=7,
        group_size=5,
        tasks_per_step=3,
        adam={"lr": 2e-6},
        algorithm={"name": "rloo"},
    )
    keys = translate(config)
    assert keys["trainer.total_training_steps"] == 7
    assert keys["actor_rollout_ref.rollout.n"] == 5
    assert keys["data.train_batch_size"] == 3
    assert keys["actor_rollout_ref.actor.optim.lr"] == 2e-6
    assert keys["algorithm.adv_estimator"] == "whet_rloo"
    assert keys["actor_rollout_ref.actor.clip_ratio_high"] == 0.28
    assert keys["trainer.logger"] == ["console", "wandb"]


def test_the_temperature_is_that_of_the_run_and_zero_is_refused() -> None:
    key = "actor_rollout_ref.rollout.temperature"
    assert translate(configure())[key] == 1.0
    assert translate(configure(runner={"temperature": 0.25}))[key] == 0.25
    with pytest.raises(ConfigError, match=r"runner\.temperature"):
        configure(runner={"temperature": 0})


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_sets_the_same_sizes(preset: str) -> None:
    keys = translate(resolve({"trainer": {"kind": "verl", "preset": preset}}))
    assert {"trainer.n_gpus_per_node", "data.max_response_length"} <= set(keys)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("actor_rollout_ref.rollout.n=8", "which is group_size: set that"),
        ("data.train_files=x", "the tasks are whet's"),
        ("actor_rollout_ref.rollout.top_p=0.9", "cut distribution"),
        ("whet.store=x", "the section is whet's own"),
        ("no equals sign", "expected key=value"),
        ("algorithm.adv_estimator=gae", "loss_mode=vanilla"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "choose an algorithm.adv_estimator"),
    ],
)
def test_a_key_that_contradicts_whet_is_explained(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        translate(configure(override))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"algorithm": {"name": "best_of_n"}}, "choose grpo, rloo, reinforce\\+\\+"),
        ({"loss": {"kl": 0.1}}, r"loss\.kl is not supported with trainer\.kind 'verl'"),
        ({"engine": {"kind": "vllm"}}, r"engine\.kind is not supported"),
        ({"adam": {"beta2": 0.9}}, r"adam\.beta2 is not supported"),
    ],
)
def test_a_setting_that_verl_does_not_read_is_an_error(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        configure(**settings)


def test_verl_as_an_algorithm_takes_its_config_nested() -> None:
    algorithm = whet.VERL({"actor_rollout_ref": {"actor": {"clip_ratio": 0.1}}}, preset="node")
    assert algorithm.settings == {
        "kind": "verl",
        "preset": "node",
        "overrides": ["actor_rollout_ref.actor.clip_ratio=0.1"],
    }
    with pytest.raises(ConfigError, match="which is steps"):
        whet.VERL({"trainer": {"total_training_steps": 3}})
    with pytest.raises(ConfigError, match="is object, not a JSON value"):
        whet.VERL({"trainer": {"logger": object()}})
    with pytest.raises(ConfigError, match=r"use whet\.Trainer"):
        whet.train(lambda task: 1.0, ["a"], trainer=algorithm.settings)


def row(tokens: int, *segments: tuple[int, int]) -> Row:
    sampled = [
        SampledSegment(G, start, (-0.5,) * n, (3, *[4] * (n - 1)), (1.0,) * n, 1.0, 1.0, 1.0, 0)
        for start, n in segments
    ]
    return Row(tuple(range(tokens)), tuple(sampled), "r", "g")


def test_a_row_has_verls_fields_and_tags() -> None:
    session = SessionResult([row(10, (3, 2), (8, 2))], 0.75, 2)
    [entry] = build_entries("u-1", 2, session, PROMPT, global_steps=5, by_rollout=True)
    assert entry.key == "u-1_2_0"
    fields = entry.fields
    assert fields["uid"] == "u-1_2"
    assert fields["prompts"].tolist() == [0, 1, 2]
    assert fields["responses"].tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert fields["response_mask"].tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert fields["rollout_log_probs"].tolist() == [-0.5, -0.5, 0, 0, 0, -0.5, -0.5]
    assert fields["rm_scores"].tolist() == [0, 0, 0, 0, 0, 0, 0.75]
    assert entry.tag == {
        "status": "success",
        "prompt_len": 3,
        "response_len": 7,
        "seq_len": 10,
        "global_steps": 5,
        "min_global_steps": 3,
        "max_global_steps": 4,
    }


MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
REWARDS = torch.tensor([[0, 0, 0, 1.0], [1.0, 0, 0, 0], [0, 0, 0, 0.0], [0, 0, 0, 0]])
INDEX = ["p_0", "p_0", "p_1", "padding"]
"""Rollout 0 of the prompt has two rows, rollout 1 has one; the last row pads the batch."""


@pytest.mark.parametrize(
    ("baseline", "first"), [(grpo, 0.5), (rloo, 1.0), (reinforce_plus_plus, 0.70710)]
)
def test_a_rollout_is_one_sample_and_weighs_one(baseline: Any, first: float) -> None:
    estimate = build_estimator(baseline)
    config = {"norm_adv_by_std_in_grpo": False}
    advantages, returns = estimate(REWARDS, MASK, config=config, index=INDEX)
    sums = advantages.sum(dim=-1)
    assert float(sums[0] + sums[1]) == pytest.approx(first, abs=1e-4)
    assert float(sums[2]) == pytest.approx(-first, abs=1e-4)
    assert float(advantages[0, 0]) == pytest.approx(first / 4, abs=1e-4)
    assert not advantages[MASK == 0].any()
    assert not advantages[3].any()
    assert returns[0].tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("baseline", [grpo, rloo, reinforce_plus_plus])
def test_rows_that_only_pad_a_batch_have_no_advantage(baseline: Any) -> None:
    estimate = build_estimator(baseline)
    config = {"norm_adv_by_std_in_grpo": True}
    advantages, returns = estimate(REWARDS, torch.zeros_like(MASK), config=config, index=INDEX)
    assert not advantages.any()
    assert not returns.any()


def test_equal_rewards_give_no_advantage_even_divided_by_their_deviation() -> None:
    config = {"norm_adv_by_std_in_grpo": True}
    same = torch.ones(2)
    assert grpo(same, ["p", "p"], config).tolist() == [0, 0]
    assert grpo(torch.ones(1), ["p"], config).tolist() == [0]
    divided = grpo(torch.tensor([0.0, 1.0]), ["p", "p"], config)
    assert divided.tolist() == pytest.approx([-0.7071, 0.7071], abs=1e-3)
