"""Trajectories become rows: one token sequence a conversation, every sampled token proven.

The calls of an attempt form a forest: a call continues one generation, or begins a conversation.
Each path from a beginning to a generation nobody continued is one row. A generation on several
paths is trained in the first and is context in the others, so it trains once.

Proof: a call stored the digest of the ids its engine was given. A row's own prefix must have
that digest, or the generation is not trained and counts as unproven. A generation that was held
to a grammar is context.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from whet.config import LossConfig
from whet.types import Call, Credit, Generation, GenerationId, Row, SampledSpan, digest_tokens


@dataclass(frozen=True, slots=True)
class Rows:
    """What credits became."""

    rows: tuple[Row, ...]
    unproven: tuple[GenerationId, ...]
    """Generations with credit whose context could not be proven; they are not trained."""
    constrained: tuple[GenerationId, ...] = ()
    """Those sampled under a grammar, whose log-probabilities no trainer can reproduce: context."""


class _Turn(NamedTuple):
    """A generation with the call it answers."""

    id: GenerationId
    call: Call
    generation: Generation


def build_rows(credits: Sequence[Credit]) -> Rows:
    """The rows of several credited trajectories; each sampled token weighs 1."""
    rows: list[Row] = []
    unproven: list[GenerationId] = []
    constrained: list[GenerationId] = []
    for credit in credits:
        masked = _constrained(credit)
        constrained += masked
        trained: set[GenerationId] = set(masked)
        for path in _paths(credit.trajectory.calls):
            row, failed = _row(path, credit, trained)
            unproven += failed
            if row.trained_tokens:
                rows.append(row)
    return Rows(tuple(rows), tuple(unproven), tuple(constrained))


def normalise(rows: Sequence[Row], loss: LossConfig) -> list[Row]:
    """Give spans the weights that make the sum over tokens a mean.

    `token`: over all sampled tokens. `rollout`: over each rollout's tokens, then over rollouts,
    so that one that yields several rows, or longer ones, weighs as much as any other. `constant`:
    each rollout's sum over a fixed number, then over rollouts (Dr. GRPO, arXiv:2503.20783).
    """
    tokens: dict[str, int] = {}
    for row in rows:
        tokens[row.rollout] = tokens.get(row.rollout, 0) + row.trained_tokens

    def divisor(row: Row) -> int:
        if loss.normalise == "token":
            return sum(tokens.values())
        return len(tokens) * (loss.tokens_per_rollout or tokens[row.rollout])

    return [
        replace(row, spans=tuple(replace(span, weight=1 / divisor(row)) for span in row.spans))
        for row in rows
    ]


def _constrained(credit: Credit) -> list[GenerationId]:
    return [
        call.generation_id(index)
        for call in credit.trajectory.calls
        for index, generation in enumerate(call.generations)
        if generation.sampling.grammar is not None
        and call.generation_id(index) in credit.advantages
    ]


def _paths(calls: Sequence[Call]) -> list[list[_Turn]]:
    """Every way from a conversation's beginning to a generation that nobody continued."""
    continued = {call.parent for call in calls if call.generations}
    turns: dict[GenerationId, _Turn] = {}
    for call in calls:
        for index, generation in enumerate(call.generations):
            turns[call.generation_id(index)] = _Turn(call.generation_id(index), call, generation)
    paths: list[list[_Turn]] = []
    for id, turn in turns.items():
        if id in continued:
            continue
        path = [turn]
        # A parent that is not there cannot be proven either: the prefix will not match.
        while (parent := path[-1].call.parent) is not None and parent in turns:
            path.append(turns[parent])
        paths.append(path[::-1])
    return paths


def _row(
    path: Sequence[_Turn], credit: Credit, trained: set[GenerationId]
) -> tuple[Row, list[GenerationId]]:
    tokens: list[int] = []
    spans: list[SampledSpan] = []
    failed: list[GenerationId] = []
    digest: hashlib.blake2b | None = None
    for id, call, generation in path:
        tokens += call.context
        digest = digest_tokens(call.context, digest)
        advantage = credit.advantages.get(id)
        if advantage is not None and id not in trained:
            trained.add(id)
            proven = (call.prompt_length, call.prompt_digest) == (len(tokens), digest.hexdigest())
            if proven:
                spans.append(_span(id, len(tokens), generation, advantage))
            else:
                failed.append(id)
        tokens += generation.tokens
        digest = digest_tokens(generation.tokens, digest)
    end = spans[-1].end if spans else 0  # nothing is learned from what comes after
    rollout = credit.trajectory.attempt.rollout
    return Row(tuple(tokens[:end]), tuple(spans), rollout.id, rollout.group), failed


def _span(
    id: GenerationId, start: int, generation: Generation, advantage: float | tuple[float, ...]
) -> SampledSpan:
    per_token = isinstance(advantage, tuple)
    return SampledSpan(
        generation=id,
        start=start,
        logprobs=generation.logprobs,
        versions=generation.versions,
        advantages=advantage if per_token else (advantage,) * len(generation.tokens),
        weight=1.0,
        temperature=generation.sampling.temperature,
        top_p=generation.sampling.top_p,
        top_k=generation.sampling.top_k,
    )
