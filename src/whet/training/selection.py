"""Select the generations to train by agent, model name, system prompt or tools.

An attempt may contain calls that should not be trained: a chat title, a summary, a simulated user.
Generations that are not selected stay in the rows as context.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from whet.config import SelectionConfig
from whet.types import Call, Credit, GenerationId

DISCARDED = "the agent continued another answer to the same prompt, and selection.discarded is off"


def select(credits: Sequence[Credit], config: SelectionConfig) -> list[Credit]:
    """Return the credits with only the selected generations."""
    if config == SelectionConfig():
        return list(credits)
    return [_select(credit, config) for credit in credits]


def explain_exclusions(calls: Sequence[Call], config: SelectionConfig) -> dict[GenerationId, str]:
    """Return the first reason for every generation that is not selected."""
    first = _find_first_calls(calls)
    reasons: dict[GenerationId, str] = {}
    for call in calls:
        reason = _explain(call, _read_system(first[call.id]), config)
        if reason:
            reasons |= dict.fromkeys(call.generations_by_id, reason)
    if not config.discarded:
        reasons = dict.fromkeys(find_discarded(calls), DISCARDED) | reasons
    return reasons


def find_discarded(calls: Sequence[Call]) -> list[GenerationId]:
    """Generations that no call continues, while one does continue another answer to their prompt.

    Answers of the last turn are all alike here: which one the agent used is not seen.
    """
    continued = {call.parent for call in calls}
    answers = defaultdict[tuple[str, str], list[GenerationId]](list)
    for call in calls:
        prompt = (call.prompt_digest, call.origin.agent)
        answers[prompt] += call.generations_by_id
    return [
        id
        for ids in answers.values()
        if not continued.isdisjoint(ids)
        for id in ids
        if id not in continued
    ]


def _select(credit: Credit, config: SelectionConfig) -> Credit:
    excluded = explain_exclusions(credit.trajectory.calls, config)
    kept = {id: value for id, value in credit.advantages.items() if id not in excluded}
    return replace(credit, advantages=kept)


def _explain(call: Call, system: str, config: SelectionConfig) -> str | None:
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


def _find_first_calls(calls: Sequence[Call]) -> dict[str, Call]:
    """Map each call id to the first call of its conversation."""
    by_generation = {id: call for call in calls for id in call.generations_by_id}
    first: dict[str, Call] = {}
    for call in calls:
        parent = by_generation.get(call.parent) if call.parent else None
        first[call.id] = first[parent.id] if parent else call
    return first


def _read_system(call: Call) -> str:
    texts = [str(m["content"]) for m in call.messages if m["role"] == "system"]
    return "\n".join(texts)
