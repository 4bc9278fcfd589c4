"""What a request repeats of the one before it, which need not be read again."""

from collections.abc import Callable, Sequence

from pydantic import JsonValue

from whet.gateway.messages import Message

Read = Callable[[Sequence[JsonValue], int], Sequence[Message]]
"""Reads the messages of a wire format, from the one of some number on."""


class Heard:
    """The messages of an attempt's last request, in its own words and in canonical form.

    An agent says all of its conversation with every call. What it said before was checked then,
    and equal JSON reads the same.
    """

    def __init__(self) -> None:
        self._words: list[JsonValue] = []
        self._messages: tuple[Message, ...] = ()

    def messages(self, words: list[JsonValue], read: Read) -> tuple[Message, ...]:
        """The messages of a request; `read` is given those that it did not begin with before."""
        known = len(self._words)
        if words[:known] != self._words:
            known = 0
        new = read(words[known:], known)
        # Not the equal words of this request: they would be held in memory twice.
        self._words = [*self._words[:known], *words[known:]]
        self._messages = (*self._messages[:known], *new)
        return self._messages
