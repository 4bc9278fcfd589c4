"""Sharpen any AI agent with reinforcement learning: keep your agent, change its base URL.

Importing this imports nothing else: each name brings what it needs when it is first asked for,
and training brings torch.
"""

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whet.app.algorithm import algorithm
    from whet.app.api import train
    from whet.app.eval_command import evaluate
    from whet.app.evaluator import Evaluation
    from whet.app.trainer import Trainer
    from whet.app.training import Result
    from whet.config import RunConfig
    from whet.errors import ConfigError, WhetError
    from whet.runners.agent import rollout
    from whet.runners.command import command
    from whet.runners.hooks import Hooks
    from whet.runners.running import emit_reward
    from whet.runners.service import Service
    from whet.runners.telling import emit_message, emit_object, operation
    from whet.types import Endpoint, PromptTemplate, Rollout

__all__ = [
    "ConfigError",
    "Endpoint",
    "Evaluation",
    "Hooks",
    "PromptTemplate",
    "Result",
    "Rollout",
    "RunConfig",
    "Service",
    "Trainer",
    "WhetError",
    "algorithm",
    "command",
    "emit_message",
    "emit_object",
    "emit_reward",
    "evaluate",
    "operation",
    "rollout",
    "train",
]

logging.getLogger(__name__).addHandler(logging.NullHandler())

_HOME = {
    "ConfigError": "whet.errors",
    "Endpoint": "whet.types",
    "Evaluation": "whet.app.evaluator",
    "Hooks": "whet.runners.hooks",
    "PromptTemplate": "whet.types",
    "Result": "whet.app.training",
    "Rollout": "whet.types",
    "RunConfig": "whet.config",
    "Service": "whet.runners.service",
    "Trainer": "whet.app.trainer",
    "WhetError": "whet.errors",
    "algorithm": "whet.app.algorithm",
    "command": "whet.runners.command",
    "emit_message": "whet.runners.telling",
    "emit_object": "whet.runners.telling",
    "emit_reward": "whet.runners.running",
    "evaluate": "whet.app.eval_command",
    "operation": "whet.runners.telling",
    "rollout": "whet.runners.agent",
    "train": "whet.app.api",
}
"""Where each name is defined."""


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'whet' has no attribute {name!r}")
    import importlib

    found = vars(importlib.import_module(_HOME[name]))[name]
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
