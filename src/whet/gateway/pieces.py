"""What an engine samples bit by bit, and what is done with each bit."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from operator import attrgetter

from whet.types import Piece

OnPiece = Callable[[int, Piece], Awaitable[None] | None]
"""Told of every piece of a choice, by its index; gives what has to be waited for, if anything."""

_tokens, _logprobs = attrgetter("tokens"), attrgetter("logprobs")
_versions, _top = attrgetter("versions"), attrgetter("top")


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """What was sampled in several pieces, as one."""
    if len(pieces) == 1:
        return pieces[0]
    return Piece(
        tuple(chain.from_iterable(map(_tokens, pieces))),
        tuple(chain.from_iterable(map(_logprobs, pieces))),
        tuple(chain.from_iterable(map(_versions, pieces))),
        tuple(chain.from_iterable(map(_top, pieces))),
        stop=pieces[-1].stop,
    )
