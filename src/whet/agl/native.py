"""Agent Lightning agents as whet agents, for `VERL` and `APO`, which whet trains itself."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from whet.agl.emitter import find_final_reward
from whet.agl.litagent import LitAgent
from whet.agl.runner import call_agent, call_hooks, record_result
from whet.agl.spans import NANOSECONDS
from whet.agl.spans import Span as LightningSpan
from whet.agl.tracer import Tracer
from whet.agl.types import (
    LLM,
    Attempt,
    AttemptedRollout,
    Hook,
    NamedResources,
    PromptTemplate,
    ResourceUnion,
)
from whet.runners.context import active_attempt
from whet.types import AttemptedRollout as WhetRollout
from whet.types import Endpoint, Span

MAIN_LLM = "main_llm"
"""Name of the trained model among the resources."""


def build_agent(
    agent: LitAgent, tracer: Tracer, hooks: tuple[Hook, ...], initial: NamedResources
) -> Callable[..., Any]:
    """Return the agent as a function that whet runs, and that gives it the resources of `agl`."""

    async def run_agent(
        task: Any, llm: Endpoint, rollout: WhetRollout, resources: Mapping[str, Any]
    ) -> float | None:
        attempted = _convert_rollout(rollout, task)
        named = _convert_resources(initial, resources, llm, rollout)
        call = partial(call_hooks, hooks, agent=agent, runner=None, rollout=attempted)
        spans: list[LightningSpan] = []
        try:
            async with tracer.trace_context(rollout.id) as trace:
                spans = trace.spans
                await call("on_rollout_start")
                await call("on_trace_start", tracer=tracer)
                result = await call_agent(agent, attempted, named)
                await call("on_trace_end", tracer=tracer)
                record_result(trace, result)
        finally:  # also where the agent failed
            await call("on_rollout_end", spans=spans)
            context = active_attempt.get()
            if context is not None:
                for span in spans:
                    context.add_span(_convert_span(span, context.trace_id))
        return find_final_reward(spans)

    run_agent.__name__ = getattr(agent, "__name__", type(agent).__name__)
    return run_agent


def embed_key(endpoint: Endpoint) -> str:
    """Return the base URL with its key in the path, since agents of `agl` may send any key."""
    scheme, host, path, *_ = urlsplit(endpoint.base_url)
    return urlunsplit((scheme, host, f"/key/{endpoint.api_key}{path}", "", ""))


def _convert_rollout(rollout: WhetRollout, task: Any) -> AttemptedRollout:
    attempt = Attempt(
        rollout_id=rollout.id,
        attempt_id=rollout.attempt,
        sequence_id=rollout.number,
        start_time=0.0,
        status="running",
    )
    return AttemptedRollout(
        rollout_id=rollout.id,
        input=task,
        start_time=0.0,
        mode=rollout.mode.value,
        status="running",
        attempt=attempt,
    )


def _convert_resources(
    initial: NamedResources, resources: Mapping[str, Any], llm: Endpoint, rollout: WhetRollout
) -> NamedResources:
    temperature = rollout.sampling.temperature
    policy = LLM(
        endpoint=embed_key(llm),
        model=llm.model,
        api_key=llm.api_key,
        sampling_parameters={} if temperature is None else {"temperature": temperature},
    )
    named: dict[str, ResourceUnion] = {MAIN_LLM: policy, **initial}
    for name, value in resources.items():
        match value:
            case {"template": str(template)}:  # written by a prompt optimizer
                named[name] = PromptTemplate(template=template, engine="f-string")
            case _:
                pass
    return named


def _convert_span(span: LightningSpan, trace_id: str) -> Span:
    start = int((span.start_time or 0.0) * NANOSECONDS)
    codes: dict[str, Any] = {"UNSET": "unset", "OK": "ok", "ERROR": "error"}
    return Span(
        trace_id=trace_id,
        span_id=span.span_id,
        parent_id=span.parent_id,
        name=span.name,
        start=start,
        end=max(start, int((span.end_time or 0.0) * NANOSECONDS)),
        status=codes[span.status.status_code],
        message=span.status.description or "",
        attributes=span.attributes,
        scope="whet.agl",
    )
