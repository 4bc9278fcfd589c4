"""GenAI spans: which are model calls, which call each describes, and trainable calls from them.

strands-vllm writes the token ids of a call's prompt and of its sample to its span. Spans do not
show that one call continued another, so each is a conversation of its own, and a row of its own.
Log-probabilities are missing: a scorer with the weights that sampled adds them.

A span of a call without token ids cannot be trained, and its reason says why.
"""

import hashlib
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from whet.errors import ConfigError
from whet.protocols import Scorer, SpanLog
from whet.types import (
    AttemptId,
    Call,
    CallId,
    Generation,
    Origin,
    Sampling,
    Span,
    Trajectory,
    digest_tokens,
)

PROMPT_IDS = "llm.hosted_vllm.prompt_token_ids"
SAMPLED_IDS = "llm.hosted_vllm.response_token_ids"

OPERATIONS = ("chat", "text_completion", "generate_content")
"""Values of `gen_ai.operation.name` that are model calls."""
MODEL_ATTRIBUTES = ("gen_ai.request.model", "gen_ai.response.id")
"""Attributes of model calls of instrumentations that do not set an operation."""
SERVERS = ("url.full", "gen_ai.openai.api_base", "gen_ai.provider.name", "gen_ai.system")
"""Attributes that name a server, the most specific first, if there is no address and port."""
SDKS = ("strands-agents",)
"""SDKs that write their own name as the provider's."""

OUTPUTS = {"gen_ai.output.messages", "openai_agents.output"}
"""Attributes, of a span or of its events, that hold a model's output. Those of its input also have
the ids of earlier tool calls."""
CHOICE_EVENT = "gen_ai.choice"
"""The event that holds it in the older conventions."""

RESPONSE_PREFIX = re.compile(r"^(chatcmpl-|cmpl-|msg_|resp_)")
"""Prefixes of the wire formats before the id of a call."""

REFUSED_CALL = "refused model call"
"""Name of the gateway's spans of requests that it refused."""

logger = logging.getLogger(__name__)


def is_model_call(span: Span) -> bool:
    """Whether a span describes one model call."""
    attributes = span.attributes
    if PROMPT_IDS in attributes or SAMPLED_IDS in attributes:
        return True
    # The span of an agent may have the id of its last response, but also its own operation.
    if (operation := attributes.get("gen_ai.operation.name")) is not None:
        return operation in OPERATIONS
    has_model = any(name in attributes for name in MODEL_ATTRIBUTES)
    return has_model or attributes.get("openinference.span.kind") == "LLM"


def build_refusal(attempt: AttemptId, error: str, now: int, *, once: str = "") -> Span:
    """Build the span of a model call that the gateway refused; equal ones have equal ids.

    Refusals with the same `once` count as equal: a store keeps the first of an attempt.
    """
    return Span(
        trace_id=hashlib.blake2b(attempt.encode(), digest_size=16).hexdigest(),
        span_id=hashlib.blake2b(f"refused {once or error}".encode(), digest_size=8).hexdigest(),
        name=REFUSED_CALL,
        kind="server",
        start=now,
        end=now,
        status="error",
        message=error,
    )


def find_refusals(spans: Sequence[Span]) -> list[Span]:
    """Return the spans of model calls that the gateway refused, with the reason as message."""
    return [span for span in spans if span.name == REFUSED_CALL]


def parse_response_id(id: str) -> CallId:
    """Return the id of the call that a response id of any wire format names."""
    return CallId(RESPONSE_PREFIX.sub("", id))


def read_outputs(span: Span) -> Iterator[str]:
    """Return the model outputs in a span and its events, as text."""
    for attributes in (span.attributes, *(event.attributes for event in span.events)):
        yield from (_to_text(attributes[key]) for key in OUTPUTS & attributes.keys())
    yield from (_to_text(e.attributes) for e in span.events if e.name == CHOICE_EVENT)


async def add_calls_from_spans(
    trajectories: Sequence[Trajectory],
    log: SpanLog,
    scorer: Scorer,
    *,
    version: int,
    stop_ids: Sequence[int] = (),
) -> list[Trajectory]:
    """Return the trajectories, with calls from their spans where they have none.

    See `build_calls_from_spans`.

    Raises:
        ConfigError: a trajectory has calls, but no span has token ids.
    """

    async def add(trajectory: Trajectory) -> Trajectory:
        id = trajectory.attempt.id
        spans = await log.spans(id)
        calls = await build_calls_from_spans(id, spans, scorer, version=version, stop_ids=stop_ids)
        return trajectory.model_copy(update={"calls": tuple(calls)})

    return [each if each.calls else await add(each) for each in trajectories]


async def build_calls_from_spans(
    attempt: AttemptId,
    spans: Sequence[Span],
    scorer: Scorer,
    *,
    version: int,
    stop_ids: Sequence[int] = (),
) -> list[Call]:
    """Build calls from the spans that have token ids, in their order; ignore other spans.

    They count as sampled at temperature 1, untruncated, from the scorer's weights, which are of
    `version`.

    Raises:
        ConfigError: there are calls, but no span has token ids.
    """
    found = [(span, *ids) for span in spans if (ids := _read_token_ids(span)) is not None]
    if untrainable := find_untrainable_calls(attempt, spans):
        if not found:
            raise ConfigError(untrainable[0].reason)
        logger.warning(
            "calls left out count=%d example=%s", len(untrainable), untrainable[0].reason
        )
    scores = await scorer.logprobs([(*prompt, *sampled) for _, prompt, sampled in found])
    return [
        Call(
            id=CallId(f"span-{span.trace_id}-{span.span_id}"),
            attempt=attempt,
            parent=None,
            root="span",
            messages=(),
            prompt_suffix=prompt,
            prompt_length=len(prompt),
            prompt_digest=digest_tokens(prompt).hexdigest(),
            generations=(
                Generation(
                    tokens=sampled,
                    logprobs=logprobs[len(prompt) - 1 :],
                    versions=(version,) * len(sampled),
                    stop="stop" if sampled[-1] in stop_ids else "length",
                    sampling=Sampling(),
                    message={"role": "assistant", "content": ""},
                ),
            ),
            created=span.start / 1e9,
            origin=Origin(dialect="span"),
        )
        for (span, prompt, sampled), logprobs in zip(found, scores, strict=True)
    ]


class UntrainableCall(NamedTuple):
    """A model call whose span has no token ids."""

    server: str
    reason: str
    """The call, what is missing, and what to do."""


def has_trainable_calls(spans: Sequence[Span]) -> bool:
    """Whether any of the spans has token ids."""
    return any(_read_token_ids(span) for span in spans)


def find_untrainable_calls(attempt: AttemptId, spans: Sequence[Span]) -> list[UntrainableCall]:
    """Return the calls among the spans of an attempt that have no token ids, in their order."""
    return [_explain(attempt, s) for s in spans if is_model_call(s) and _read_token_ids(s) is None]


def find_bypassing_calls(
    attempt: AttemptId, spans: Sequence[Span], calls: Sequence[Call]
) -> list[UntrainableCall]:
    """Return the calls among the spans of an attempt that went to another server than its `calls`.

    Both have to name their replies and their servers: a span without an id may be about one of the
    recorded calls, too.
    """
    recorded = {call.id for call in calls}
    named = [
        (span, id)
        for span in spans
        if is_model_call(span)
        and _read_token_ids(span) is None
        and span.attributes.get("server.address")
        and (id := parse_response_id(str(span.attributes.get("gen_ai.response.id") or "")))
    ]
    own = {_read_server(span) for span, id in named if id in recorded}
    return [
        _explain(attempt, span)
        for span, id in named
        if own and id not in recorded and _read_server(span) not in own
    ]


def _explain(attempt: AttemptId, span: Span) -> UntrainableCall:
    attributes = span.attributes
    server = _read_server(span)
    model = attributes.get("gen_ai.request.model") or attributes.get("llm.model_name")
    target = f"{server} for model {model!r}" if model else server
    name = next(n for n in (PROMPT_IDS, SAMPLED_IDS) if not _parse_ids(attributes.get(n)))
    problem = f"has an invalid list of ids in {name}" if name in attributes else f"has no {name}"
    return UntrainableCall(
        server,
        f"call {span.name!r} (span {span.span_id} of attempt {attempt!r}) went to {target}, and "
        f"its span {problem}: it cannot be trained. Give its client base_url=llm.base_url and "
        "api_key=llm.api_key; or, if it must use a vLLM of its own, send return_token_ids: true "
        "and record them: strands-vllm does with VLLMModel(..., return_token_ids=True) and "
        "callback_handler=VLLMTokenRecorder()",
    )


def _read_server(span: Span) -> str:
    attributes = span.attributes
    if address := attributes.get("server.address"):
        port = attributes.get("server.port")
        return f"{address}:{port}" if port else str(address)
    names = (attributes.get(name) for name in SERVERS)
    return next((str(name) for name in names if name and name not in SDKS), "an unknown server")


def _read_token_ids(span: Span) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    prompt, sampled = (_parse_ids(span.attributes.get(n)) for n in (PROMPT_IDS, SAMPLED_IDS))
    return (prompt, sampled) if prompt and sampled else None


def _parse_ids(value: JsonValue) -> tuple[int, ...]:
    """Parse ids as strands-vllm writes them, or in a list with one choice, as others do."""
    match value:
        case [[*inner]]:
            value = inner
        case [*_]:
            pass
        case _:
            return ()
    ids = [id for id in value if isinstance(id, int) and not isinstance(id, bool) and id >= 0]
    return tuple(ids) if len(ids) == len(value) else ()


def _to_text(value: JsonValue | Mapping[str, JsonValue]) -> str:
    return value if isinstance(value, str) else json.dumps(value)
