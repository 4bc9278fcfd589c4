"""The OpenAPI document of a served store, made of the table that serves it."""

import re
from importlib.metadata import version
from types import NoneType
from typing import Any, Literal

from pydantic import TypeAdapter
from starlette.responses import Response

from whet.store.http.endpoints import ARCHIVE, ENDPOINTS, IN_PATHS, Endpoint, Frame, Nothing
from whet.store.http.frames import FRAMED
from whet.store.http.wire import Refusal

JSON = "application/json"

REFUSALS = {
    "400": "The body is not what it says it is.",
    "401": "The token is missing or wrong.",
    "404": "There is no such thing in the run.",
    "405": "The path takes another method.",
    "408": "The body did not arrive in time.",
    "409": "What is asked does not fit what is there, or a report came too late.",
    "413": "The body is too large.",
    "415": "The body is packed in a way that is not known.",
    "422": "A field is wrong; the message says which and why.",
    "503": "The store cannot answer now: ask again.",
}

Schema = dict[str, Any]  # Any: JSON schema
Use = Literal["asks", "gives"]
Row = Endpoint[Any, Any]  # Any: each knows its own


def openapi() -> Schema:
    """The document."""
    schemas, components = _schemas()
    paths: dict[str, Schema] = {}
    for endpoint in ENDPOINTS:
        operation = _operation(endpoint, schemas, components)
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    refusal = {"content": {JSON: {"schema": schemas["refusal", "gives"]}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "whet store",
            "version": version("whet"),
            "description": "The durable store of whet: queue, log, steps and resources of runs.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {
                status: {"description": says, **refusal} for status, says in REFUSALS.items()
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _schemas() -> tuple[dict[tuple[str, Use], Schema], Schema]:
    """A schema for whatever an endpoint takes or gives as JSON, and those they refer to."""
    types: list[tuple[tuple[str, Use], Any]] = [(("refusal", "gives"), Refusal)]
    for endpoint in ENDPOINTS:
        asks = endpoint.head if endpoint.asks is Frame else endpoint.asks
        gives = endpoint.head if endpoint.gives is Frame else endpoint.gives
        types.append(((endpoint.name, "asks"), asks))
        if gives is not Response:
            types.append(((endpoint.name, "gives"), gives))
    made, rest = TypeAdapter.json_schemas(
        [
            (key, "validation" if key[1] == "asks" else "serialization", TypeAdapter(kind))
            for key, kind in types
        ],
        ref_template="#/components/schemas/{model}",
    )
    return {key: schema for (key, _), schema in made.items()}, rest["$defs"]


def _operation(endpoint: Row, schemas: dict[tuple[str, Use], Schema], components: Schema) -> Schema:
    operation: Schema = {
        "operationId": endpoint.name,
        "summary": (endpoint.act.__doc__ or "").strip(),
        "parameters": [_in_path(name) for name in re.findall(r"\{(\w+)\}", endpoint.path)],
        "responses": {
            **_success(endpoint, schemas),
            **{status: {"$ref": f"#/components/responses/{status}"} for status in REFUSALS},
        },
    }
    asked = schemas[endpoint.name, "asks"]
    if endpoint.method != "POST":
        operation["parameters"] += _in_query(asked, components)
    if endpoint.name == "load":
        operation["requestBody"] = {"required": True, "content": {ARCHIVE: {"schema": _BINARY}}}
    elif endpoint.method == "POST" and endpoint.asks is not Nothing:
        kind, schema = (FRAMED, _frame(asked)) if endpoint.asks is Frame else (JSON, asked)
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": schema}}}
    return operation


def _success(endpoint: Row, schemas: dict[tuple[str, Use], Schema]) -> Schema:
    if endpoint.gives is NoneType:
        return {"204": {"description": "It is done."}}
    if endpoint.gives is Response:
        kind, schema = ARCHIVE, _BINARY
    elif endpoint.gives is Frame:
        kind, schema = FRAMED, _frame(schemas[endpoint.name, "gives"])
    else:
        kind, schema = JSON, schemas[endpoint.name, "gives"]
    return {"200": {"description": "It is done.", "content": {kind: {"schema": schema}}}}


_BINARY: Schema = {"type": "string", "format": "binary"}


def _frame(head: Schema) -> Schema:
    """As far as OpenAPI can say what is binary; the schema of the head is beside it."""
    says = "Four bytes of the head's length, the JSON head, then the numbers that it counts."
    return {**_BINARY, "description": says, "x-whet-head": head}


def _in_path(name: str) -> Schema:
    schema = {"type": "string", "pattern": f"^{IN_PATHS[name]}$"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _in_query(asked: Schema, components: Schema) -> list[Schema]:
    model: Schema = components[asked["$ref"].rpartition("/")[2]]
    required: list[str] = model.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _given(schema)}
        for name, schema in model.get("properties", {}).items()
    ]


def _given(schema: Schema) -> Schema:
    """Of what may be left out: a query has no null."""
    match schema:
        case {"anyOf": [one, {"type": "null"}]}:
            return one
        case _:
            return schema
