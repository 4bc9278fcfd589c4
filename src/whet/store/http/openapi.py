"""The OpenAPI document of a store server, built from its table."""

from importlib.metadata import version
from typing import Any, Literal

from pydantic import TypeAdapter

from whet.store.http.errors import ErrorBody
from whet.store.http.rpc import (
    ARCHIVE,
    JSON,
    KEY,
    METHODS,
    PATH_PATTERNS,
    BatchResult,
    RemoteMethod,
)

ERRORS = {
    "400": "The body or a header cannot be read.",
    "401": "The token is missing or wrong.",
    "404": "Not found in this run.",
    "405": "The path takes another method.",
    "408": "The body did not arrive in time.",
    "409": "It conflicts with the state of the store, or came too late.",
    "413": "The body is too large.",
    "415": "Unknown content encoding.",
    "422": "A field is invalid; the message says which and why.",
    "503": "The store is unavailable: send the request again.",
}

OpenAPIObject = dict[str, Any]  # Any: JSON schema
Schemas = dict[tuple[str, Literal["request", "response"]], OpenAPIObject]

_FILE: OpenAPIObject = {"type": "string", "format": "binary"}


def build_document() -> OpenAPIObject:
    """Build the document."""
    schemas, components = _build_schemas()
    paths: dict[str, OpenAPIObject] = {}
    for method in METHODS.values():
        described = _describe(method, schemas, components)
        paths.setdefault(method.path, {})[method.verb.lower()] = described
    error = {"content": {JSON: {"schema": schemas["error", "response"]}}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "whet store",
            "version": version("whet"),
            "description": "Durable store of whet: queue, calls, steps and resources of runs.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "responses": {
                status: {"description": text, **error} for status, text in ERRORS.items()
            },
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}],
    }


def _build_schemas() -> tuple[Schemas, OpenAPIObject]:
    """Return the schemas of all requests and responses, and the components they refer to."""
    inputs: list[tuple[Any, Any, TypeAdapter[Any]]] = [
        (("error", "response"), "serialization", TypeAdapter(ErrorBody))
    ]
    for row in METHODS.values():
        response = TypeAdapter(BatchResult) if row.batched else row.response
        inputs.append(((row.name, "request"), "validation", row.body))
        inputs.append(((row.name, "response"), "serialization", response))
    made, rest = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")
    return {key: schema for (key, _), schema in made.items()}, rest["$defs"]


def _describe(
    method: RemoteMethod[Any], schemas: Schemas, components: OpenAPIObject
) -> OpenAPIObject:
    request = schemas[method.name, "request"]
    description: OpenAPIObject = {
        "operationId": method.name,
        "summary": method.summary,
        "parameters": [_describe_path_parameter(name) for name in method.path_parameters],
        "responses": {
            **_describe_success(method, schemas),
            **{status: {"$ref": f"#/components/responses/{status}"} for status in ERRORS},
        },
    }
    if method.keyed:
        schema = {"type": "string", "pattern": f"^{KEY.pattern}$"}
        description["parameters"].append(
            {"name": "Idempotency-Key", "in": "header", "required": False, "schema": schema}
        )
    if method.verb != "POST":
        description["parameters"] += _query_parameters(request, components)
    if method.verb == "PUT":
        description["requestBody"] = {"required": True, "content": {ARCHIVE: {"schema": _FILE}}}
    elif method.verb == "POST" and method.request.model_fields:
        description["requestBody"] = {"required": True, "content": {JSON: {"schema": request}}}
    return description


def _describe_success(method: RemoteMethod[Any], schemas: Schemas) -> OpenAPIObject:
    not_yet: OpenAPIObject = {}
    if method.polls and "wait_s" not in method.parameters:
        not_yet = {"202": {"description": "Not yet: send the request again."}}
    if method.is_silent and not (method.archive and method.verb == "GET"):
        return {"204": {"description": "Done."}, **not_yet}
    kind, schema = JSON, schemas[method.name, "response"]
    if method.archive:
        kind, schema = ARCHIVE, _FILE
    return {"200": {"description": "Done.", "content": {kind: {"schema": schema}}}, **not_yet}


def _describe_path_parameter(name: str) -> OpenAPIObject:
    schema = {"type": "string", "pattern": f"^{PATH_PATTERNS[name]}$"}
    return {"name": name, "in": "path", "required": True, "schema": schema}


def _query_parameters(request: OpenAPIObject, components: OpenAPIObject) -> list[OpenAPIObject]:
    model: OpenAPIObject = components[request["$ref"].rpartition("/")[2]]
    required: list[str] = model.get("required", [])
    return [
        {"name": name, "in": "query", "required": name in required, "schema": _remove_null(schema)}
        for name, schema in model.get("properties", {}).items()
    ]


def _remove_null(schema: OpenAPIObject) -> OpenAPIObject:
    """A query parameter is left out, never null."""
    match schema:
        case {"anyOf": [one, {"type": "null"}]}:
            return one
        case _:
            return schema
