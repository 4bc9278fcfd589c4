"""Attribution of calls to attempts: URLs, keys, headers, baggage."""

from urllib.parse import unquote

import pytest

from support.gateway.scripted_gateway import Gateway, Json, NewGateway, attempt_path, other_key
from whet.gateway.app import MAX_UNAUTHORIZED
from whet.io.attempt_url import is_attempt_id
from whet.types import Outcome

pytestmark = pytest.mark.anyio

BODY: Json = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
PATH = "/v1/chat/completions"


async def status(gateway: Gateway, path: str, **headers: str) -> int:
    return (await gateway.send("POST", path, BODY, **headers)).status_code


async def test_the_key_alone_names_the_attempt(gateway: Gateway) -> None:
    assert await status(gateway, PATH) == 200
    assert len(await gateway.calls()) == 1


async def test_either_header_carries_the_key(gateway: Gateway) -> None:
    assert await status(gateway, PATH, authorization="", x_api_key=gateway.key) == 200
    assert await status(gateway, PATH, authorization=f"bearer {gateway.key}") == 200
    # A client set up for another provider too sends that one's key beside ours.
    assert await status(gateway, PATH, authorization="Bearer sk-x", x_api_key=gateway.key) == 200


async def test_an_agent_with_a_key_of_its_own_has_ours_in_the_url(gateway: Gateway) -> None:
    path = attempt_path(gateway) + PATH
    other = "Bearer your-api-key"
    assert await status(gateway, f"/key/{gateway.key}{path}", authorization=other) == 200
    assert await status(gateway, f"/key/forged{path}", authorization=other) == 401
    assert len(await gateway.calls()) == 1


async def test_path_header_and_baggage_name_it_to_the_gateways_key(gateway: Gateway) -> None:
    key = f"Bearer {gateway.gateway_key}"
    id = gateway.attempt.id
    assert await status(gateway, f"{attempt_path(gateway)}/v1/chat/completions") == 200
    assert await status(gateway, attempt_path(gateway) + PATH, authorization=key) == 200
    response = await gateway.client.post(
        PATH, json=BODY, headers={"authorization": key, "trace_id": id}
    )
    assert response.status_code == 200
    baggage = f"a=b, whet.attempt={id};ttl=3 ,c=d"
    assert await status(gateway, PATH, authorization=key, baggage=baggage) == 200
    assert len(await gateway.calls()) == 4


async def test_the_headers_name_can_be_chosen(new_gateway: NewGateway) -> None:
    gateway = await new_gateway(trace_header="x-rollout-id")
    key = f"Bearer {gateway.gateway_key}"
    assert await status(gateway, PATH, authorization=key, x_rollout_id=gateway.attempt.id) == 200
    assert len(await gateway.calls()) == 1


async def test_no_key_or_a_forged_one_is_refused_and_the_first_is_reported(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    forged = gateway.key[:-1] + ("0" if gateway.key[-1] != "0" else "1")
    for key in ("", "Bearer", "Bearer ", "Bearer sk-other", f"Bearer {forged}", "Basic abc"):
        assert await status(gateway, PATH, authorization=key) == 401
    assert await status(gateway, attempt_path(gateway) + PATH, authorization="") == 401
    for path in ("/v1/models", "/v1/models/policy", "/v1/responses/resp_1"):
        assert (await gateway.send("GET", path, authorization="")).status_code == 401
    assert await gateway.calls() == []
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == (
        "a model call was refused with a 401, others may follow: the API key is missing: send "
        "llm.api_key (in a command $OPENAI_API_KEY) as `Authorization: Bearer` or `x-api-key`"
    )


async def test_wrong_keys_at_the_url_of_an_attempt_leave_one_span(gateway: Gateway) -> None:
    path = attempt_path(gateway) + PATH
    for key in ("Bearer sk-other", "", "Bearer sk-third"):
        assert await status(gateway, path, authorization=key) == 401
    [span] = await gateway.store.spans(gateway.attempt.id)
    assert span.message.startswith("401: the API key is not one of this endpoint: send llm.api_key")
    assert (span.attributes, span.events) == ({}, ())
    assert "sk-other" not in span.model_dump_json()
    assert await gateway.calls() == []


async def test_a_wrong_key_leaves_nothing_with_an_attempt_that_ended(gateway: Gateway) -> None:
    await gateway.store.finish(gateway.attempt.id, Outcome(reward=1.0))
    path = attempt_path(gateway) + PATH
    assert await status(gateway, path, authorization="Bearer sk-other") == 401
    assert await gateway.store.spans(gateway.attempt.id) == []


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "r", "r.1%3Fa=b", "r..", "r.1%00", "r." + "1" * 999]
)
async def test_a_wrong_key_looks_up_no_name_that_is_not_an_attempts(
    gateway: Gateway, name: str
) -> None:
    assert not is_attempt_id(unquote(name))
    path = f"/rollout/r/attempt/{name}{PATH}"
    assert await status(gateway, path, authorization="Bearer sk-other") in (401, 404)


async def test_wrong_keys_are_looked_up_for_so_many_attempts_only(gateway: Gateway) -> None:
    for number in range(MAX_UNAUTHORIZED):
        path = f"/rollout/r/attempt/r.{number}{PATH}"
        assert await status(gateway, path, authorization="") == 401
    path = attempt_path(gateway) + PATH
    assert await status(gateway, path, authorization="Bearer sk-other") == 401
    assert await gateway.store.spans(gateway.attempt.id) == []


async def test_another_attempts_key_is_refused(new_gateway: NewGateway) -> None:
    gateway, other = await new_gateway(), await new_gateway()
    assert (
        await status(gateway, attempt_path(gateway) + PATH, authorization=f"Bearer {other.key}")
        == 401
    )
    assert await status(gateway, PATH, x_api_key=other.key) == 400
    assert await gateway.calls() == await other.calls() == []


async def test_two_names_are_a_conflict(new_gateway: NewGateway) -> None:
    gateway, other = await new_gateway(), await new_gateway()
    key = f"Bearer {gateway.gateway_key}"
    baggage = f"whet.attempt={other.attempt.id}"
    path = attempt_path(gateway) + PATH
    assert await status(gateway, path, authorization=key, baggage=baggage) == 400
    twice = f"whet.attempt={gateway.attempt.id},{baggage}"
    assert await status(gateway, PATH, authorization=key, baggage=twice) == 400


async def test_a_path_of_another_rollout_is_not_found(gateway: Gateway) -> None:
    path = f"/rollout/other/attempt/{gateway.attempt.id}{PATH}"
    assert await status(gateway, path) == 404


async def test_an_unknown_attempt_is_not_found(gateway: Gateway) -> None:
    assert await status(gateway, PATH, authorization=f"Bearer {other_key('nobody.1')}") == 404


async def test_a_call_of_nobody_is_refused_unless_the_run_allows_it(
    new_gateway: NewGateway,
) -> None:
    closed, opened = await new_gateway(), await new_gateway(allow_unattributed=True)
    key = f"Bearer {closed.gateway_key}"
    assert await status(closed, PATH, authorization=key) == 401
    assert await status(opened, PATH, authorization=key) == 200
    assert await status(opened, PATH, authorization="") == 401
    assert await opened.calls() == []
    response = await opened.send("GET", "/v1/responses/resp_1", authorization=key)
    assert response.status_code == 404


async def test_the_agents_name_comes_by_path_or_header(gateway: Gateway) -> None:
    path = f"{attempt_path(gateway)}/agent/planner/v1/chat/completions"
    assert await status(gateway, path) == 200
    assert await status(gateway, PATH, x_whet_agent="critic") == 200
    assert [call.origin.agent for call in await gateway.calls()] == ["planner", "critic"]


async def test_an_ended_attempt_gets_a_409_that_forbids_retries(gateway: Gateway) -> None:
    await gateway.store.finish(gateway.attempt.id, Outcome(reward=1.0))
    response = await gateway.send("POST", PATH, BODY)
    assert response.status_code == 409
    assert response.json()["error"]["code"] == "attempt_ended"
    assert response.headers["x-should-retry"] == "false"


async def test_queries_and_a_missing_version_are_tolerated(gateway: Gateway) -> None:
    assert await status(gateway, f"{PATH}?beta=true&api-version=1") == 200
    assert await status(gateway, "/chat/completions") == 200
    assert await status(gateway, f"{attempt_path(gateway)}/v1/v1/chat/completions") == 200
    assert await status(gateway, "/v2/chat/completions") == 404
    assert (await gateway.send("GET", PATH)).status_code == 404


async def test_a_call_to_an_unknown_path_is_a_refused_one_of_its_attempt(gateway: Gateway) -> None:
    path = attempt_path(gateway) + "/v1/chat/complete"
    assert await status(gateway, path, authorization="Bearer sk-other") == 404
    assert await gateway.store.spans(gateway.attempt.id) == []
    assert await status(gateway, path) == 404
    [span] = await gateway.store.spans(gateway.attempt.id)
    assert span.message == (
        "no such endpoint: POST /chat/complete; model calls go to /chat/completions, /completions, "
        "/responses or /messages, after the base URL"
    )


async def test_metrics_and_logs_of_an_exporter_are_no_model_calls(gateway: Gateway) -> None:
    for signal in ("metrics", "logs"):
        assert await status(gateway, f"{attempt_path(gateway)}/v1/{signal}") == 404
    assert await gateway.store.spans(gateway.attempt.id) == []


async def test_a_judge_that_is_not_served_names_the_settings(gateway: Gateway) -> None:
    reply = await gateway.send("POST", PATH, {**BODY, "model": "judge"})
    assert reply.status_code == 404
    assert "choose a judge with gateway.judge or gateway.endpoints" in reply.text
    assert "gateway.judge" not in (await gateway.send("POST", PATH, {**BODY, "model": "x"})).text
