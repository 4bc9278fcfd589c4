"""What silently spoils training, told once the first rollouts have ended."""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType
from typing import Any, Protocol

from whet.errors import NotFound
from whet.protocols import AttemptLog, Resources, SpanLog
from whet.recorded import tells_calls, untold_calls
from whet.types import Attempt, FailureKind, Outcome

Modules = Mapping[str, ModuleType | None]

PREFIX = "warning-"
"""Of the names of the resources by which warnings are kept: `{"worker": ..., "text": ...}`."""

LOOKS = 64
"""Attempts of a process that are looked at; every training step counts what comes after them."""

CLIENTS = ("openai", "anthropic", "litellm", "dspy", "boto3", "google.genai", "ollama")
"""Modules that speak to models. Where one is loaded and nothing arrives, it speaks to another."""

UNREACHED = re.compile(r"authentication|api.?key|connect|permission|\b40[134]\b", re.IGNORECASE)
"""What an agent fails with that asks a model which is not ours."""

USE_OURS = "give its client base_url=llm.base_url and api_key=llm.api_key"


class Records(AttemptLog, SpanLog, Resources, Protocol):
    """Where calls and spans are found and warnings kept."""


class Preflight:
    """Looks at the first attempts of a process and says each thing it finds once."""

    def __init__(
        self,
        records: Records,
        worker: str,
        say: Callable[[str], None],
        *,
        modules: Modules = sys.modules,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self._records = records
        self._worker = worker
        self._say = say
        self._modules = modules
        self._environ = environ
        self._left = LOOKS
        self._told = set[str]()
        self._calls = Counter[str]()
        """By group."""

    async def look(self, attempt: Attempt, outcome: Outcome) -> None:
        """Look at an attempt that ends like this."""
        if self._left == 0:
            return
        self._left -= 1
        found = spoilers(self._modules, self._environ)
        with suppress(NotFound):  # its run was dropped
            calls = len(await self._records.calls(attempt.id))
            self._calls[attempt.rollout.group] += calls
            if not calls:
                spans = await self._records.spans(attempt.id)
                if untold := untold_calls(attempt.id, spans):
                    found["no-token-ids"] = untold[0].why
                elif not tells_calls(spans):
                    found |= self._without_calls(attempt, outcome)
        for name, text in found.items():
            if name not in self._told:
                self._told.add(name)
                self._say(f"warning: {text}")
                value = {"worker": self._worker, "text": text}
                await self._records.publish(PREFIX + name, {**value})

    def _without_calls(self, attempt: Attempt, outcome: Outcome) -> dict[str, str]:
        rollout, group = attempt.rollout.id, attempt.rollout.group
        clients = [name for name in CLIENTS if name in self._modules]
        if outcome.failure is not None:
            failure = outcome.failure
            if failure.kind is FailureKind.AGENT and UNREACHED.search(failure.message) and clients:
                return {
                    "other-address": f"rollout {rollout} failed and none of its calls came here "
                    f"({failure.message:.120}): is {clients[0]!r} asking another server? {USE_OURS}"
                }
            return {}
        if self._calls[group]:
            return {
                "cached": f"rollout {rollout} made no model call, but others of its group did: an "
                "answer from a cache is no sample; turn off the cache of the agent's SDK"
            }
        if clients and not self._calls.total():
            return {
                "other-address": f"rollout {rollout} ended and none of its calls came here, though "
                f"{clients[0]!r} is loaded: its base URL did not take effect; {USE_OURS}"
            }
        return {
            "no-call": f"rollout {rollout} made no model call: there is nothing to learn from it; "
            "an agent asks its model at llm.base_url with llm.api_key"
        }


async def warnings_in(resources: Resources) -> dict[str, str]:
    """What runners have warned of, a line for each by the name it is kept under."""
    found: dict[str, str] = {}
    for resource in await resources.resources():
        match resource.value:
            case {"worker": str(worker), "text": str(text)} if resource.name.startswith(PREFIX):
                found[resource.name] = f"warning of runner {worker}: {text}"
            case _:
                pass
    return found


def spoilers(modules: Modules, environ: Mapping[str, str]) -> dict[str, str]:
    """What the loaded libraries do that spoils training: a line for each, by a short name."""
    found: dict[str, str] = {}
    if _dspy_has_cached(modules.get("dspy")):
        found["dspy-cache"] = (
            "DSPy answers what it was asked before from its cache, so a group is one sample many "
            "times: write dspy.LM(..., cache=False)"
        )
    if _agents_upload(modules.get("agents.tracing")):
        found["openai-agents-traces"] = (
            "the OpenAI Agents SDK uploads traces to api.openai.com with the key it is given: set "
            "OPENAI_AGENTS_DISABLE_TRACING=1"
        )
    switches = ("CREWAI_DISABLE_TELEMETRY", "CREWAI_DISABLE_TRACKING", "OTEL_SDK_DISABLED")
    if "crewai" in modules and not any(environ.get(s, "").lower() == "true" for s in switches):
        found["crewai-telemetry"] = (
            "CrewAI reports what its agents do to its makers: set CREWAI_DISABLE_TELEMETRY=true"
        )
    return found


def _dspy_has_cached(dspy: ModuleType | None) -> bool:
    # The cache is made when it is first used; one that is off has no `memory_cache`.
    cache: Any = vars(dspy).get("cache") if dspy else None  # Any: of a library that may change
    return bool(len(getattr(cache, "memory_cache", ())))


def _agents_upload(tracing: ModuleType | None) -> bool:
    if tracing is None or not hasattr(tracing, "get_trace_provider"):
        return False
    provider: Any = tracing.get_trace_provider()  # Any: the same
    processors = getattr(getattr(provider, "_multi_processor", None), "_processors", ())
    exporters = [type(getattr(each, "_exporter", None)).__name__ for each in processors]
    return "BackendSpanExporter" in exporters and not getattr(provider, "_disabled", False)
