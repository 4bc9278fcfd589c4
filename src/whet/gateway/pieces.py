"""What an engine samples bit by bit, and who is told of it."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from operator import attrgetter

from pydantic import JsonValue

from whet.types import Piece

_tokens, _logprobs = attrgetter("tokens"), attrgetter("logprobs")
_versions, _top = attrgetter("versions"), attrgetter("top")


class Sampled:
    """What one choice has sampled so far."""

    __slots__ = ("_joined", "expected", "message", "pieces")

    def __init__(self) -> None:
        self.expected = False
        """Whether someone looks at it soon anyway, and need not be told that it has grown."""
        self.pieces: list[Piece] = []
        self.message: dict[str, JsonValue] | None = None
        """What all the tokens say, once there are no more."""
        self._joined: tuple[int, int, Piece] | None = None

    def since(self, start: int) -> Piece:
        """All but the first `start` pieces, as one."""
        end = len(self.pieces)
        if self._joined is None or self._joined[:2] != (start, end):
            self._joined = (start, end, _join(self.pieces[start:]))
        return self._joined[2]


def _join(pieces: Sequence[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        tuple(chain.from_iterable(map(_tokens, pieces))),
        tuple(chain.from_iterable(map(_logprobs, pieces))),
        tuple(chain.from_iterable(map(_versions, pieces))),
        tuple(chain.from_iterable(map(_top, pieces))),
        stop=pieces[-1].stop,
    )


OnPiece = Callable[[int, Sampled], Awaitable[None] | None]
"""Told of a choice, by its index, that it has grown; gives what to wait for, if anything."""
