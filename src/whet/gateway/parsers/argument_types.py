"""Types for arguments that models write as plain text, from the JSON schemas of their tools."""

import re
from collections.abc import Sequence

from pydantic import JsonValue

from whet.gateway.messages import parse_json
from whet.gateway.parsers.literals import parse_literal

INTEGER = re.compile(r"-?+[0-9]{1,18}")
MAX_OPTIONS = 100
"""Maximum number of alternatives of one schema that are considered."""


def coerce_value(text: str, schema: JsonValue = None) -> JsonValue:
    """Convert text to a type of its schema; what fits none of them stays text.

    Without types it is JSON if it parses as JSON, and text otherwise.
    """
    types = list_types(schema)
    if types == {"string"}:
        return text
    written = text.strip()
    if "boolean" in types and written in ("True", "False"):
        written = written.lower()
    if "integer" in types and "string" not in types and INTEGER.fullmatch(written):
        return int(written)  # also with leading zeros, which JSON does not allow
    try:
        value = parse_json(written)
    except ValueError:
        # Templates that do not convert values to JSON show them to their models as Python.
        found = parse_literal(written) if types & {"object", "array"} else None
        return found if isinstance(found, dict | list) else text
    fits = not types or bool(types & _name_types(value))
    return text if "string" in types and not fits else value


def find_schema(name: str, tools: Sequence[JsonValue]) -> JsonValue:
    """Return the schema of a tool's arguments, or None if the tool is unknown."""
    for tool in tools:
        match tool:
            case {"function": {"name": found, "parameters": dict(parameters)}} if found == name:
                return parameters
            case _:
                pass
    return None


def find_property(schema: JsonValue, key: str) -> JsonValue:
    """Return the schema of a key of an object, or None if there is none."""
    for option in _list_options(schema):
        match option:
            case {"properties": dict(properties)} if key in properties:
                return properties[key]
            case {"additionalProperties": dict(others)}:
                return others
            case _:
                pass
    return None


def find_items(schema: JsonValue) -> JsonValue:
    """Return the schema of the items of a list, or None if there is none."""
    return next((o["items"] for o in _list_options(schema) if o.get("items")), None)


def list_types(schema: JsonValue) -> set[str]:
    """List the types that a schema allows; empty if it names none."""
    types: set[str] = set()
    for option in _list_options(schema):
        declared = option.get("type")
        values = option.get("enum", [option["const"]] if "const" in option else None)
        if isinstance(declared, str):
            types.add(declared)
        elif isinstance(declared, list):
            types |= {each for each in declared if isinstance(each, str)}
        elif isinstance(values, list):
            types |= {each for value in values for each in _name_types(value)}
    return types


def _list_options(schema: JsonValue) -> list[dict[str, JsonValue]]:
    """A schema and the alternatives in it."""
    options: list[dict[str, JsonValue]] = []
    pending = [schema]
    while pending and len(options) < MAX_OPTIONS:
        option = pending.pop(0)
        if not isinstance(option, dict):
            continue
        options.append(option)
        for combined in ("anyOf", "oneOf", "allOf"):
            parts = option.get(combined)
            pending += parts if isinstance(parts, list) else []
    return options


def _name_types(value: JsonValue) -> set[str]:
    """The names that JSON schemas have for the type of a value."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case dict():
            return {"object"}
