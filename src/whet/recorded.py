"""Tokens that an agent's own recorder told by spans, as calls that can be trained.

strands-vllm writes to its span the ids a call was given and those it sampled. Nothing there says
that one call continued another, so each is a conversation of its own, and a row for each call.
Log-probabilities are not told: a scorer with the weights that sampled adds them.

A span that tells of a call but not of its tokens cannot be trained, and says why.
"""

import logging
from collections.abc import Sequence
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

PROMPT = "llm.hosted_vllm.prompt_token_ids"
SAMPLED = "llm.hosted_vllm.response_token_ids"

OPERATIONS = ("chat", "text_completion", "generate_content")
"""Of `gen_ai.operation.name`, those that ask a model."""
SERVERS = ("url.full", "gen_ai.openai.api_base", "gen_ai.provider.name", "gen_ai.system")
"""What spans call a server by, the most telling first, where it is not by address and port."""
SDKS = ("strands-agents",)
"""Which tell their own name for that of a provider."""

logger = logging.getLogger(__name__)


async def told_by_spans(
    trajectories: Sequence[Trajectory],
    log: SpanLog,
    scorer: Scorer,
    *,
    version: int,
    stop_ids: Sequence[int] = (),
) -> list[Trajectory]:
    """The same, with the calls that their spans tell where they have none; see `calls_of_spans`.

    Raises:
        ConfigError: one has calls, and the tokens of none are told.
    """

    async def told(trajectory: Trajectory) -> Trajectory:
        id = trajectory.attempt.id
        spans = await log.spans(id)
        calls = await calls_of_spans(id, spans, scorer, version=version, stop_ids=stop_ids)
        return trajectory.model_copy(update={"calls": tuple(calls)})

    return [each if each.calls else await told(each) for each in trajectories]


async def calls_of_spans(
    attempt: AttemptId,
    spans: Sequence[Span],
    scorer: Scorer,
    *,
    version: int,
    stop_ids: Sequence[int] = (),
) -> list[Call]:
    """The calls whose tokens these spans tell, in their order; other spans are left out.

    They are taken to be sampled at temperature 1, untruncated, from the scorer's weights, which
    are of `version`.

    Raises:
        ConfigError: there are calls, and the tokens of none are told.
    """
    told = [(span, *ids) for span in spans if (ids := _ids(span)) is not None]
    if untold := untold_calls(attempt, spans):
        if not told:
            raise ConfigError(untold[0].why)
        logger.warning("calls left out count=%d example=%s", len(untold), untold[0].why)
    scored = await scorer.logprobs([(*prompt, *sampled) for _, prompt, sampled in told])
    return [
        Call(
            id=CallId(f"span-{span.trace_id}-{span.span_id}"),
            attempt=attempt,
            parent=None,
            root="span",
            messages=(),
            context=prompt,
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
        for (span, prompt, sampled), logprobs in zip(told, scored, strict=True)
    ]


class Untold(NamedTuple):
    """A call that a span tells without its tokens."""

    server: str
    why: str
    """Which call it was, what is missing, and what to do."""


def tells_calls(spans: Sequence[Span]) -> bool:
    """Whether there is a call among the spans that can be trained."""
    return any(_ids(span) for span in spans)


def untold_calls(attempt: AttemptId, spans: Sequence[Span]) -> list[Untold]:
    """The calls among the spans of an attempt that cannot be trained, in their order."""
    return [_untold(attempt, s) for s in spans if _is_call(s) and _ids(s) is None]


def _untold(attempt: AttemptId, span: Span) -> Untold:
    told = span.attributes
    server = _server(span)
    model = told.get("gen_ai.request.model") or told.get("llm.model_name")
    asked = f"{server} for model {model!r}" if model else server
    lacking = next(name for name in (PROMPT, SAMPLED) if not _flat(told.get(name)))
    found = f"{lacking} is no list of ids" if lacking in told else f"has no {lacking}"
    return Untold(
        server,
        f"call {span.name!r} (span {span.span_id} of attempt {attempt!r}) asked {asked}, and its "
        f"span {found}: it cannot be trained. Give its client base_url=llm.base_url and "
        "api_key=llm.api_key; or, where it must ask a vLLM of its own, send return_token_ids: true "
        "and record them: strands-vllm does with VLLMModel(..., return_token_ids=True) and "
        "callback_handler=VLLMTokenRecorder()",
    )


def _is_call(span: Span) -> bool:
    told = span.attributes
    if PROMPT in told or SAMPLED in told:
        return True
    if "gen_ai.operation.name" in told:
        return told["gen_ai.operation.name"] in OPERATIONS
    return "gen_ai.request.model" in told or told.get("openinference.span.kind") == "LLM"


def _server(span: Span) -> str:
    told = span.attributes
    if address := told.get("server.address"):
        port = told.get("server.port")
        return f"{address}:{port}" if port else str(address)
    return next(
        (str(told[name]) for name in SERVERS if told.get(name) and told[name] not in SDKS),
        "a server it does not name",
    )


def _ids(span: Span) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    prompt, sampled = (_flat(span.attributes.get(name)) for name in (PROMPT, SAMPLED))
    return (prompt, sampled) if prompt and sampled else None


def _flat(value: JsonValue) -> tuple[int, ...]:
    """Ids as strands-vllm writes them, or in a list of choices with one, as others do."""
    match value:
        case [[*inner]]:
            value = inner
        case [*_]:
            pass
        case _:
            return ()
    ids = [id for id in value if isinstance(id, int) and not isinstance(id, bool) and id >= 0]
    return tuple(ids) if len(ids) == len(value) else ()
