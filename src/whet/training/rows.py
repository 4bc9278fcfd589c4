"""Build rows from credited trajectories: one token sequence per conversation, each token proven.

The calls of an attempt form a forest: a call continues a generation or starts a conversation. Each
path from a root to a leaf is one row. A generation on several paths is trained in the first row and
is context in the others, so it trains once.

Proof: each call stores the digest of the prompt ids its engine received. The row's prefix before
the generation must have that digest; otherwise the generation is not trained and is counted as
unproven. A generation sampled under a grammar is context.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from whet.config import LossConfig
from whet.types import Call, Credit, Generation, GenerationId, Row, SampledSegment, digest_tokens


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a step, and the generations that could not be trained."""

    rows: tuple[Row, ...]
    unproven: tuple[GenerationId, ...]
    """Generations with credit whose context does not match the served prompt; not trained."""
    constrained: tuple[GenerationId, ...] = ()
    """Generations sampled under a grammar, whose log-probabilities no trainer can reproduce."""


class _Node(NamedTuple):
    """A generation with its call."""

    id: GenerationId
    call: Call
    generation: Generation


def build_rows(credits: Sequence[Credit]) -> Rows:
    """Build the rows of credited trajectories; each sampled token has weight 1."""
    rows: list[Row] = []
    unproven: list[GenerationId] = []
    constrained: list[GenerationId] = []
    for credit in credits:
        masked = _find_constrained(credit)
        constrained += masked
        trained: set[GenerationId] = set(masked)
        for path in _find_paths(credit.trajectory.calls):
            row, failed = _build_row(path, credit, trained)
            unproven += failed
            if row.trained_tokens:
                rows.append(row)
    return Rows(tuple(rows), tuple(unproven), tuple(constrained))


def normalize(rows: Sequence[Row], loss: LossConfig, *, rollouts: float) -> list[Row]:
    """Set the weights of segments so that the sum over tokens is a mean.

    `token`: over all sampled tokens. `rollout`: over each rollout's tokens, then over rollouts,
    so that one that yields several rows, or longer ones, weighs as much as any other. `constant`:
    each rollout's sum over a fixed number, then over the `rollouts` of an update, trained or not
    (Dr. GRPO, arXiv:2503.20783): the weight of a token is the same in every update.
    """
    tokens: dict[str, int] = {}
    for row in rows:
        tokens[row.rollout] = tokens.get(row.rollout, 0) + row.trained_tokens

    total = sum(tokens.values())

    def compute_weight(row: Row) -> float:
        match loss.normalize:
            case "token":
                return 1 / total
            case "rollout":
                return 1 / (len(tokens) * tokens[row.rollout])
            case "constant":
                assert loss.tokens_per_rollout is not None
                return 1 / (rollouts * loss.tokens_per_rollout)

    return [
        replace(row, segments=tuple(replace(s, weight=compute_weight(row)) for s in row.segments))
        for row in rows
    ]


def _find_constrained(credit: Credit) -> list[GenerationId]:
    return [
        id
        for call in credit.trajectory.calls
        for id, generation in call.generations_by_id.items()
        if generation.sampling.grammar is not None and id in credit.advantages
    ]


def _find_paths(calls: Sequence[Call]) -> list[list[_Node]]:
    """Return every path from a conversation's first generation to a leaf."""
    continued = {call.parent for call in calls if call.generations}
    turns: dict[GenerationId, _Node] = {}
    for call in calls:
        for id, generation in call.generations_by_id.items():
            turns[id] = _Node(id, call, generation)
    paths: list[list[_Node]] = []
    for id, turn in turns.items():
        if id in continued:
            continue
        path = [turn]
        # Where a parent is missing the prefix cannot match: the generations are unproven.
        while (parent := path[-1].call.parent) is not None and parent in turns:
            path.append(turns[parent])
        paths.append(path[::-1])
    return paths


def _build_row(
    path: Sequence[_Node], credit: Credit, trained: set[GenerationId]
) -> tuple[Row, list[GenerationId]]:
    tokens: list[int] = []
    segments: list[SampledSegment] = []
    failed: list[GenerationId] = []
    digest: hashlib.blake2b | None = None
    for id, call, generation in path:
        tokens += call.prompt_suffix
        digest = digest_tokens(call.prompt_suffix, digest)
        advantage = credit.advantages.get(id)
        if advantage is not None and id not in trained:
            trained.add(id)
            proven = (call.prompt_length, call.prompt_digest) == (len(tokens), digest.hexdigest())
            if proven:
                segments.append(_build_segment(id, len(tokens), generation, advantage))
            else:
                failed.append(id)
        tokens += generation.tokens
        digest = digest_tokens(generation.tokens, digest)
    end = segments[-1].end if segments else 0  # tokens after the last segment train nothing
    rollout = credit.trajectory.attempt.rollout
    return Row(tuple(tokens[:end]), tuple(segments), rollout.id, rollout.group), failed


def _build_segment(
    id: GenerationId, start: int, generation: Generation, advantage: float | tuple[float, ...]
) -> SampledSegment:
    per_token = isinstance(advantage, tuple)
    return SampledSegment(
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
