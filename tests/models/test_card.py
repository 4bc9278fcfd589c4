"""The card beside a trained model: what it was trained on, with which gain."""

from pathlib import Path

from whet.config import RunConfig, resolve
from whet.models.card import write_card

CONFIG: RunConfig = resolve({"model": "org/base", "adam": {"lr": 3e-4}})


def card(tmp_path: Path, kind: str, report: dict[str, object]) -> str:
    write_card(tmp_path, Path(".whet/runs/mine"), kind, CONFIG, report)
    return (tmp_path / "README.md").read_text()


def test_a_card_names_base_model_method_and_gain(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    found = card(
        tmp_path,
        "train",
        {
            "steps": 20,
            "model_step": 16,
            "agent": "solve",
            "trained_on": "2,560 tasks of tasks.jsonl",
            "rollouts": 1280,
            "tasks": 50,
            "before": {"greedy": 0.25, "failed": 0},
            "after": {"greedy": 0.75, "failed": 0},
            "gain_ci95": [0.4, 0.6],
        },
    )
    assert found.startswith("---\nbase_model: org/base\nlibrary_name: peft\n")
    assert "a LoRA adapter of `org/base` after 16 steps of reinforcement learning (grpo" in found
    assert "1,280 rollouts; 50 held-out tasks" in found
    assert "- Agent: `solve`\n- Trained on: 2,560 tasks of tasks.jsonl\n- Seed: 0\n" in found
    assert "| greedy | 0.25 | 0.75 | +0.5 |" in found
    assert "failed" not in found.casefold()
    assert "+0.400 to +0.600" in found
    assert '"lr": 0.0003' in found
    assert "whet serve --model .whet/runs/mine" in found


def test_without_held_out_data_a_card_has_no_table(tmp_path: Path) -> None:
    found = card(tmp_path, "sft", {"steps": 1, "before": {}, "after": {}})
    assert "after 1 step of imitation" in found
    assert "| held out" not in found


def test_a_measure_without_a_value_is_a_dash_and_failures_are_not_a_reward(tmp_path: Path) -> None:
    before: dict[str, object] = {"greedy": None, "sampled": 0.5, "failed": 50}
    after: dict[str, object] = {"greedy": 0.75, "sampled": None, "failed": 2}
    found = card(tmp_path, "train", {"steps": 2, "before": before, "after": after})
    assert "| greedy | - | 0.75 | - |\n| sampled | 0.5 | - | - |\n\n" in found
    assert "Failed held-out rollouts: 50 before, 2 after." in found
