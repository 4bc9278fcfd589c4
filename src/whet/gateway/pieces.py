"""What an engine samples bit by bit, and who is told of it."""

from collections.abc import Awaitable, Callable

from pydantic import JsonValue

from whet.types import Piece, StopReason


class Sampled:
    """What one choice has sampled so far."""

    __slots__ = ("expected", "logprobs", "message", "stop", "tokens", "top", "versions")

    def __init__(self) -> None:
        self.expected = False
        """Whether someone looks at it soon anyway, and need not be told that it has grown."""
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top: list[tuple[tuple[int, float], ...]] = []
        self.stop: StopReason | None = None
        self.message: dict[str, JsonValue] | None = None
        """What all the tokens say, once there are no more."""

    def add(self, piece: Piece) -> None:
        """The next piece, in place: a reply may have as many pieces as tokens."""
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.versions += piece.versions
        if piece.top:
            self.top += piece.top
        self.stop = piece.stop

    def since(self, start: int) -> Piece:
        """All but the first `start` tokens, as one piece."""
        return Piece(
            tuple(self.tokens[start:]),
            tuple(self.logprobs[start:]),
            tuple(self.versions[start:]),
            tuple(self.top[start:]),
            stop=self.stop,
        )


OnPiece = Callable[[int, Sampled], Awaitable[None] | None]
"""Told of a choice, by its index, that it has grown; gives what to wait for, if anything."""
