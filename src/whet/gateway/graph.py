"""The conversations of one attempt, as a forest of calls, and the way back to stored tokens.

A request's messages are walked down from the beginning: a call's own messages, then the turn it
sampled, then the calls that continued that turn. Where the walk ends, everything before is served
from the stored ids, byte for byte; only what follows is rendered. Sub-agents, edited histories,
parallel calls and several choices are branches, found by the same walk.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from whet.gateway.messages import Message, all_same
from whet.types import Call, CallId, Fork, Generation, GenerationId

TEXT = "text"
"""Where `Origin.shown` keeps the text of a raw prompt, after the parent's."""


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
    lossy: bool = False
    """Whether a turn on the way came back without some of its text."""


class FoundText(NamedTuple):
    """How much of a raw text prompt is known already."""

    turn: Turn | None
    rest: str
    """The text after it."""


class Graph:
    """The calls of one attempt."""

    def __init__(self, calls: Sequence[Call] = ()) -> None:
        self.calls: dict[CallId, Call] = {}
        self.size = 0
        """Tokens held."""
        self.hidden: set[CallId] = set()
        """Calls their agent asked to forget. They stay what they are: what was sampled."""
        self._turns: dict[GenerationId, Turn] = {}
        self._after: dict[GenerationId | None, list[Turn]] = {}
        for call in calls:
            self.add(call)

    def add(self, call: Call) -> None:
        """Make the call's turns something to continue from."""
        self.calls[call.id] = call
        self.size += len(call.context) + sum(len(g.tokens) for g in call.generations)
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
            (turn, messages, False) for turn in self._after.get(None, []) if turn.call.root == root
        ]
        while open_ends:
            turn, rest, lossy = open_ends.pop()
            end = len(turn.context)
            if len(rest) <= end or not all_same(turn.context, rest[:end]):
                continue
            if not turn.message.same_as(rest[end]):
                continue
            lossy = lossy or turn.message.lost_in(rest[end])
            after = rest[end + 1 :]
            if best.turn is None or len(after) < len(best.rest):
                best = Found(turn, after, lossy)
            open_ends += [
                (t, after, lossy) for t in self._after.get(turn.id, []) if t.call.root == root
            ]
        return best

    def find_tokens(self, ids: Sequence[int]) -> Turn | None:
        """The longest stored sequence that raw prompt ids continue."""
        best, length = None, 0
        open_ends = [(turn, 0) for turn in self._after.get(None, [])]
        while open_ends:
            turn, start = open_ends.pop()
            sampled = start + len(turn.call.context)
            end = sampled + len(turn.generation.tokens)
            if (
                tuple(ids[start:sampled]) != turn.call.context
                or tuple(ids[sampled:end]) != turn.generation.tokens
            ):
                continue
            if end > length:
                best, length = turn, end
            open_ends += [(t, end) for t in self._after.get(turn.id, [])]
        return best

    def find_text(self, root: str, text: str, sampled: Callable[[Turn], str]) -> FoundText:
        """The longest stored sequence whose text a raw prompt continues.

        `sampled` gives the text of what a turn sampled, whole.
        """
        best = FoundText(None, text)
        open_ends = [(turn, text) for turn in self._after.get(None, [])]
        while open_ends:
            turn, rest = open_ends.pop()
            before = turn.call.origin.shown.get(TEXT)
            if turn.call.root != root or not isinstance(before, str):
                continue
            if not rest.startswith(before) or not rest.startswith(sampled(turn), len(before)):
                continue
            after = rest[len(before) + len(sampled(turn)) :]
            if best.turn is None or len(after) < len(best.rest):
                best = FoundText(turn, after)
            open_ends += [(t, after) for t in self._after.get(turn.id, [])]
        return best

    def fork_raw(self, turn: Turn | None, context: Sequence[int]) -> Fork | None:
        """Why a raw prompt is not simply the next of the attempt, or None if it is."""
        peers = self._after.get(turn.id if turn else None, [])
        if any(peer.call.context == tuple(context) for peer in peers):
            return Fork.RESAMPLED
        if turn is not None:
            return Fork.BRANCH if peers else None
        return Fork.NEW_CONVERSATION if peers else None

    def fork(self, found: Found, root: str) -> Fork | None:
        """Why a request is not simply the next of the attempt, or None if it is."""
        if not self._turns:
            return None
        siblings = self._after.get(found.turn.id if found.turn else None, [])
        peers = [turn for turn in siblings if found.turn or turn.call.root == root]
        if any(all_same(turn.context, found.rest) for turn in peers):
            return Fork.RESAMPLED
        if found.turn is not None:
            edited = any(message.role == "assistant" for message in found.rest)
            return Fork.EDITED_HISTORY if edited else Fork.BRANCH if peers else None
        if any(
            all_same(turn.context, found.rest[: len(turn.context)])
            for turn in siblings
            if turn.call.root != root and turn.context
        ):
            return Fork.OTHER_TOOLS
        begun = any(turn.context[0].same_as(found.rest[0]) for turn in peers if turn.context)
        return Fork.EDITED_HISTORY if begun else Fork.NEW_CONVERSATION

    def turn(self, id: GenerationId) -> Turn:
        """A turn by its id."""
        return self._turns[id]

    def path(self, turn: Turn | None) -> list[Turn]:
        """The turns from the beginning of a conversation to this one."""
        path: list[Turn] = []
        while turn is not None:
            path.append(turn)
            turn = self._turns[turn.call.parent] if turn.call.parent else None
        return path[::-1]

    def tokens(self, turn: Turn | None) -> list[int]:
        """The whole stored sequence up to the end of a turn."""
        return [id for t in self.path(turn) for id in (*t.call.context, *t.generation.tokens)]

    def messages(self, call: CallId, choice: int = 0) -> list[Message]:
        """The whole conversation through a choice of a call; empty if the call is not known."""
        if call not in self.calls:
            return []
        turn = self._turns[self.calls[call].generation_id(choice)]
        return [m for t in self.path(turn) for m in (*t.context, t.message)]
