"""Endpoints: paths with and without prefixes, and errors that are bugs."""

import pytest

from support.gateway.asgi_client import BODY, PATH
from support.gateway.scripted_gateway import Gateway
from whet.errors import StoreError

pytestmark = pytest.mark.anyio


async def test_an_unexpected_error_is_a_500_in_json(gateway: Gateway) -> None:
    gateway.engine.breaks = ZeroDivisionError("of the engine's own making")
    response = await gateway.send("POST", PATH, BODY)
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "ZeroDivisionError" not in response.text


async def test_an_error_that_fails_every_call_is_logged_once(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.engine.breaks = StoreError("the disk of this test is full")
    for _ in range(2):
        assert (await gateway.send("POST", PATH, BODY)).status_code == 500
    assert [record.message for record in caplog.records] == [
        "call failed error=the disk of this test is full"
    ]


async def test_paths_match_with_and_without_a_version_and_a_last_slash(
    gateway: Gateway,
) -> None:
    for path in ("/v1/v1/models", "/v1/models", "/models", "/v1/models/", "/v1/models/policy"):
        assert (await gateway.send("GET", path)).status_code == 200, path
    assert (await gateway.send("HEAD", "/v1/models")).status_code == 200
    assert (await gateway.send("POST", "/v1/chat/completions/", BODY)).status_code == 200
    for method, path in (("GET", "/v1"), ("GET", PATH), ("POST", "/v1/models"), ("GET", "/v2/x")):
        response = await gateway.send(method, path)
        assert response.status_code == 404
        assert response.json()["error"]["code"] == "not_found"
        assert f"{method} {path}" in response.json()["error"]["message"]
