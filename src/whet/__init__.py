"""Sharpen any AI agent with reinforcement learning: keep your agent, change its base URL.

Only light modules are imported here; training pulls in torch when it is first asked for.
"""

import logging
from typing import TYPE_CHECKING

from whet.config import RunConfig
from whet.errors import ConfigError, WhetError
from whet.runners.agent import emit_reward, rollout
from whet.types import Endpoint

if TYPE_CHECKING:
    from whet.app.api import train
    from whet.app.training import Result

__all__ = [
    "ConfigError",
    "Endpoint",
    "Result",
    "RunConfig",
    "WhetError",
    "emit_reward",
    "rollout",
    "train",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())

_LAZY = {"train": "whet.app.api", "Result": "whet.app.training"}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'whet' has no attribute {name!r}")
    import importlib

    return vars(importlib.import_module(_LAZY[name]))[name]
