"""What an engine samples bit by bit, and who is told of it."""

from collections.abc import Awaitable, Callable

from whet.gateway.messages import Message
from whet.types import Piece, join_pieces


class SampledSoFar:
    """What one choice has sampled so far."""

    __slots__ = ("_joined", "expected", "message", "pieces")

    def __init__(self) -> None:
        self.expected = False
        """Whether someone looks at it soon anyway, and need not be told that it has grown."""
        self.pieces: list[Piece] = []
        self.message: Message | None = None
        """What all the tokens say, once there are no more."""
        self._joined: tuple[int, int, Piece] | None = None

    def since(self, start: int) -> Piece:
        """All but the first `start` pieces, as one."""
        end = len(self.pieces)
        if self._joined is None or self._joined[:2] != (start, end):
            self._joined = (start, end, join_pieces(self.pieces[start:]))
        return self._joined[2]


OnPiece = Callable[[int, SampledSoFar], Awaitable[None] | None]
"""Told of a choice, by its index, that it has grown; gives what to wait for, if anything."""


def tell_nobody(index: int, sampled: SampledSoFar) -> None:
    """For who wants the whole alone."""
    sampled.expected = True
