"""Whose spans they are: named by the span, by who sent it, or by others of its trace."""

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from whet.errors import NotFound
from whet.otlp.export import ATTEMPT, Export, Sent
from whet.types import AttemptId, Span

Record = Callable[[AttemptId, Sequence[Span]], Awaitable[None]]
Owners = Callable[[Sequence[str]], Awaitable[dict[str, AttemptId]]]


class Sender(NamedTuple):
    """Who sent spans."""

    attempt: AttemptId | None
    """Whose they are if they do not say."""
    is_bound: bool = False
    """Whether it may speak for no other attempt."""


class Taken(NamedTuple):
    """What became of an export."""

    kept: int
    rejected: int
    why: str
    """The reasons, if any were rejected."""


async def take(
    export: Export, sender: Sender, record: Record, owners: Owners | None = None
) -> Taken:
    """Keep the spans of an export with their attempts; those of none are counted, never kept.

    `owners` knows the traces that came before.
    """
    reasons = list(export.broken)
    named = [(sent, _named(sent, sender)) for sent in export.spans]
    traces = await _traces(named, owners)
    mine = defaultdict[AttemptId, list[Span]](list)
    for sent, attempt in named:
        attempt = attempt or traces.get(sent.span.trace_id)
        if attempt is None:
            reasons.append(f"it names no attempt: set the attribute {ATTEMPT!r} or use a key")
        elif sender.is_bound and attempt != sender.attempt:
            reasons.append(f"this key is not of attempt {attempt!r}")
        else:
            mine[attempt].append(sent.span)
    kept = 0
    for attempt, spans in mine.items():
        try:
            await record(attempt, spans)
            kept += len(spans)
        except NotFound as error:
            reasons += [str(error)] * len(spans)
    why = "; ".join(dict.fromkeys(reasons))
    return Taken(kept, len(reasons), why[:1000])


def _named(sent: Sent, sender: Sender) -> AttemptId | None:
    return AttemptId(sent.attempt) if sent.attempt else sender.attempt


async def _traces(
    named: Sequence[tuple[Sent, AttemptId | None]], owners: Owners | None
) -> dict[str, AttemptId]:
    """The attempts of traces, of those that have but one."""
    found = defaultdict[str, set[AttemptId]](set)
    for sent, attempt in named:
        if attempt is not None:
            found[sent.span.trace_id].add(attempt)
    unnamed = {sent.span.trace_id for sent, attempt in named if attempt is None}
    unknown = sorted(unnamed - found.keys())
    known = await owners(unknown) if owners is not None and unknown else {}
    return known | {trace: min(of) for trace, of in found.items() if len(of) == 1}
