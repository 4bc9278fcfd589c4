"""The events of OpenAI's completions, which differ in little but their choices."""

from collections.abc import Sequence

from whet.gateway import strictjson
from whet.gateway.dialects.dialect import Json

DONE = b"data: [DONE]\n\n"
"""The last event."""


class Chunks:
    """Writes what all events of a reply have in common once."""

    def __init__(self, common: Json) -> None:
        self._common = common
        self._head = b""

    def event(self, choices: Sequence[Json] | bytes, more: Json | None = None) -> bytes:
        """An event with these choices, or their JSON, and with `more` fields behind them."""
        if not self._head:
            self._head = b"data: " + strictjson.dumps(self._common)[:-1] + b',"choices":'
        tail = b"," + strictjson.dumps(more)[1:] if more else b"}"
        if not isinstance(choices, bytes):
            choices = strictjson.dumps([*choices])
        return self._head + choices + tail + b"\n\n"
