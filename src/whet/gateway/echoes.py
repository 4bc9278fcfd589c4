"""Recognize tool calls that clients send back changed, though they mean the same."""

from collections.abc import Mapping, Sequence

from pydantic import JsonValue

from whet.gateway.messages import Message, ToolCall


def restore_calls(
    sampled: Mapping[str, ToolCall], messages: Sequence[Message], tools: Sequence[JsonValue]
) -> tuple[Message, ...]:
    """Replace tool calls that are sent back by the sampled ones, which are given by id.

    They have the id that the model wrote, and not the arguments that a client fills in from the
    defaults of the tool, as Claude Code does. A call that was edited stays as it is.
    """
    if not sampled:
        return tuple(messages)
    schemas = dict(_read_schema(tool) for tool in tools)
    return tuple(
        m._replace(tool_calls=tuple(_restore(c, sampled.get(c.id), schemas) for c in m.tool_calls))
        if m.tool_calls
        else m
        for m in messages
    )


def _restore(
    echo: ToolCall, sampled: ToolCall | None, schemas: Mapping[str, JsonValue]
) -> ToolCall:
    if sampled is None:
        return echo
    echo = echo._replace(model_id=sampled.model_id)
    if echo.arguments == sampled.arguments or echo.name != sampled.name:
        return echo
    schema = schemas.get(echo.name)
    same = equals_with_defaults(sampled.parsed(), echo.parsed(), schema)
    return sampled if same else echo


def _read_schema(tool: JsonValue) -> tuple[str, JsonValue]:
    match tool:
        case {"function": {"name": str(name), "parameters": schema}}:
            return name, schema
        case _:
            return "", None


def equals_with_defaults(mine: JsonValue, echo: JsonValue, schema: JsonValue) -> bool:
    """Return whether `echo` is `mine` with nothing added but defaults of a JSON schema."""
    match mine, echo, schema:
        case dict(), dict(), {"properties": dict(properties)}:
            return mine.keys() <= echo.keys() and all(
                equals_with_defaults(mine[key], value, properties.get(key))
                if key in mine
                else _is_default(value, properties.get(key))
                for key, value in echo.items()
            )
        case list(), list(), {"items": items}:
            return len(mine) == len(echo) and all(
                equals_with_defaults(m, e, items) for m, e in zip(mine, echo, strict=True)
            )
        case _:
            return mine == echo


def _is_default(value: JsonValue, schema: JsonValue) -> bool:
    return isinstance(schema, dict) and "default" in schema and schema["default"] == value
