"""Agent Lightning's adapters: convert spans of model calls to triplets or to chat messages."""

import json
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Generic, TypeVar, cast

from whet.agl.emitter import get_reward_value
from whet.agl.semconv import Attributes, unflatten_attributes
from whet.agl.spans import Span
from whet.agl.types import Triplet

F_contra = TypeVar("F_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)

AGENT_NAMES = ("agent.name", "gen_ai.agent.name", "recipient_agent_type", "executor.id")
"""Attributes by which SDKs name the agent of a span."""


class RewardMatchPolicy(StrEnum):
    """Rule that assigns a reward to a call."""

    FIRST_SIBLING = "first_sibling"
    FIRST_OCCURRENCE = "first_occurrence"


class Adapter(Generic[F_contra, T_co]):
    """Converts data for an algorithm."""

    def __call__(self, source: F_contra, /) -> T_co:
        return self.adapt(source)

    def adapt(self, source: F_contra, /) -> T_co:
        """Convert."""
        raise NotImplementedError


class TraceAdapter(Adapter[Sequence[Span], Any]):
    """Converts the spans of a rollout."""


class OtelTraceAdapter(Adapter[Sequence[Any], Any]):
    """Converts spans of OpenTelemetry's SDK."""


class TraceToTripletBase(TraceAdapter):
    """Converts spans to triplets."""


class TracerTraceToTriplet(TraceToTripletBase):
    """Converts a tracer's spans of calls to triplets, in the order the calls started.

    A reward goes to the last call that ended before it and has none yet.
    """

    def __init__(
        self,
        repair_hierarchy: bool = True,
        llm_call_match: str = r"openai\.chat\.completion",
        agent_match: str | None = None,
        exclude_llm_call_in_reward: bool = True,
        reward_match: RewardMatchPolicy = RewardMatchPolicy.FIRST_OCCURRENCE,
        _skip_empty_token_spans: bool = False,
    ) -> None:
        """Raises NotImplementedError for a `reward_match` by siblings."""
        if reward_match != RewardMatchPolicy.FIRST_OCCURRENCE:
            raise NotImplementedError("reward_match: only FIRST_OCCURRENCE is supported")
        self._call_match = re.compile(llm_call_match)
        self._agent_match = re.compile(agent_match) if agent_match else None
        self._exclude_rewarded = exclude_llm_call_in_reward
        self._skip_empty = _skip_empty_token_spans

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        by_id = {span.span_id: span for span in source}
        calls: dict[str, Span] = {}
        for span in sorted(source, key=lambda span: span.start_time or 0.0):
            if self._call_match.search(span.name) and self._is_selected(span, by_id):
                key = span.attributes.get("gen_ai.response.id") or span.span_id
                calls.setdefault(str(key), span)  # SDKs may report a call twice
        found = list(calls.values())
        rewards = match_rewards(
            [(span.end_time or 0.0) for span in found],
            [
                (span.start_time or 0.0, value)
                for span in source
                if (value := get_reward_value(span)) is not None
            ],
            may_equal=True,
        )
        return [
            _build_triplet(span, reward, _find_agent(span, by_id))
            for span, reward in zip(found, rewards, strict=True)
        ]

    def _is_selected(self, span: Span, by_id: dict[str, Span]) -> bool:
        ancestors = _find_ancestors(span, by_id)
        if self._exclude_rewarded and any(get_reward_value(a) is not None for a in ancestors):
            return False
        if self._skip_empty and not (
            span.attributes.get("prompt_token_ids") and span.attributes.get("response_token_ids")
        ):
            return False
        if self._agent_match is None:
            return True
        return bool(self._agent_match.search(_find_agent(span, by_id) or ""))


class LlmProxyTraceToTriplet(TraceToTripletBase):
    """Converts all spans with token ids to triplets, ordered by sequence number, not by time."""

    def adapt(self, source: Sequence[Span], /) -> list[Triplet]:
        calls = sorted(
            (s for s in source if s.attributes.get("response_token_ids")),
            key=lambda span: span.sequence_id,
        )
        rewards = match_rewards(
            [float(span.sequence_id) for span in calls],
            [
                (float(span.sequence_id), value)
                for span in source
                if (value := get_reward_value(span)) is not None
            ],
            may_equal=False,
        )
        return [
            Triplet(
                prompt={"token_ids": list(span.attributes.get("prompt_token_ids", []))},
                response={"token_ids": list(span.attributes["response_token_ids"])},
                reward=reward,
                metadata={"response_id": span.attributes.get("gen_ai.response.id")},
            )
            for span, reward in zip(calls, rewards, strict=True)
        ]


def match_rewards(
    ends: Sequence[float], rewards: Sequence[tuple[float, float]], *, may_equal: bool
) -> list[float | None]:
    """Return the reward of each call: a reward goes to the last call before it that has none."""
    matched: list[float | None] = [None] * len(ends)
    for time, value in sorted(rewards, key=lambda reward: reward[0]):
        for number in reversed(range(len(ends))):
            is_before = ends[number] <= time if may_equal else ends[number] < time
            if is_before and matched[number] is None:
                matched[number] = value
                break
    return matched


def _build_triplet(span: Span, reward: float | None, agent: str | None) -> Triplet:
    attributes = span.attributes
    response: dict[str, Any] = {
        "token_ids": list(attributes.get("response_token_ids", [])),
        "raw_content": unflatten_attributes(attributes, "gen_ai.completion"),
    }
    logprobs = attributes.get("logprobs.content")
    if isinstance(logprobs, str):
        response["logprobs"] = json.loads(logprobs)
    return Triplet(
        prompt={
            "token_ids": list(attributes.get("prompt_token_ids", [])),
            "raw_content": unflatten_attributes(attributes, "gen_ai.prompt"),
            "image_urls": [],
        },
        response=response,
        reward=reward,
        metadata={
            "request": unflatten_attributes(attributes, "gen_ai.request"),
            "response": unflatten_attributes(attributes, "gen_ai.response"),
            "response_id": attributes.get("gen_ai.response.id"),
            "agent_name": agent,
        },
    )


def _find_ancestors(span: Span, by_id: dict[str, Span]) -> list[Span]:
    found: list[Span] = []
    seen = {span.span_id}
    while span.parent_id in by_id and span.parent_id not in seen:
        span = by_id[span.parent_id]
        seen.add(span.span_id)
        found.append(span)
    return found


def _find_agent(span: Span, by_id: dict[str, Span]) -> str | None:
    """Return the agent that a span, or else its nearest ancestor with one, names."""
    for each in (span, *_find_ancestors(span, by_id)):
        for name in AGENT_NAMES:
            if name in each.attributes:
                return str(each.attributes[name])
    return None


class TraceToMessages(TraceAdapter):
    """Converts spans of calls to chat messages, in the format of OpenAI's fine-tuning files."""

    def adapt(self, source: Sequence[Span], /) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for span in source:
            attributes = span.attributes
            recorded = [
                *_read_list(attributes, "gen_ai.prompt"),
                *_read_list(attributes, "gen_ai.completion"),
            ]
            tools = _read_list(attributes, "gen_ai.request.functions")
            if recorded:
                messages = [_format_message(each) for each in recorded]
                found.append(
                    {"messages": messages, "tools": [_format_tool(t) for t in tools] or None}
                )
        return found


def _read_list(attributes: Attributes, prefix: str) -> list[dict[str, Any]]:
    found = unflatten_attributes(attributes, prefix)
    return cast(list[dict[str, Any]], found) if isinstance(found, list) else []


def _format_message(recorded: dict[str, Any]) -> dict[str, Any]:
    message = {"role": recorded.get("role", "assistant"), "content": recorded.get("content", "")}
    if "tool_call_id" in recorded:
        message["tool_call_id"] = recorded["tool_call_id"]
    if "tool_calls" in recorded:
        message["tool_calls"] = [
            {
                "id": call.get("id"),
                "type": "function",
                "function": {"name": call.get("name"), "arguments": call.get("arguments")},
            }
            for call in recorded["tool_calls"]
        ]
    return message


def _format_tool(function: dict[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters", {})
    return {
        "type": "function",
        "function": {
            "name": function.get("name"),
            "description": function.get("description", ""),
            "parameters": json.loads(parameters) if isinstance(parameters, str) else parameters,
        },
    }
