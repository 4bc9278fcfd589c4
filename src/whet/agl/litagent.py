"""Agents: `LitAgent`, and functions made into one by `@rollout`."""

import functools
import inspect
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from whet.agl.spans import Span, SpanCoreFields
from whet.agl.types import LLM, AttemptedRollout, NamedResources, PromptTemplate, ProxyLLM, Rollout

if TYPE_CHECKING:
    from whet.agl.runner import LitAgentRunner
    from whet.agl.tracer import Tracer
    from whet.agl.trainer import Trainer

logger = logging.getLogger(__name__)

R = TypeVar("R", LLM, PromptTemplate)

RolloutRawResult = None | float | list[Span] | list[SpanCoreFields]
"""The result of an agent: its reward, its spans, or nothing if it has emitted both."""


class LitAgent:
    """Base class of agents: override `rollout` or `rollout_async`, or those of a mode."""

    def __class_getitem__(cls, task: object) -> "type[LitAgent]":
        return cls  # LitAgent[Task] names the type of tasks

    def __init__(self, *, trained_agents: str | None = None) -> None:
        """Raises NotImplementedError for `trained_agents`, which became `agent_match`."""
        if trained_agents is not None:
            raise NotImplementedError("trained_agents: set agent_match of TracerTraceToTriplet")
        self._trainer: Trainer | None = None
        self._runner: LitAgentRunner | None = None

    def is_async(self) -> bool:
        """Return whether one of the asynchronous methods is overridden."""
        names = ("rollout_async", "training_rollout_async", "validation_rollout_async")
        return any(getattr(type(self), name) is not getattr(LitAgent, name) for name in names)

    def set_trainer(self, trainer: "Trainer") -> None:
        """Set the trainer."""
        self._trainer = trainer

    def get_trainer(self) -> "Trainer":
        """Return the trainer. Raises ValueError if there is none."""
        if self._trainer is None:
            raise ValueError("the agent has no trainer yet")
        return self._trainer

    @property
    def trainer(self) -> "Trainer":
        return self.get_trainer()

    def set_runner(self, runner: "LitAgentRunner") -> None:
        """Set the runner."""
        self._runner = runner

    def get_runner(self) -> "LitAgentRunner":
        """Return the runner. Raises ValueError if there is none."""
        if self._runner is None:
            raise ValueError("the agent has no runner yet")
        return self._runner

    @property
    def runner(self) -> "LitAgentRunner":
        return self.get_runner()

    def get_tracer(self) -> "Tracer":
        """Return the runner's tracer."""
        return self.get_runner().tracer

    @property
    def tracer(self) -> "Tracer":
        return self.get_tracer()

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        """Run a task."""
        raise NotImplementedError("override rollout() or rollout_async()")

    async def rollout_async(
        self, task: Any, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        """Run a task."""
        raise NotImplementedError("override rollout() or rollout_async()")

    def training_rollout(
        self, task: Any, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        """Run a task of mode `train`."""
        return self.rollout(task, resources, rollout)

    def validation_rollout(
        self, task: Any, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        """Run a task of another mode."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(
        self, task: Any, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        """Run a task of mode `train`."""
        return await self.rollout_async(task, resources, rollout)

    async def validation_rollout_async(
        self, task: Any, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        """Run a task of another mode."""
        return await self.rollout_async(task, resources, rollout)


class FunctionalLitAgent(LitAgent):
    """A function as an agent; calling it calls the function."""

    def __init__(self, function: Callable[..., Any], *, strip_proxy: bool = True) -> None:
        super().__init__()
        self._function = function
        self._strip_proxy = strip_proxy
        self._parameters = inspect.signature(function).parameters
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self._function)

    def rollout(self, task: Any, resources: NamedResources, rollout: Rollout) -> RolloutRawResult:
        if self.is_async():
            raise RuntimeError(f"{self._function} is asynchronous: use rollout_async")
        return self._function(task, **self._build_arguments(resources, rollout))

    async def rollout_async(
        self, task: Any, resources: NamedResources, rollout: Rollout
    ) -> RolloutRawResult:
        if not self.is_async():
            raise RuntimeError(f"{self._function} is synchronous: use rollout")
        return await self._function(task, **self._build_arguments(resources, rollout))

    def _build_arguments(self, resources: NamedResources, rollout: Rollout) -> dict[str, Any]:
        arguments: dict[str, Any] = {}
        if "rollout" in self._parameters:
            arguments["rollout"] = rollout
        if "llm" in self._parameters:
            arguments["llm"] = self._resolve_proxy(_find_resource(resources, LLM), rollout)
        if "prompt_template" in self._parameters:
            arguments["prompt_template"] = _find_resource(resources, PromptTemplate)
        return arguments

    def _resolve_proxy(self, llm: LLM, rollout: Rollout) -> LLM:
        if not self._strip_proxy or not isinstance(llm, ProxyLLM):
            return llm
        if not isinstance(rollout, AttemptedRollout):
            raise ValueError(
                "a ProxyLLM needs a rollout with its attempt: pass an AttemptedRollout"
            )
        return llm.with_attempted_rollout(rollout)


def _find_resource(resources: NamedResources, kind: type[R]) -> R:
    found = [resource for resource in resources.values() if isinstance(resource, kind)]
    if not found:
        raise ValueError(
            f"no {kind.__name__} among the resources: {', '.join(resources) or 'none'}"
        )
    if len(found) > 1:
        logger.warning("several resources are of type %s: the first is used", kind.__name__)
    return found[0]


def rollout(func: Callable[..., Any]) -> FunctionalLitAgent:
    """Make `(task, llm[, rollout])` or `(task, prompt_template[, rollout])` an agent, async or not.

    Raises:
        NotImplementedError: the function takes neither.
    """
    names = list(inspect.signature(func).parameters)
    if not names or not {"llm", "prompt_template"} & set(names[1:]):
        raise NotImplementedError(
            f"@rollout needs (task, llm) or (task, prompt_template); found ({', '.join(names)})"
        )
    return FunctionalLitAgent(func)


def llm_rollout(func: Callable[..., Any] | None = None, *, strip_proxy: bool = True) -> Any:
    """Make `(task, llm[, rollout])` an agent. Any: an agent, or a decorator."""

    def decorate(function: Callable[..., Any]) -> FunctionalLitAgent:
        return FunctionalLitAgent(function, strip_proxy=strip_proxy)

    return decorate if func is None else decorate(func)


def prompt_rollout(func: Callable[..., Any] | None = None) -> Any:
    """Make `(task, prompt_template[, rollout])` an agent. Any: an agent, or a decorator."""
    return FunctionalLitAgent if func is None else FunctionalLitAgent(func)
