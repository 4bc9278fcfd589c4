"""Warnings about misconfigurations that silently spoil training, after the first rollouts."""

import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType, ModuleType
from typing import Any, Protocol

from whet.errors import NotFound
from whet.io.genai_spans import (
    find_bypassing_calls,
    find_refusals,
    find_untrainable_calls,
    has_trainable_calls,
)
from whet.protocols import CallLog, Resources, SpanLog
from whet.types import (
    NO_FAULT,
    Attempt,
    Call,
    FailureKind,
    Mode,
    Outcome,
    Reward,
    Rollout,
    Span,
)

Modules = Mapping[str, ModuleType | None]

PREFIX = "warning-"
"""Prefix of the resources that hold warnings: `{"worker": ..., "text": ...}`."""

MAX_CHECKED = 64
"""Attempts of a runner that are checked; for later ones the metrics of each step show problems."""

MAX_REWARD_KINDS = 32
"""Kinds of rewards that are checked: an agent may name the keys by its tasks."""

CLIENTS = ("openai", "anthropic", "litellm", "dspy", "boto3", "google.genai", "ollama")
"""Modules of model clients. If one is loaded and no call arrives, it uses another server."""

CLIENT_ERROR = re.compile(r"authentication|api.?key|connect|permission|\b40[134]\b", re.IGNORECASE)
"""Errors of an agent whose client uses another server than the gateway."""

CLIENT_HINT = "give its client base_url=llm.base_url and api_key=llm.api_key"


ExplainUnread = Callable[[Reward], Awaitable[str]]
"""Returns why the training does not read a reward; empty if it does."""

NO_REWARDS: Mapping[Reward, str] = MappingProxyType({})


async def read_all(reward: Reward) -> str:
    """Consider every reward read."""
    return ""


class DiagnosticsStore(CallLog, SpanLog, Resources, Protocol):
    """The protocols of a store for reading calls and spans, and keeping warnings."""


@dataclass
class Diagnostics:
    """Checks the first attempts of a runner and reports each warning once."""

    store: DiagnosticsStore
    worker: str
    report: Callable[[str], None]
    explain_unread: ExplainUnread = read_all
    modules: Modules = field(default_factory=lambda: sys.modules)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    _checked: int = field(default=0, init=False)
    _reported: set[str] = field(default_factory=set[str], init=False)
    _rewards: set[tuple[str, bool]] = field(default_factory=set[tuple[str, bool]], init=False)
    """Keys of the rewards so far, each for whole attempts or for parts."""
    _calls: Counter[str] = field(default_factory=Counter[str], init=False)
    """Number of calls by group."""

    async def check(
        self, attempt: Attempt, outcome: Outcome, rewards: Mapping[Reward, str] = NO_REWARDS
    ) -> None:
        """Check an ended attempt; `rewards` maps its rewards to the lines that emitted them."""
        found = await self._check_rewards(attempt.rollout.mode, rewards)
        if outcome.failure and outcome.failure.kind not in NO_FAULT:
            found["failed"] = f"rollout {attempt.rollout.id} failed: {outcome.failure.message}"
        if self._checked < MAX_CHECKED:
            self._checked += 1
            found |= find_known_pitfalls(self.modules, self.environ)
            found |= await self._check_calls(attempt, outcome)
        for name, text in found.items():
            if name not in self._reported:
                self._reported.add(name)
                self.report(f"warning: {text}")
                await self.store.publish(PREFIX + name, {"worker": self.worker, "text": text})

    async def _check_rewards(self, mode: Mode, rewards: Mapping[Reward, str]) -> dict[str, str]:
        found: dict[str, str] = {}
        for reward, line in rewards.items() if mode is Mode.TRAIN else ():
            kind = reward.key, reward.target is None
            if kind not in self._rewards and len(self._rewards) < MAX_REWARD_KINDS:
                self._rewards.add(kind)
                if reason := await self.explain_unread(reward):
                    where = f" ({line})" if line else ""
                    digest = hashlib.blake2b(repr(kind).encode(), digest_size=4).hexdigest()
                    name = f"unread-reward-{digest}"  # the same for all runners
                    found[name] = f"a reward is left out of training{where}: {reason}"
        return found

    async def _check_calls(self, attempt: Attempt, outcome: Outcome) -> dict[str, str]:
        try:
            calls = await self.store.calls(attempt.id)
            spans = await self.store.spans(attempt.id)
        except NotFound:  # its run was dropped
            return {}
        self._calls[attempt.rollout.group] += len(calls)
        if calls:
            return find_fixed_sampling(attempt.rollout, calls) | _find_bypass(attempt, spans, calls)
        if refusals := find_refusals(spans):
            reason = refusals[0].message
            if "failed" not in self._reported and _is_reason(reason, outcome):
                self._reported.add("refused")  # the failure that follows has the same reason
            rollout = attempt.rollout.id
            return {
                "refused": f"the gateway refused the model calls of rollout {rollout}: {reason}"
            }
        if untrainable := find_untrainable_calls(attempt.id, spans):
            return {"no-token-ids": untrainable[0].reason}
        return {} if has_trainable_calls(spans) else self._explain_missing_calls(attempt, outcome)

    def _explain_missing_calls(self, attempt: Attempt, outcome: Outcome) -> dict[str, str]:
        rollout, group = attempt.rollout.id, attempt.rollout.group
        clients = [name for name in CLIENTS if name in self.modules]
        if outcome.failure is not None:
            failure = outcome.failure
            if (
                failure.kind is FailureKind.AGENT
                and CLIENT_ERROR.search(failure.message)
                and clients
            ):
                return {
                    "other-address": f"rollout {rollout} failed and the gateway served none of its "
                    f"calls: does {clients[0]!r} use another server or key? {CLIENT_HINT}"
                }
            return {}
        if self._calls[group]:
            return {
                "cached": f"rollout {rollout} made no model call, but others of its group did: a "
                "cached answer is not a sample; turn off the cache of the agent's SDK"
            }
        if clients and not self._calls.total():
            return {
                "other-address": f"rollout {rollout} ended and none of its calls reached the "
                f"gateway, though {clients[0]!r} is loaded: its base URL did not take effect; "
                f"{CLIENT_HINT}"
            }
        return {
            "no-call": f"rollout {rollout} made no model call, so there is nothing to train on; "
            "an agent calls its model at llm.base_url with llm.api_key"
        }


def _find_bypass(attempt: Attempt, spans: Sequence[Span], calls: Sequence[Call]) -> dict[str, str]:
    """Return a warning about a model call that went to another server than the recorded ones."""
    found = find_bypassing_calls(attempt.id, spans, calls)
    if not found:
        return {}
    return {
        "bypass": f"rollout {attempt.rollout.id} made only some of its model calls at the gateway: "
        f"{found[0].reason}"
    }


def _is_reason(refusal: str, outcome: Outcome) -> bool:
    """Whether the reason of a refused call is in a failure that is reported."""
    failure = outcome.failure
    if failure is None or failure.kind in NO_FAULT:
        return False
    return refusal.removeprefix("401: ") in failure.message


def find_fixed_sampling(rollout: Rollout, calls: Sequence[Call]) -> dict[str, str]:
    """Return warnings about sampling settings in the requests of a training rollout, by name."""
    sampled = [generation.sampling for call in calls for generation in call.generations]
    found: dict[str, str] = {}
    if rollout.mode is not Mode.TRAIN:
        return found
    if rollout.sampling.temperature is None and any(s.temperature == 0 for s in sampled):
        found["temperature"] = (
            f"the agent samples at temperature 0 in rollout {rollout.id}: all answers of a task "
            "are then equal, and nothing is learned; leave temperature out of its requests, or "
            "set runner.temperature to 1"
        )
    if any(s.seed is not None for s in sampled):
        found["seed"] = (
            f"the agent sends a seed in rollout {rollout.id}: in training each attempt samples "
            "with a seed of its own, derived from it; leave it out of its requests"
        )
    return found


async def read_warnings(resources: Resources) -> dict[str, str]:
    """Return the warnings of all runners, one line each, by resource name."""
    found: dict[str, str] = {}
    for resource in await resources.resources():
        match resource.value:
            case {"worker": str(worker), "text": str(text)} if resource.name.startswith(PREFIX):
                found[resource.name] = f"warning of runner {worker}: {text}"
            case _:
                pass
    return found


def find_known_pitfalls(modules: Modules, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the known problems of the loaded libraries, one line each, by a short name."""
    found: dict[str, str] = {}
    if _dspy_has_cached(modules.get("dspy")):
        found["dspy-cache"] = (
            "DSPy answers repeated requests from its cache, so a group is one sample many times: "
            "write dspy.LM(..., cache=False)"
        )
    if _uploads_traces(modules.get("agents.tracing")):
        found["openai-agents-traces"] = (
            "the OpenAI Agents SDK uploads traces to api.openai.com with the key it has: set "
            "OPENAI_AGENTS_DISABLE_TRACING=1"
        )
    switches = ("CREWAI_DISABLE_TELEMETRY", "CREWAI_DISABLE_TRACKING", "OTEL_SDK_DISABLED")
    if "crewai" in modules and not any(environ.get(s, "").lower() == "true" for s in switches):
        found["crewai-telemetry"] = (
            "CrewAI sends telemetry of its agents to its makers: set CREWAI_DISABLE_TELEMETRY=true"
        )
    return found


def _dspy_has_cached(dspy: ModuleType | None) -> bool:
    # The cache is created on first use; one that is off has no `memory_cache`.
    cache: Any = vars(dspy).get("cache") if dspy else None  # Any: not our library
    return bool(len(getattr(cache, "memory_cache", ())))


def _uploads_traces(tracing: ModuleType | None) -> bool:
    if tracing is None or not hasattr(tracing, "get_trace_provider"):
        return False
    provider: Any = tracing.get_trace_provider()  # Any: see above
    processors = getattr(getattr(provider, "_multi_processor", None), "_processors", ())
    exporters = [type(getattr(each, "_exporter", None)).__name__ for each in processors]
    return "BackendSpanExporter" in exporters and not getattr(provider, "_disabled", False)
