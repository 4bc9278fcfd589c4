"""Rewards and traces that agents in other processes post to their gateway."""

import gzip
import json

import pytest

from support.gateway.scripted_gateway import Gateway, Json, attempt_path, other_key
from whet.types import Outcome, Reward, Target

pytestmark = pytest.mark.anyio

JSON = "application/json"


def export(**attributes: str) -> bytes:
    span = {
        "traceId": "ab" * 16,
        "spanId": "cd" * 8,
        "name": "chat",
        "attributes": [{"key": k, "value": {"stringValue": v}} for k, v in attributes.items()],
    }
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}).encode()


async def test_a_reward_is_posted_with_the_reward_key_of_the_attempt(gateway: Gateway) -> None:
    key = gateway.reward_key
    posted = await gateway.post("/v1/rewards", {"value": 0.5}, authorization=key)
    assert posted == {"recorded": True}
    target: Json = {"value": 1, "key": "style", "target": {"turn": 0}}
    await gateway.post(f"{attempt_path(gateway)}/v1/rewards", target, authorization=key)
    expected = [Reward(value=0.5), Reward(value=1, key="style", target=Target(turn=0))]
    assert await gateway.store.rewards(gateway.attempt.id) == expected
    listed = (await gateway.send("GET", "/v1/rewards", authorization=key)).json()["rewards"]
    assert [Reward.model_validate(each) for each in listed] == expected


async def test_the_key_that_a_models_tools_may_see_posts_no_reward(gateway: Gateway) -> None:
    refused = await gateway.send("POST", "/v1/rewards", {"value": 1})
    assert refused.status_code == 401
    assert (
        "send llm.reward_key (in a command $WHET_REWARD_KEY) as"
        in refused.json()["error"]["message"]
    )
    assert (await gateway.send("GET", "/v1/rewards")).status_code == 401
    path, body = "/v1/chat/completions", {"model": "policy", "messages": []}
    call = await gateway.send("POST", path, body, authorization=gateway.reward_key)
    assert call.status_code == 401
    assert await gateway.store.rewards(gateway.attempt.id) == []


async def test_a_reward_that_is_sent_again_with_its_idempotency_key_is_recorded_once(
    gateway: Gateway,
) -> None:
    async def post(value: float, **headers: str) -> None:
        key = gateway.reward_key
        await gateway.post("/v1/rewards", {"value": value}, authorization=key, **headers)

    for value, key in ((1, "first"), (1, "first"), (1, "second"), (0, "second"), (0, "second")):
        await post(value, idempotency_key=key)
    await gateway.store.finish(gateway.attempt.id, Outcome(reward=0))
    await post(1, idempotency_key="first")  # its reply may come after the end
    values = [reward.value for reward in await gateway.store.rewards(gateway.attempt.id)]
    assert values == [1, 1, 0]


async def test_an_invalid_reward_is_refused(gateway: Gateway) -> None:
    bad: list[Json | bytes] = [
        {},
        {"value": "much"},
        {"value": 1, "reward": 2},
        b'{"value": NaN}',
        b"1",
        b"{",
    ]
    for body in bad:
        sent = await gateway.send("POST", "/v1/rewards", body, authorization=gateway.reward_key)
        assert sent.status_code == 400, body
    key = f"Bearer {gateway.gateway_key}"
    refused = await gateway.send("POST", "/v1/rewards", {"value": 1}, authorization=key)
    assert refused.status_code == 401
    await gateway.store.finish(gateway.attempt.id, Outcome(reward=0))
    key = gateway.reward_key
    late = await gateway.send("POST", "/v1/rewards", {"value": 1}, authorization=key)
    assert (late.status_code, late.headers["x-should-retry"]) == (409, "false")
    assert await gateway.store.rewards(gateway.attempt.id) == []


async def test_traces_are_taken_where_the_model_is(gateway: Gateway) -> None:
    path = f"{attempt_path(gateway)}/v1/traces"
    reply = await gateway.send("POST", path, export(), content_type=JSON)
    assert (reply.status_code, reply.json()) == (200, {})
    packed = gzip.compress(export(**{"whet.attempt": "another.1"}))
    reply = await gateway.send(
        "POST", "/v1/traces", packed, content_type=JSON, content_encoding="gzip"
    )
    assert reply.json()["partialSuccess"]["rejectedSpans"] == "1"
    assert [span.name for span in await gateway.store.spans(gateway.attempt.id)] == ["chat"]


async def test_traces_that_cannot_be_read_are_refused(gateway: Gateway) -> None:
    async def status(body: bytes, **headers: str) -> int:
        return (await gateway.send("POST", "/v1/traces", body, **headers)).status_code

    assert await status(b"{", content_type=JSON) == 400
    assert await status(b"{}", content_type="text/plain") == 415
    assert await status(b"{}", content_type=JSON, content_encoding="gzip") == 400
    cut = gzip.compress(b"{}")[:-9]
    assert await status(cut, content_type=JSON, content_encoding="gzip") == 413
    wrong = other_key("another.1")[:-1]
    assert await status(b"{}", content_type=JSON, authorization=f"Bearer {wrong}") == 401
