"""Train any AI agent with reinforcement learning: keep your agent, change its base URL.

Importing the package imports nothing else: each name is imported on first use, and training
imports torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from whet.algorithms import build_algorithm
    from whet.app.composition.driver import algorithm
    from whet.app.composition.standalone import serve
    from whet.app.evaluation.evaluate import Evaluation, evaluate
    from whet.app.experiment import Result
    from whet.app.inputs import plan_rollouts
    from whet.app.inspection.show import show
    from whet.app.prompts.apo import APO
    from whet.app.prompts.gepa import GEPA
    from whet.app.prompts.search import PromptSearch
    from whet.app.supervised.tuning import dpo, sft
    from whet.app.train import train, train_async
    from whet.app.trainer import Trainer
    from whet.app.verl.algorithm import VERL
    from whet.config import RunConfig
    from whet.errors import ConfigError, WhetError
    from whet.io.genai_spans import add_calls_from_spans
    from whet.runners.agent import rollout
    from whet.runners.collector import QueueCollector
    from whet.runners.context import emit_reward
    from whet.runners.executors.command import command
    from whet.runners.executors.http_service import Service
    from whet.runners.hooks import Hooks
    from whet.runners.judges.judge import judge
    from whet.runners.tracing import emit_message, emit_object, operation
    from whet.training.loop import train as training_loop
    from whet.types import Credit, Endpoint, Group, PromptTemplate, Rollout, StepRecord, Trajectory

__all__ = [
    "APO",
    "GEPA",
    "VERL",
    "ConfigError",
    "Credit",
    "Endpoint",
    "Evaluation",
    "Group",
    "Hooks",
    "PromptSearch",
    "PromptTemplate",
    "QueueCollector",
    "Result",
    "Rollout",
    "RunConfig",
    "Service",
    "StepRecord",
    "Trainer",
    "Trajectory",
    "WhetError",
    "add_calls_from_spans",
    "algorithm",
    "build_algorithm",
    "command",
    "dpo",
    "emit_message",
    "emit_object",
    "emit_reward",
    "evaluate",
    "judge",
    "operation",
    "plan_rollouts",
    "rollout",
    "serve",
    "sft",
    "show",
    "train",
    "train_async",
    "training_loop",
]

_HOME = {
    "APO": "whet.app.prompts.apo",
    "GEPA": "whet.app.prompts.gepa",
    "ConfigError": "whet.errors",
    "Credit": "whet.types",
    "Endpoint": "whet.types",
    "Evaluation": "whet.app.evaluation.evaluate",
    "Group": "whet.types",
    "Hooks": "whet.runners.hooks",
    "PromptSearch": "whet.app.prompts.search",
    "PromptTemplate": "whet.types",
    "QueueCollector": "whet.runners.collector",
    "Result": "whet.app.experiment",
    "Rollout": "whet.types",
    "RunConfig": "whet.config",
    "Service": "whet.runners.executors.http_service",
    "StepRecord": "whet.types",
    "Trainer": "whet.app.trainer",
    "Trajectory": "whet.types",
    "VERL": "whet.app.verl.algorithm",
    "WhetError": "whet.errors",
    "add_calls_from_spans": "whet.io.genai_spans",
    "algorithm": "whet.app.composition.driver",
    "build_algorithm": "whet.algorithms",
    "command": "whet.runners.executors.command",
    "dpo": "whet.app.supervised.tuning",
    "emit_message": "whet.runners.tracing",
    "emit_object": "whet.runners.tracing",
    "emit_reward": "whet.runners.context",
    "evaluate": "whet.app.evaluation.evaluate",
    "judge": "whet.runners.judges.judge",
    "operation": "whet.runners.tracing",
    "plan_rollouts": "whet.app.inputs",
    "rollout": "whet.runners.agent",
    "serve": "whet.app.composition.standalone",
    "sft": "whet.app.supervised.tuning",
    "show": "whet.app.inspection.show",
    "train": "whet.app.train",
    "train_async": "whet.app.train",
    "training_loop": "whet.training.loop:train",
}
"""The module that defines each name, and its name there if it has another."""


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("whet")
    if name not in _HOME:
        raise AttributeError(f"module 'whet' has no attribute {name!r}")
    import importlib

    module, _, original = _HOME[name].partition(":")
    value = vars(importlib.import_module(module))[original or name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
