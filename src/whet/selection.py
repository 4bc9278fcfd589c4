"""Which generations are trained, and why the others are not.

An attempt may hold calls that are not the policy's own work: a title for the chat, a summary, a
simulated user. They are told by agent, model name, system prompt or tools; what is not chosen
stays in the rows as context.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from whet.config import SelectionConfig
from whet.types import Call, Credit, GenerationId


def select(credits: Sequence[Credit], config: SelectionConfig) -> list[Credit]:
    """The credits with only the chosen generations in them."""
    return [
        replace(
            credit,
            advantages={
                id: advantage
                for id, advantage in credit.advantages.items()
                if id in _chosen(credit.trajectory.calls, config)
            },
        )
        for credit in credits
    ]


def why_not(calls: Sequence[Call], config: SelectionConfig) -> dict[GenerationId, str]:
    """Of every generation that is left out, the first reason."""
    first = _first_calls(calls)
    reasons: dict[GenerationId, str] = {}
    for call in calls:
        reason = _reason(call, _system(first[call.id]), config)
        if reason:
            reasons |= {call.generation_id(i): reason for i in range(len(call.generations))}
    return reasons


def count_reasons(reasons: Mapping[GenerationId, str]) -> dict[str, int]:
    """How many generations each reason leaves out."""
    return dict(Counter(reasons.values()))


def _chosen(calls: Sequence[Call], config: SelectionConfig) -> set[GenerationId]:
    everything = {c.generation_id(i) for c in calls for i in range(len(c.generations))}
    return everything - set(why_not(calls, config))


def _reason(call: Call, system: str, config: SelectionConfig) -> str | None:
    origin = call.origin
    if config.agents and origin.agent not in config.agents:
        return f"agent {origin.agent!r} is not among selection.agents"
    if config.models and origin.model not in config.models:
        return f"model {origin.model!r} is not among selection.models"
    if config.system_contains and config.system_contains not in system:
        return "the system prompt lacks selection.system_contains"
    if set(config.tools) - set(origin.tools):
        return "a tool of selection.tools was not offered"
    return None


def _first_calls(calls: Sequence[Call]) -> dict[str, Call]:
    """The call each call's conversation began with."""
    by_generation = {c.generation_id(i): c for c in calls for i in range(len(c.generations))}
    first: dict[str, Call] = {}
    for call in calls:
        parent = by_generation.get(call.parent) if call.parent else None
        first[call.id] = first[parent.id] if parent else call
    return first


def _system(call: Call) -> str:
    texts = [str(m["content"]) for m in call.messages if m["role"] == "system"]
    return "\n".join(texts)
