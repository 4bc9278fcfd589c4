"""Tokens that an agent's own recorder told by spans, as calls that can be trained.

strands-vllm writes to its span the ids a call was given and those it sampled. Nothing there says
that one call continued another, so each is a conversation of its own, and a row for each call.
Log-probabilities are not told: a scorer with the weights that sampled adds them.
"""

from collections.abc import Sequence

from pydantic import JsonValue

from whet.protocols import Scorer
from whet.types import AttemptId, Call, CallId, Generation, Origin, Sampling, Span, digest_tokens

PROMPT = "llm.hosted_vllm.prompt_token_ids"
SAMPLED = "llm.hosted_vllm.response_token_ids"


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
    """
    told = [(span, *ids) for span in spans if (ids := _ids(span)) is not None]
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
