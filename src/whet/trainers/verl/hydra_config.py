"""verl's config from overrides. Reads verl's files without importing it, which takes long."""

import difflib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf, open_dict

from whet.errors import ConfigError
from whet.trainers.verl.settings import SECTION, Overrides

ADDED = ("actor_rollout_ref.rollout.agent.agent_loop_manager_class",)
"""Keys that verl reads but does not list."""


def compose_config(overrides: Overrides) -> Any:  # Any: verl's DictConfig
    """Compose verl's config with overrides.

    Raises:
        ConfigError: a key is unknown.
    """
    found = importlib.util.find_spec("verl")
    assert found is not None
    assert found.submodule_search_locations is not None
    folder = Path(found.submodule_search_locations[0]) / "trainer" / "config"
    with initialize_config_dir(config_dir=str(folder), version_base=None):
        config = compose("ppo_trainer")
    known = set(_list_keys(OmegaConf.to_container(config, resolve=False)))
    with open_dict(config):
        for key, value in overrides.items():
            if key.split(".")[0] != SECTION and key not in ADDED and not _is_known(key, known):
                raise ConfigError(_explain_unknown(key, known))
            OmegaConf.update(config, key, value, merge=False, force_add=True)
    return config


def _list_keys(values: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(values, Mapping):
        for key, value in values.items():
            yield f"{prefix}{key}"
            yield from _list_keys(value, f"{prefix}{key}.")


def _is_known(key: str, known: set[str]) -> bool:
    """Whether verl has the key, or leaves what is below it to others."""
    return key in known or any(f".{name}." in f".{key}" for name in OPEN_SECTIONS)


OPEN_SECTIONS = (
    "engine_kwargs.vllm",
    "engine_kwargs.sglang",
    "engine_kwargs.trtllm",
    "override_config",
    "sampler_kwargs",
    "ray_kwargs.ray_init",
)
"""Sections whose keys are those of other libraries."""


def _explain_unknown(key: str, known: set[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f", perhaps {close[0]!r}" if close else ""
    return f"verl's config has no key {key!r}{hint}: correct trainer.overrides"
