"""The conversations of one attempt, as a forest of calls, and the way back to stored tokens.

A request's messages are walked down from the beginning: a call's own messages, then the turn it
sampled, then the calls that continued that turn. Where the walk ends, everything before is served
from the stored ids, byte for byte; only what follows is rendered. Sub-agents, edited histories,
parallel calls and several choices are branches, found by the same walk.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from whet.gateway.messages import Message, all_same
from whet.types import Call, Generation, GenerationId


@dataclass(frozen=True, slots=True)
class Turn:
    """A generation as a place to continue from."""

    id: GenerationId
    call: Call
    context: tuple[Message, ...]
    message: Message
    generation: Generation


@dataclass(frozen=True, slots=True)
class Found:
    """How much of a request is known already."""

    turn: Turn | None
    """The deepest stored turn the request continues."""
    rest: Sequence[Message]
    """The messages after it."""


class Graph:
    """The calls of one attempt."""

    def __init__(self, calls: Sequence[Call] = ()) -> None:
        self._turns: dict[GenerationId, Turn] = {}
        self._after: dict[GenerationId | None, list[Turn]] = {}
        for call in calls:
            self.add(call)

    def add(self, call: Call) -> None:
        """Make the call's turns something to continue from."""
        context = tuple(Message.from_json(m) for m in call.messages)
        for index, generation in enumerate(call.generations):
            message = Message.from_json(generation.message)
            turn = Turn(call.generation_id(index), call, context, message, generation)
            self._turns[turn.id] = turn
            self._after.setdefault(call.parent, []).append(turn)

    def find(self, root: str, messages: Sequence[Message]) -> Found:
        """The deepest turn that `messages` continue, under the same root."""
        best = Found(None, messages)
        # Newest first: of two turns that read the same, the later is the one being continued.
        open_ends = [
            (turn, messages) for turn in self._after.get(None, []) if turn.call.root == root
        ]
        while open_ends:
            turn, rest = open_ends.pop()
            end = len(turn.context)
            if len(rest) <= end or not all_same(turn.context, rest[:end]):
                continue
            if not turn.message.same_as(rest[end]):
                continue
            after = rest[end + 1 :]
            if best.turn is None or len(after) < len(best.rest):
                best = Found(turn, after)
            open_ends += [(t, after) for t in self._after.get(turn.id, [])]
        return best

    def tokens(self, turn: Turn | None) -> list[int]:
        """The whole stored sequence up to the end of a turn."""
        path: list[Turn] = []
        while turn is not None:
            path.append(turn)
            turn = self._turns[turn.call.parent] if turn.call.parent else None
        return [id for t in reversed(path) for id in (*t.call.context, *t.generation.tokens)]
