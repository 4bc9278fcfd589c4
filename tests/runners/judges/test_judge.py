"""Judges: scores, rankings, the cache, and endpoints that fail, lie or are slow."""

import json
import os
from pathlib import Path
from random import Random

import anyio
import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response

import whet
from support.agents.run_agents import get_failure, run
from support.servers.judge_server import rank_by, serve_judge
from whet.errors import ConfigError, JudgeFailed
from whet.runners.context import AttemptContext, active_attempt
from whet.runners.judges.judge import Judge, Rubric
from whet.runners.judges.prompts import InvalidReply, parse_ranking, parse_scores
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, AttemptId, Endpoint, Rollout

pytestmark = pytest.mark.anyio

GOOD = '{"scores": {"1": 8, "2": 4}, "reason": "clear"}'


def make(url: str | None, **options: object) -> Judge:
    settings = {"model": "m", "cache": None, **options}
    return whet.judge({"correct": 3.0, "short": 1.0}, base_url=url, **settings)  # pyright: ignore[reportArgumentType]


async def test_a_score_is_the_weighted_mean_of_the_criteria() -> None:
    with serve_judge(lambda prompt, n: GOOD) as server:
        judge = make(server.url, prices=(1.0, 10.0))
        judgment = await judge.score("42", task="6 * 7?", reference="forty-two")
    assert judgment.score == pytest.approx((3 * 0.8 + 0.4) / 4)
    assert judgment.criteria == {"correct": 0.8, "short": 0.4}
    assert (judgment.reason, judgment.disagreement) == ("clear", 0.0)
    assert (judgment.usage.requests, judgment.usage.input_tokens) == (1, 100)
    assert judgment.usage.cost == pytest.approx((100 * 1 + 20 * 10) / 1e6)
    prompt = server.requests[0]["messages"][-1]["content"]
    assert all(text in prompt for text in ("1. correct", "6 * 7?", "forty-two", "42"))


async def test_a_ranking_agrees_with_a_known_order_on_planted_groups() -> None:
    random = Random(5)
    with serve_judge(rank_by(lambda answer: len(answer))) as server:
        judge = make(server.url, samples=3)
        for _ in range(20):
            answers = ["x" * random.randrange(1, 9) for _ in range(random.randrange(2, 9))]
            ranking = await judge.compare(answers, task="write much")
            order = sorted(range(len(answers)), key=lambda i: len(answers[i]))
            by_judge = sorted(order, key=lambda i: ranking.scores[i])
            assert [len(answers[i]) for i in by_judge] == [len(answers[i]) for i in order]
            assert ranking.disagreement == 0
            for i, one in enumerate(answers):
                for j, other in enumerate(answers):
                    assert (one == other) == (ranking.scores[i] == ranking.scores[j])


async def test_equal_answers_need_no_judge() -> None:
    with serve_judge(lambda prompt, n: "never asked") as server:
        ranking = await make(server.url).compare(["same", "same", "same"])
    assert ranking.scores == (0.5, 0.5, 0.5)
    assert server.requests == []


async def test_votes_that_contradict_each_other_are_reported() -> None:
    replies = ['{"scores": {"1": 10, "2": 10}}', '{"scores": {"1": 0, "2": 0}}']
    with serve_judge(lambda prompt, n: replies[n % 2]) as server:
        judgment = await make(server.url, samples=2).score("a")
    assert (judgment.score, judgment.disagreement) == (0.5, 0.5)
    # It always prefers what it sees first, and each vote sees another order.
    with serve_judge(lambda prompt, n: '{"ranking": [[1], [2], [3], [4]]}') as server:
        ranking = await make(server.url, samples=4).compare(["a", "b", "c", "d"])
    assert ranking.disagreement > 0.2


async def test_a_reply_is_cached_by_the_content_of_its_request(tmp_path: Path) -> None:
    with serve_judge(lambda prompt, n: GOOD) as server:
        judge = make(server.url, cache=tmp_path / "cache")
        first = await judge.score("a", task="t")
        again = await make(server.url, cache=tmp_path / "cache").score("a", task="t")
        await judge.score("b", task="t")
    assert len(server.requests) == 2
    assert (again.score, again.usage.cached, again.usage.requests) == (first.score, 1, 0)


async def test_replies_of_a_gateways_judge_are_not_taken_for_those_of_another_model(
    tmp_path: Path,
) -> None:
    judge = make(None, model="judge", cache=tmp_path)
    attempt = Attempt(id=AttemptId("a.1"), rollout=Rollout(id="a", task=1, group="g"), number=1)
    scores: list[float] = []
    for points in (2, 8):
        reply = f'{{"scores": {{"1": {points}, "2": {points}}}}}'
        with serve_judge(lambda prompt, n, reply=reply: reply) as server:
            llm = Endpoint(base_url=server.url, api_key="k", model="policy")
            token = active_attempt.set(AttemptContext(attempt, llm))
            scores.append((await judge.score("a")).score)
            active_attempt.reset(token)
    assert scores == [0.2, 0.8]


async def test_a_judge_at_the_gateway_is_asked_without_the_proxy_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing listens
    with serve_judge(lambda prompt, n: '{"ranking": [[1], [2]]}') as server:
        url = server.url.replace("127.0.0.1", "0.0.0.0")  # this machine, but not loopback
        gateway = Endpoint(base_url=url, api_key="k", model="base-model")
        await make(None, model="judge").compare(["a", "b"], endpoint=gateway)
        with pytest.raises(JudgeFailed, match=r"127\.0\.0\.1:9"):
            await make(url, tries=1).compare(["a", "b"])


def _damage(cache: Path) -> None:
    for file in cache.rglob("*.json"):
        file.write_text("{")


async def test_a_damaged_cache_is_a_miss(tmp_path: Path) -> None:
    with serve_judge(lambda prompt, n: GOOD) as server:
        judge = make(server.url, cache=tmp_path)
        await judge.score("a")
        _damage(tmp_path)
        await judge.score("a")
    assert len(server.requests) == 2


BAD = {
    "no object": "I refuse",
    "a score beyond the scale": '{"scores": {"1": 11, "2": 4}}',
    "a criterion is missing": '{"scores": {"1": 5}}',
    "an unknown criterion": '{"scores": {"1": 5, "2": 5, "3": 5}}',
    "not a number": '{"scores": {"1": "9", "2": true}}',
    "not finite": '{"scores": {"1": NaN, "2": 1}}',
    "no float": f'{{"scores": {{"1": {10**400}, "2": 1}}}}',
    "status 500": PlainTextResponse("out of order", 500),
    "no completion": JSONResponse({"choices": []}),
    "no text": JSONResponse({"choices": [{"message": {"content": None}}]}),
    "not JSON": PlainTextResponse("<html>"),
}


@pytest.mark.parametrize("reply", BAD.values(), ids=BAD.keys())
async def test_an_invalid_reply_is_never_a_score(reply: str | Response, tmp_path: Path) -> None:
    with serve_judge(lambda prompt, n: reply) as server:
        judge = make(server.url, tries=2, cache=tmp_path)
        with pytest.raises(JudgeFailed, match="the judge gave no valid score"):
            await judge.score("a")
        assert len(server.requests) == 2
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "reply",
    [
        '{"ranking": [[1], [1]]}',
        '{"ranking": [1]}',
        '{"ranking": {"1": 2}}',
        '{"ranking": [[1], ["2"]]}',
        '{"ranking": [[true], [2]]}',
    ],
)
def test_a_ranking_has_every_answer_once(reply: str) -> None:
    with pytest.raises(InvalidReply):
        parse_ranking(reply, [0, 1])


def test_the_last_object_of_a_reply_counts() -> None:
    reply = 'Maybe {"scores": {"1": 1}} {no}. Final:\n```json\n{"scores": {"1": 9}}\n```'
    assert parse_scores(reply, 1).scores == (0.9,)


async def test_a_vote_that_fails_leaves_the_others() -> None:
    with serve_judge(lambda prompt, n: GOOD if n == 2 else "no") as server:
        judgment = await make(server.url, samples=3, tries=1).score("a")
    assert (judgment.usage.failed, judgment.disagreement) == (2, 0.0)


async def test_a_transient_error_is_tried_again() -> None:
    with serve_judge(lambda p, n: GOOD if n > 2 else PlainTextResponse("busy", 429)) as server:
        assert (await make(server.url).score("a")).usage.requests == 3


async def test_a_slow_judge_is_given_up() -> None:
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.listeners[0].extra(anyio.abc.SocketAttribute.local_port)
        judge = make(f"http://127.0.0.1:{port}/v1", timeout_s=0.2)  # accepted, never answered
        with pytest.raises(JudgeFailed, match=r"no valid reply within 0\.2 s"):
            await judge.score("a")


async def test_a_judge_that_lies_about_its_tokens_costs_nothing() -> None:
    body = {"choices": [{"message": {"content": GOOD}}], "usage": {"prompt_tokens": -5, "x": 1}}
    with serve_judge(lambda prompt, n: JSONResponse(body)) as server:
        judgment = await make(server.url, prices=(1, 1)).score("a")
    assert (judgment.usage.input_tokens, judgment.usage.cost) == (0, 0)


@pytest.mark.parametrize(
    ("rubric", "options", "says"),
    [
        ([], {}, "needs a rubric"),
        ("  ", {}, "needs a rubric"),
        ({"a": 0.0}, {}, "expected a positive number"),
        ("a", {"base_url": "host/v1"}, "a judge has a URL"),
        ("a", {"samples": 0}, "found samples"),
    ],
)
async def test_a_judge_checks_its_arguments(
    rubric: Rubric, options: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        whet.judge(rubric, **options)  # pyright: ignore[reportArgumentType]


async def test_a_judge_without_a_url_works_inside_an_agent_only() -> None:
    with pytest.raises(ConfigError, match="no base_url"):
        await make(None).score("a")


# ------------------------------------------------------------------- in an attempt


async def test_calls_of_a_judge_are_kept_with_the_attempt_and_are_no_model_calls(
    tmp_path: Path,
) -> None:
    with serve_judge(lambda prompt, n: GOOD) as server:
        judge = make(server.url)

        async def agent(task: str, llm: Endpoint) -> float:
            return (await judge.score("an answer", task=task)).score

        async with SQLiteStore(tmp_path / "s.db") as store:
            [[trajectory]] = await run(agent, ["t"], store)
            [span] = await store.spans(trajectory.attempt.id)
    assert trajectory.reward == pytest.approx(0.7)
    assert trajectory.calls == ()
    assert (span.name, span.attributes["whet.judge.replies"]) == ("judge", [GOOD])
    assert "an answer" in json.dumps(span.attributes["whet.judge.messages"])
    logged = {reward.key: reward.value for reward in trajectory.rewards}
    assert (logged["judge.score"], logged["judge.tokens"]) == (pytest.approx(0.7), 120)


async def test_a_judge_that_fails_fails_its_own_attempt_only(tmp_path: Path) -> None:
    with serve_judge(lambda prompt, n: GOOD if "fine" in prompt else "no") as server:
        judge = make(server.url, tries=1)

        async def agent(task: str, llm: Endpoint) -> float:
            return (await judge.score(task)).score

        async with SQLiteStore(tmp_path / "s.db") as store:
            groups = await run(agent, ["bad", "fine", "worse", "fine too"], store)
            assert [len(group) for group in groups] == [0, 1, 0, 1]
            failures = await store.failures(["r0"])
            assert failures["r0"].startswith("bad_reward: the judge gave no valid score")
        async with SQLiteStore(tmp_path / "other.db") as store:
            assert "bad_reward: the judge" in await get_failure(agent, store)
