"""The OpenAPI document describes what the server does: checked by fuzzing the server with it."""

from collections.abc import Generator
from typing import Any, cast

import anyio
import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.transport.serialization import Binary

from support.store.served_store import TOKEN
from whet.store.http.openapi import build_document
from whet.store.http.rpc import ARCHIVE, METHODS, RemoteMethod
from whet.store.http.server import StoreServer
from whet.store.sqlite import SQLiteStore

EXAMPLES = 15
SESSION = requests.Session()
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    store = SQLiteStore(tmp_path_factory.mktemp("store") / "store.db")
    server = StoreServer(store, token=TOKEN)
    yield server.url
    server.close()
    anyio.run(store.close)


@pytest.fixture(scope="module")
def document(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def test_every_operation_is_described() -> None:
    paths = build_document()["paths"]
    found = {(p, m.upper(), op["operationId"]) for p, ops in paths.items() for m, op in ops.items()}
    assert found == {(row.path, row.verb, row.name) for row in METHODS.values()}
    assert all(op["summary"].endswith(".") for ops in paths.values() for op in ops.values())


def test_every_reference_leads_somewhere(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json").json()
    assert document == build_document()

    def check(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                at = document
                for part in node["$ref"].removeprefix("#/").split("/"):
                    at = at[part]
            for child in node.values():
                check(child)
        elif isinstance(node, list):
            for child in node:
                check(child)

    check(document)


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def as_it_is(context: object, value: Any) -> bytes:
    return value.data if isinstance(value, Binary) else str(value).encode(errors="replace")


schemathesis.serializer(ARCHIVE)(as_it_is)


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("row", METHODS.values(), ids=lambda row: row.name)
def test_whatever_is_sent_is_answered_as_described(
    document: Any, row: RemoteMethod[Any], mode: GenerationMode
) -> None:
    """Send what the document allows, and what it does not: never a 5xx or another schema."""

    @settings(
        max_examples=EXAMPLES, suppress_health_check=cast(list[HealthCheck], list(HealthCheck))
    )
    @given(case=document[row.path][row.verb].as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        for sent in (case.query, case.body):
            if row.polls and isinstance(sent, dict):
                wait_s = sent.get("wait_s", 0.2)  # by default half a minute
                sent["wait_s"] = min(wait_s, 0.2) if isinstance(wait_s, float | int) else wait_s
        response = case.call_and_validate(headers=HEADERS, checks=CHECKS, session=SESSION)
        assert response.status_code != 401 or mode is GenerationMode.NEGATIVE

    check()
