"""The events of OpenAI's completions, which differ in little but their choices."""

from functools import lru_cache

from pydantic import JsonValue

from whet.gateway import strictjson
from whet.gateway.dialects.dialect import Json

DONE = b"data: [DONE]\n\n"
"""The last event."""


class Chunks:
    """Writes what all events of a reply have in common once."""

    def __init__(self, kind: str, id: str, created: int, model: str) -> None:
        self._kind, self._id, self._created, self._model = kind, id, created, model
        self._head = b""

    def event(self, choices: list[JsonValue], more: Json | None = None) -> bytes:
        """An event with these choices, and with `more` fields behind them."""
        if not self._head:
            self._head = _head(self._kind, self._model) % (self._id.encode(), self._created)
        said = self._head + strictjson.dumps(choices)
        if more is None:
            return said + b"}\n\n"
        return said + b"," + strictjson.dumps(more)[1:] + b"\n\n"


@lru_cache(256)
def _head(kind: str, model: str) -> bytes:
    """How events begin, but for the id and the time."""
    named = strictjson.dumps(model).replace(b"%", b"%%")
    return b'data: {"id":"%%b","object":"%b","created":%%d,"model":%b,"choices":' % (
        kind.encode(),
        named,
    )
