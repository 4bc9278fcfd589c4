"""The conversations of one attempt, as a forest of calls, and the way back to stored tokens.

A request's messages are walked down from the beginning: a call's own messages, then the turn it
sampled, then the calls that continued that turn. Where the walk ends, everything before is served
from the stored ids, byte for byte; only what follows is rendered. Sub-agents, edited histories,
parallel calls and several choices are branches, found by the same walk.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from whet.gateway.messages import Message, all_same
from whet.types import Call, CallId, Fork, Generation, GenerationId

TEXT = "text"
"""Where `Origin.shown` keeps the text of a raw prompt, after the parent's."""
DELETED = "deleted"
"""Where it keeps the id of a call that is not to be shown any more; such a call sampled nothing."""


class Turn(NamedTuple):
    """A generation as a place to continue from."""

    id: GenerationId
    call: Call
    context: tuple[Message, ...]
    message: Message
    generation: Generation


class Found(NamedTuple):
    """How much of a request is known already."""

    turn: Turn | None
    """The deepest stored turn the request continues."""
    rest: Sequence[Message]
    """The messages after it."""
    lossy: bool = False
    """Whether a turn on the way came back without some of its text."""


class _Newest(NamedTuple):
    """The turn that was added last, which most requests continue."""

    turn: Turn
    said: tuple[Message, ...]
    """The whole conversation, with this turn."""

    def is_continued(self, root: str, messages: Sequence[Message]) -> bool:
        """Whether these messages continue this turn and none that is deeper.

        Only what comes back word for word is told so quickly. A deeper turn would be a message of
        the assistant after this one.
        """
        length = len(self.said)
        return (
            self.turn.call.root == root
            and tuple(messages[:length]) == self.said
            and all(message.role != "assistant" for message in messages[length:])
        )


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
        self._newest: _Newest | None = None
        self._index = _Index()
        for call in calls:
            self.add(call)

    def add(
        self,
        call: Call,
        messages: Sequence[Message] | None = None,
        answers: Sequence[Message] | None = None,
    ) -> None:
        """Make the call's turns something to continue from.

        `messages` are the call's own and `answers` what it sampled, where they need not be read
        from it.
        """
        self.calls[call.id] = call
        if (deleted := call.origin.shown.get(DELETED)) is not None:
            self.hidden.add(CallId(str(deleted)))
        self.size += len(call.context)
        context = tuple(map(Message.from_json, call.messages) if messages is None else messages)
        if answers is None:
            answers = [Message.from_json(generation.message) for generation in call.generations]
        for index, generation in enumerate(call.generations):
            self.size += len(generation.tokens)
            message = answers[index]
            turn = Turn(call.generation_id(index), call, context, message, generation)
            self._turns[turn.id] = turn
            self._after.setdefault(call.parent, []).append(turn)
            self._index.add(turn)
            self._newest = _Newest(turn, (*self._said_before(turn), *context, message))

    def find(self, root: str, messages: Sequence[Message]) -> Found:
        """The deepest turn that `messages` continue, under the same root."""
        if (newest := self._newest) is not None and newest.is_continued(root, messages):
            return Found(newest.turn, messages[len(newest.said) :])
        best = Found(None, messages)
        # Newest first: of two turns that read the same, the later is the one being continued.
        open_ends = [(turn, messages, False) for turn in self._index.begin(None, messages)]
        while open_ends:
            turn, rest, lossy = open_ends.pop()
            end = len(turn.context)
            if turn.call.root != root or len(rest) <= end or not turn.message.same_as(rest[end]):
                continue
            lossy = lossy or turn.message.lost_in(rest[end])
            after = rest[end + 1 :]
            if best.turn is None or len(after) < len(best.rest):
                best = Found(turn, after, lossy)
            open_ends += [(t, after, lossy) for t in self._index.begin(turn.id, after)]
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
        parent = found.turn.id if found.turn else None
        alike = self._index.begin(parent, found.rest)
        if any(
            len(turn.context) == len(found.rest) and (parent or turn.call.root == root)
            for turn in alike
        ):
            return Fork.RESAMPLED
        if parent is not None:
            edited = any(message.role == "assistant" for message in found.rest)
            branched = parent in self._after
            return Fork.EDITED_HISTORY if edited else Fork.BRANCH if branched else None
        if any(turn.call.root != root for turn in alike):
            return Fork.OTHER_TOOLS
        begun = self._index.has_begun(root, found.rest)
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
        ids: list[int] = []
        for each in self.path(turn):  # whole tuples at a time: there may be very many
            ids += each.call.context
            ids += each.generation.tokens
        return ids

    def messages(self, call: CallId, choice: int = 0) -> list[Message]:
        """The whole conversation through a choice of a call; empty if the call is not known."""
        if call not in self.calls:
            return []
        turn = self._turns[self.calls[call].generation_id(choice)]
        return self._said(turn)

    def _said(self, turn: Turn) -> list[Message]:
        return [m for t in self.path(turn) for m in (*t.context, t.message)]

    def _said_before(self, turn: Turn) -> Sequence[Message]:
        """The conversation that a turn's own messages follow."""
        parent, newest = turn.call.parent, self._newest
        if parent is None:
            return ()
        if newest is not None and newest.turn.id == parent:
            return newest.said
        return self._said(self._turns[parent])


class _Index:
    """Turns by the messages their calls brought, so that siblings need not be walked.

    Messages that are the same have the same key; those that share a key are compared.
    """

    def __init__(self) -> None:
        self._turns: dict[tuple[GenerationId | None, int, int], list[tuple[int, Turn]]] = {}
        self._lengths: dict[GenerationId | None, set[int]] = {}
        self._begun: set[tuple[str, Hashable]] = set()
        self._added = 0

    def add(self, turn: Turn) -> None:
        if not turn.context:
            return  # of a raw prompt: found by its text or ids
        parent, length = turn.call.parent, len(turn.context)
        digest = 0
        for message in turn.context:
            digest = hash((digest, _key(message)))
        self._turns.setdefault((parent, length, digest), []).append((self._added, turn))
        self._lengths.setdefault(parent, set()).add(length)
        if parent is None:
            self._begun.add((turn.call.root, _opening(turn.context)))
        self._added += 1

    def begin(self, parent: GenerationId | None, messages: Sequence[Message]) -> list[Turn]:
        """The turns after `parent` whose calls brought what these begin with, oldest first."""
        lengths = self._lengths.get(parent)
        if not lengths:
            return []
        found: list[tuple[int, Turn]] = []
        digest = 0
        for length, message in enumerate(messages[: max(lengths)], 1):
            digest = hash((digest, _key(message)))
            if length in lengths:
                alike = self._turns.get((parent, length, digest), [])
                found += [e for e in alike if all_same(e[1].context, messages[:length])]
        return [turn for _, turn in sorted(found, key=lambda entry: entry[0])]

    def has_begun(self, root: str, messages: Sequence[Message]) -> bool:
        """Whether a conversation under this root began as these messages do."""
        return (root, _opening(messages)) in self._begun


def _key(message: Message) -> Hashable:
    if message.role == "assistant":  # its text may be dropped on the way back, its calls are not
        return tuple(call.id for call in message.tool_calls)
    return (message.role, message.content, message.tool_call_id)


def _opening(messages: Sequence[Message]) -> Hashable:
    """What a conversation begins with, beside the system prompt, which several may share."""
    return next((_key(message) for message in messages if message.role != "system"), None)
