"""Collector of groups that a judge ranks: its scores are added to the rewards."""

import asyncio
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from whet.errors import JudgeFailed
from whet.protocols import Collector, SpanLog
from whet.runners.judges.judge import Judge, JudgeUsage, Ranking, build_judgment_rewards
from whet.runners.judges.prompts import read_answer, read_prompt
from whet.types import AttemptId, Endpoint, Group, Mode, Reward, Rollout, Span, Trajectory

logger = logging.getLogger(__name__)

SPAN = "judge.compare"
KEY = "whet.judge.key"
SCORE = "whet.judge.score"
REWARDS = "whet.judge.rewards"


@dataclass(kw_only=True)
class JudgedCollector(Collector):
    """Ranks the answers of each training group once, and adds the scores to their rewards.

    A ranking is recorded with each attempt before it is used: a step that is repeated after a
    crash uses the same scores. A group that the judge cannot rank keeps its rewards.
    """

    collector: Collector
    judge: Judge
    spans: SpanLog
    endpoint: Endpoint | None = None
    """Where a judge without a URL of its own is served."""

    async def collect(self, rollouts: Sequence[Rollout]) -> list[Group]:
        groups = await self.collector.collect(rollouts)
        return list(await asyncio.gather(*(self._rank(group) for group in groups)))

    async def begin(self, rollouts: Sequence[Rollout]) -> None:
        await self.collector.begin(rollouts)

    async def wait(self, rollouts: Sequence[str]) -> None:
        await self.collector.wait(rollouts)

    async def _rank(self, group: Group) -> Group:
        ranked = [t for t in group if _is_ranked(t)]
        if len(ranked) < 2:
            return group
        # All attempts of the group: a ranking of others would not be the same one.
        key = " ".join([self.judge.digest(), *(t.attempt.id for t in ranked)])
        known = [await self._read(t.attempt.id, key) for t in ranked]
        if any(rewards is None for rewards in known):
            known = await self._ask(ranked, key)
        by_attempt = {t.attempt.id: r or [] for t, r in zip(ranked, known, strict=True)}
        return [self._add(t, by_attempt.get(t.attempt.id, [])) for t in group]

    def _add(self, trajectory: Trajectory, rewards: Sequence[Reward]) -> Trajectory:
        score = next((r.value for r in rewards if r.key.endswith(".score")), 0.0)
        return trajectory.model_copy(
            update={
                "reward": trajectory.reward + self.judge.weight * score,
                "rewards": (*trajectory.rewards, *rewards),
            }
        )

    async def _ask(self, ranked: Sequence[Trajectory], key: str) -> list[list[Reward] | None]:
        """Rank the trajectories and record the result with each; a failure is one as well."""
        answers = [read_answer(trajectory) for trajectory in ranked]
        start = time.time_ns()
        try:
            ranking = await self.judge.compare(
                answers, task=read_prompt(ranked[0]), endpoint=self.endpoint
            )
            problem = ""
        except JudgeFailed as error:
            logger.warning(
                "group keeps its rewards group=%s: %s", ranked[0].attempt.rollout.group, error
            )
            ranking, problem = None, str(error)
        found: list[list[Reward] | None] = []
        for index, trajectory in enumerate(ranked):
            rewards = _log_rewards(ranking, index)
            attributes: dict[str, JsonValue] = {
                KEY: key,
                "whet.judge.model": self.judge.model,
                REWARDS: [reward.model_dump(mode="json") for reward in rewards],
            }
            if ranking is not None:
                attributes[SCORE] = ranking.scores[index]
                attributes["whet.judge.messages"] = list(ranking.messages)
                attributes["whet.judge.replies"] = list(ranking.replies)
            span = _build_span(attributes, start, problem)
            await self.spans.record(trajectory.attempt.id, [span])
            found.append(rewards)
        return found

    async def _read(self, attempt: AttemptId, key: str) -> list[Reward] | None:
        """Return the rewards that an earlier ranking of the same attempts logged."""
        for span in await self.spans.spans(attempt):
            if span.name == SPAN and span.attributes.get(KEY) == key:
                kept = span.attributes.get(REWARDS)
                assert isinstance(kept, list)
                return [Reward.model_validate(each) for each in kept]
        return None


def is_ranking(span: Span) -> bool:
    """Whether a span has the score that the ranking of a group adds to a reward."""
    return KEY in span.attributes and SCORE in span.attributes


def _is_ranked(trajectory: Trajectory) -> bool:
    is_training = trajectory.attempt.rollout.mode is Mode.TRAIN
    return is_training and trajectory.failure is None and bool(trajectory.calls)


def _log_rewards(ranking: Ranking | None, index: int) -> list[Reward]:
    """The logged rewards of one of the ranked; the cost of the ranking is that of the first."""
    if ranking is None:
        return JudgeUsage(failed=1).rewards() if index == 0 else []
    rewards = build_judgment_rewards(ranking, ranking.scores[index])
    return rewards if index == 0 else rewards[:1]


def _build_span(attributes: dict[str, JsonValue], start: int, problem: str) -> Span:
    return Span(
        trace_id=secrets.token_hex(16),
        span_id=secrets.token_hex(8),
        name=SPAN,
        start=start,
        end=max(start, time.time_ns()),
        status="error" if problem else "ok",
        message=problem,
        attributes=attributes,
        scope="whet",
    )
