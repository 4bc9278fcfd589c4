"""`whet.judge`: a model at an OpenAI-compatible endpoint as the reward of an agent."""

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, Generic, TypeVar

from pydantic import JsonValue

from whet.errors import ConfigError, JudgeFailed
from whet.io.chat_completion import Completion, complete
from whet.io.http_client import HttpClient, TransportError
from whet.runners.context import active_attempt
from whet.runners.judges.cache import ReplyCache
from whet.runners.judges.prompts import (
    InvalidReply,
    JsonMessage,
    ParsedRanking,
    ParsedScores,
    build_rank_prompt,
    build_score_prompt,
    parse_ranking,
    parse_scores,
    shuffle_answers,
)
from whet.runners.tracing import Operation
from whet.types import JUDGE, JUDGE_MODEL, Endpoint, Reward

Rubric = str | Sequence[str] | Mapping[str, float]
"""One criterion, several, or criteria with their weights."""

SPAN = "judge"

P = TypeVar("P", ParsedScores, ParsedRanking)


@dataclass(frozen=True, slots=True)
class JudgeUsage:
    """Cost of judgments: requests, tokens, price and time."""

    requests: int = 0
    """Requests to the endpoint, without replies from the cache."""
    cached: int = 0
    """Replies from the cache."""
    failed: int = 0
    """Votes without a valid reply."""
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    """By the `prices` of the judge."""
    seconds: float = 0.0

    def __add__(self, other: "JudgeUsage") -> "JudgeUsage":
        return JudgeUsage(*(getattr(self, n) + getattr(other, n) for n in JudgeUsage.__slots__))

    def rewards(self) -> list[Reward]:
        """The numbers as rewards that are logged, never trained."""
        tokens = self.input_tokens + self.output_tokens
        numbers = {
            "requests": self.requests,
            "cached": self.cached,
            "failed": self.failed,
            "tokens": tokens,
            "cost": self.cost,
            "seconds": self.seconds,
        }
        return [Reward(value=value, key=f"{JUDGE}.{name}") for name, value in numbers.items()]


@dataclass(frozen=True, slots=True)
class Judgment:
    """The verdict on one answer."""

    score: float
    """From 0 to 1: the weighted mean of the criteria, over the votes."""
    criteria: Mapping[str, float]
    """Score of each criterion."""
    reason: str
    """The judge's own words, of the first vote."""
    disagreement: float
    """Standard deviation of the score between votes."""
    usage: JudgeUsage


@dataclass(frozen=True, slots=True)
class Ranking:
    """The verdict on the answers of a group."""

    scores: tuple[float, ...]
    """By answer, from 0 (worst) to 1 (best); equal answers have equal scores."""
    reason: str
    disagreement: float
    """Share of the pairs of answers that two votes order differently."""
    usage: JudgeUsage
    messages: tuple[JsonMessage, ...] = ()
    """The prompt of the first vote."""
    replies: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Vote(Generic[P]):
    parsed: P | None
    reply: str
    problem: str
    usage: JudgeUsage


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """A model that scores answers by a rubric; see `whet.judge`."""

    criteria: tuple[str, ...]
    weights: tuple[float, ...]
    model: str
    base_url: str | None
    key_variable: str
    samples: int
    temperature: float | None
    max_tokens: int
    timeout_s: float
    tries: int
    prices: tuple[float, float]
    weight: float
    cache: ReplyCache | None

    async def score(
        self, answer: str, *, task: JsonValue = None, reference: str | None = None
    ) -> Judgment:
        """Score an answer by each criterion, with a reference answer if there is one.

        Inside an agent the judge's calls are kept with the attempt, as a span.

        Raises:
            JudgeFailed: no vote was valid; as the end of an agent it fails that attempt only.
        """
        messages = build_score_prompt(self.criteria, answer, task, reference)

        def parse(text: str) -> ParsedScores:
            return parse_scores(text, len(self.criteria))

        prompts = [(messages, parse)] * self.samples
        context = active_attempt.get()
        if context is None:
            return self._combine_scores(await self._vote(prompts, None))
        with Operation(SPAN, self._describe(messages)) as block:
            votes = await self._vote(prompts, None)
            block.set(**_describe_votes(votes))
            judgment = self._combine_scores(votes)
            block.set(**{"whet.judge.score": judgment.score})
        for reward in build_judgment_rewards(judgment, judgment.score):
            context.add_reward(reward)
        return judgment

    async def compare(
        self,
        answers: Sequence[str],
        *,
        task: JsonValue = None,
        reference: str | None = None,
        endpoint: Endpoint | None = None,
    ) -> Ranking:
        """Rank answers to one task. Each vote sees them in another order, equal ones once.

        Raises:
            JudgeFailed: no vote was valid.
        """
        distinct = list(dict.fromkeys(answers))
        if len(distinct) < 2:
            return Ranking((0.5,) * len(answers), "the answers are equal", 0.0, JudgeUsage())
        prompts: list[tuple[list[JsonMessage], Callable[[str], ParsedRanking]]] = []
        for sample in range(self.samples):
            order = shuffle_answers(distinct, str(sample))
            prompt = build_rank_prompt(self.criteria, distinct, order, task, reference)
            prompts.append((prompt, lambda text, order=order: parse_ranking(text, order)))
        votes = await self._vote(prompts, endpoint)
        valid = [vote.parsed for vote in votes if vote.parsed is not None]
        usage = _add_usage(votes)
        if not valid:
            raise JudgeFailed(f"the judge gave no valid ranking: {votes[0].problem}")
        means = [fmean(each) for each in zip(*(v.scores for v in valid), strict=True)]
        by_answer = dict(zip(distinct, means, strict=True))
        return Ranking(
            tuple(by_answer[answer] for answer in answers),
            valid[0].reason,
            _order_disagreement([v.scores for v in valid]),
            usage,
            tuple(prompts[0][0]),
            tuple(vote.reply for vote in votes),
        )

    def digest(self) -> str:
        """Digest of what its judgments depend on."""
        parts = (self.criteria, self.weights, self.model, self.base_url, self.samples)
        text = json.dumps([*parts, self.temperature, self.max_tokens])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def needs_gateway(self) -> bool:
        """Whether its model is the one that the gateway serves as `judge`."""
        return self.base_url is None

    # ------------------------------------------------------------------- votes

    def _combine_scores(self, votes: Sequence[_Vote[ParsedScores]]) -> Judgment:
        valid = [vote.parsed for vote in votes if vote.parsed is not None]
        if not valid:
            raise JudgeFailed(f"the judge gave no valid score: {votes[0].problem}")
        totals = [
            sum(s * w for s, w in zip(vote.scores, self.weights, strict=True)) / sum(self.weights)
            for vote in valid
        ]
        means = [fmean(each) for each in zip(*(vote.scores for vote in valid), strict=True)]
        return Judgment(
            fmean(totals),
            dict(zip(self.criteria, means, strict=True)),
            valid[0].reason,
            pstdev(totals),
            _add_usage(votes),
        )

    async def _vote(
        self,
        prompts: Sequence[tuple[list[JsonMessage], Callable[[str], P]]],
        endpoint: Endpoint | None,
    ) -> list[_Vote[P]]:
        """Ask for every vote at once. Raises ConfigError if there is no endpoint."""
        url, key, model = self._find_endpoint(endpoint)
        # A gateway is never behind the proxy of the machine.
        async with HttpClient(token=key, trust_env=self.base_url is not None) as http:
            votes: list[Coroutine[Any, Any, _Vote[P]]] = [
                self._ask(http, url, model, messages, parse, sample)
                for sample, (messages, parse) in enumerate(prompts)
            ]
            return await asyncio.gather(*votes)

    async def _ask(
        self,
        http: HttpClient,
        url: str,
        model: str,
        messages: list[JsonMessage],
        parse: Callable[[str], P],
        sample: int,
    ) -> _Vote[P]:
        """Ask for one vote, from the cache if it has it; a failure is a vote without a verdict."""
        began = time.monotonic()
        body: dict[str, JsonValue] = {
            "model": model,
            "messages": list(messages),
            "max_tokens": self.max_tokens,
        }
        if self.temperature is not None:
            body["temperature"] = self.temperature
        # The address of a gateway changes with each run, its model's name does not. `judge` is a
        # name for any model: replies of one are not those of the next run's.
        cache = None if self.base_url is None and model == JUDGE_MODEL else self.cache
        request: JsonValue = [self.base_url or JUDGE_MODEL, body, sample]
        if cache and (kept := cache.get(request)):
            try:
                return _Vote(parse(kept.text), kept.text, "", JudgeUsage(cached=1))
            except InvalidReply:
                pass  # of another version: ask again
        problem, text, usage = "", "", JudgeUsage()
        try:
            async with asyncio.timeout(self.timeout_s):
                for _ in range(self.tries):
                    try:
                        reply = await complete(http, url, body)
                        usage += self._compute_usage(reply)
                        text = reply.text
                        parsed = parse(text)
                    except (InvalidReply, TransportError) as error:
                        usage += JudgeUsage(requests=isinstance(error, TransportError))
                        problem = str(error)
                        continue
                    if cache:
                        cache.put(request, reply)
                    seconds = time.monotonic() - began
                    return _Vote(parsed, text, "", replace(usage, seconds=seconds))
        except TimeoutError:
            problem = f"no valid reply within {self.timeout_s:g} s"
        seconds = time.monotonic() - began
        return _Vote(None, text, problem, replace(usage, failed=1, seconds=seconds))

    def _compute_usage(self, reply: Completion) -> JudgeUsage:
        price_in, price_out = self.prices
        return JudgeUsage(
            requests=1,
            input_tokens=reply.input_tokens,
            output_tokens=reply.output_tokens,
            cost=(reply.input_tokens * price_in + reply.output_tokens * price_out) / 1e6,
        )

    def _find_endpoint(self, endpoint: Endpoint | None) -> tuple[str, str, str]:
        if self.base_url is not None:
            key = os.environ.get(self.key_variable, "")
            return self.base_url.rstrip("/"), key, self.model
        if endpoint is None:
            context = active_attempt.get()
            if context is None:
                raise ConfigError(
                    "this judge has no base_url: it works inside an agent, at the model that "
                    "gateway.judge names"
                )
            endpoint = context.llm.model_copy(update={"model": JUDGE_MODEL})
        return endpoint.base_url.rstrip("/"), endpoint.api_key, endpoint.model

    def _describe(self, messages: Sequence[JsonMessage]) -> dict[str, JsonValue]:
        # Not the names of the GenAI conventions: spans with those may be read as model calls.
        return {"whet.judge.model": self.model, "whet.judge.messages": list(messages)}


def judge(
    rubric: Rubric,
    *,
    base_url: str | None = None,
    model: str = JUDGE_MODEL,
    key_variable: str = "OPENAI_API_KEY",
    samples: int = 1,
    temperature: float | None = None,
    max_tokens: int = 1024,
    timeout_s: float = 60.0,
    tries: int = 3,
    prices: tuple[float, float] = (0.0, 0.0),
    weight: float = 1.0,
    cache: str | Path | None = ".whet/judge",
) -> Judge:
    """Make a judge from a rubric: a criterion, several, or criteria with weights.

    `base_url` and `model` name any OpenAI-compatible endpoint, `key_variable` the environment
    variable with its key. Without a `base_url` the judge is the model that `gateway.judge` names,
    such as the base model of the run.

    `samples` votes are averaged, and their disagreement is reported. All `tries` of a vote together
    take at most `timeout_s`. `prices` are those of a million input and output tokens. `weight`
    multiplies the scores that `whet.train(judge=...)` adds. Valid replies are kept in the folder
    `cache` by their request; those to an agent by the model of `gateway.judge` are not, since its
    name is not known there.

    Raises:
        ConfigError: invalid arguments.
    """
    if isinstance(rubric, str):
        rubric = [rubric]
    weights = dict(rubric) if isinstance(rubric, Mapping) else dict.fromkeys(rubric, 1.0)
    if not weights or not all(text.strip() for text in weights):
        raise ConfigError("a judge needs a rubric: at least one criterion, none of them empty")
    for text, each in weights.items():
        if not 0 < each < float("inf"):
            raise ConfigError(f"the weight of {text!r} is {each}: expected a positive number")
    if base_url is not None and not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"a judge has a URL such as https://host/v1; found {base_url!r}")
    if samples < 1 or tries < 1 or timeout_s <= 0:
        raise ConfigError(
            f"found samples {samples}, tries {tries} and timeout_s {timeout_s:g}: a judge needs at "
            "least 1, 1 and more than 0"
        )
    return Judge(
        criteria=tuple(weights),
        weights=tuple(weights.values()),
        model=model,
        base_url=base_url,
        key_variable=key_variable,
        samples=samples,
        temperature=temperature,
        max_tokens=max_tokens,
        timeout_s=timeout_s,
        tries=tries,
        prices=prices,
        weight=weight,
        cache=None if cache is None else ReplyCache(Path(cache)),
    )


def build_judgment_rewards(judgment: Judgment | Ranking, score: float) -> list[Reward]:
    """Score, disagreement and cost as rewards that are logged, never trained."""
    return [
        Reward(value=score, key=f"{JUDGE}.score"),
        Reward(value=judgment.disagreement, key=f"{JUDGE}.disagreement"),
        *judgment.usage.rewards(),
    ]


def _add_usage(votes: Sequence[_Vote[Any]]) -> JudgeUsage:
    return sum((vote.usage for vote in votes), JudgeUsage())


def _describe_votes(votes: Sequence[_Vote[Any]]) -> dict[str, JsonValue]:
    problems: list[JsonValue] = [vote.problem for vote in votes if vote.problem]
    return {"whet.judge.replies": [vote.reply for vote in votes], "whet.judge.problems": problems}


def _order_disagreement(votes: Sequence[Sequence[float]]) -> float:
    """Share of pairs of answers that pairs of votes order differently; a tie is half of that."""
    found: list[float] = []
    for number, one in enumerate(votes):
        for other in votes[number + 1 :]:
            for i in range(len(one)):
                for j in range(i):
                    found.append(abs(_sign(one[i] - one[j]) - _sign(other[i] - other[j])) / 2)
    return fmean(found) if found else 0.0


def _sign(number: float) -> int:
    return (number > 0) - (number < 0)
