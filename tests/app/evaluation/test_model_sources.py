"""Adapters that training starts from."""

import json
from pathlib import Path
from typing import Any

import pytest

from whet.app.evaluation.model_sources import resolve_start
from whet.config import resolve
from whet.errors import ConfigError


def make_adapter(folder: Path, **settings: Any) -> str:
    config = {"base_model_name_or_path": "tiny", "r": 4, "lora_alpha": 8} | settings
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def test_training_starts_from_an_adapter_with_its_rank_and_alpha(tmp_path: Path) -> None:
    values = {"model": make_adapter(tmp_path, use_rslora=False, alpha_pattern={})}
    started = resolve(resolve_start(values, resolve(values), print))
    assert started.trainer == resolve({"trainer": {"lora_rank": 4, "lora_alpha": 8}}).trainer
    assert (started.model, started.initial_weights) == ("tiny", tmp_path)


@pytest.mark.parametrize(
    "settings", [{"use_rslora": True}, {"alpha_pattern": {"q_proj": 2}}, {"use_dora": True}]
)
def test_an_adapter_that_is_scaled_otherwise_is_refused(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    values = {"model": make_adapter(tmp_path, **settings)}
    with pytest.raises(ConfigError, match="merge it into its base model"):
        resolve_start(values, resolve(values), print)
