"""Graph of an attempt's calls: finds the stored tokens that a new request continues.

A request's messages are walked down from the beginning: a call's own messages, then the turn it
sampled, then the calls that continued that turn. Where the walk ends, everything before is served
from the stored ids, byte for byte; only what follows is rendered. Sub-agents, edited histories,
parallel calls and several choices are branches, found by the same walk.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from pydantic import JsonValue

from whet.gateway.messages import Message, ToolCall, is_echo, join_extensions, restore_calls
from whet.types import Call, CallId, Fork, Generation, GenerationId

TEXT = "text"
"""Key of `Origin.shown` for the text of a raw prompt, after the parent's."""
DELETED = "deleted"
"""Key for the id of a call that its agent deleted; the deleting call itself sampled nothing."""


class Turn(NamedTuple):
    """A generation as a node of the graph, which requests continue."""

    id: GenerationId
    call: Call
    context: tuple[Message, ...]
    message: Message
    generation: Generation

    @property
    def is_open(self) -> bool:
        """Whether no token ended the turn, but a stop string or a limit: text may follow in it."""
        tokens = self.generation.tokens
        return not tokens or tokens[-1] not in self.generation.sampling.stop_ids


class Found(NamedTuple):
    """The stored prefix of a request."""

    turn: Turn | None
    """The deepest stored turn the request continues."""
    rest: Sequence[Message]
    """The messages after it."""
    lossy: bool = False
    """Whether a turn of the prefix was echoed without some of its text."""


class FoundText(NamedTuple):
    """The stored prefix of a raw text prompt."""

    turn: Turn | None
    rest: str
    """The text after it."""


class Graph:
    """The calls of one attempt, as a forest."""

    def __init__(self, calls: Sequence[Call] = ()) -> None:
        self.calls: dict[CallId, Call] = {}
        self.size = 0
        """Tokens in the graph."""
        self.hidden: set[CallId] = set()
        """Calls that their agent deleted: no longer shown, still recorded."""
        self.texts: dict[CallId, str] = {}
        """Prompts of calls that were not continued yet, as their template writes them."""
        self._sampled_calls: dict[str, ToolCall] = {}
        self._turns: dict[GenerationId, Turn] = {}
        self._after: dict[GenerationId | None, list[Turn]] = {}
        self._index = _Index()
        for call in calls:
            self.add(call)

    def add(
        self,
        call: Call,
        messages: Sequence[Message] | None = None,
        answers: Sequence[Message] | None = None,
        text: str | None = None,
    ) -> None:
        """Add a call, whose turns can be continued from now on.

        `messages` and `answers`, the call's own messages and those it sampled, are parsed from it
        unless passed. `text` is that of its prompt, if known.
        """
        self.calls[call.id] = call
        if text is not None:
            self.texts[call.id] = text
        if call.parent is not None:  # kept for the newest call only; rendered again for others
            self.texts.pop(self._turns[call.parent].call.id, None)
        if (deleted := call.origin.shown.get(DELETED)) is not None:
            self.hidden.add(CallId(str(deleted)))
        self.size += len(call.prompt_suffix)
        context = tuple(map(Message.from_json, call.messages) if messages is None else messages)
        if answers is None:
            answers = [Message.from_json(generation.message) for generation in call.generations]
        for index, generation in enumerate(call.generations):
            self.size += len(generation.tokens)
            message = answers[index]
            self._sampled_calls |= {sampled.id: sampled for sampled in message.tool_calls}
            turn = Turn(call.generation_id(index), call, context, message, generation)
            self._turns[turn.id] = turn
            self._after.setdefault(call.parent, []).append(turn)
            self._index.add(turn)

    def restore_calls(
        self, messages: Sequence[Message], tools: Sequence[JsonValue]
    ) -> tuple[Message, ...]:
        """Replace tool calls that mean the same as sampled ones by these."""
        return restore_calls(self._sampled_calls, messages, tools)

    def find(self, root: str, messages: Sequence[Message]) -> Found:
        """Find the deepest turn that `messages` continue, under the same root."""
        best, best_rank = Found(None, messages), (len(messages) + 1, 0, False)
        open_ends = [(turn, messages, 0, False) for turn in self._index.begin(None, messages)]
        while open_ends:
            turn, rest, misnamed, lossy = open_ends.pop()
            end = len(turn.context)
            if turn.call.root != root or len(rest) <= end:
                continue
            echo, after = rest[end], rest[end + 1 :]
            if not turn.message.same_as(echo):
                added = turn.message.find_added(echo) if turn.is_open else ""
                if not added:
                    continue
                echo = echo._replace(content=turn.message.content)
                after = [Message("assistant", added, extends=True), *after]
            lossy = lossy or turn.message.loses_text_in(echo)
            # 1 if the client names another recorded call as the origin of this turn.
            misnamed += echo.call != turn.call.id and echo.call in self.calls
            # Of turns that read the same: the one that the client names, or else the one that it
            # sends back unchanged, or else the newest, which comes first here.
            rank = (len(after), misnamed, lossy)
            if rank < best_rank:
                best, best_rank = Found(turn, after, lossy), rank
            open_ends += [(t, after, misnamed, lossy) for t in self._index.begin(turn.id, after)]
        return best

    def find_tokens(self, policy: str, ids: Sequence[int]) -> Turn | None:
        """Find the longest stored sequence of a policy that raw prompt ids continue."""
        best, length = None, 0
        open_ends = [(turn, 0) for turn in self._after.get(None, [])]
        while open_ends:
            turn, start = open_ends.pop()
            sampled = start + len(turn.call.prompt_suffix)
            end = sampled + len(turn.generation.tokens)
            if (
                turn.call.origin.policy != policy
                or tuple(ids[start:sampled]) != turn.call.prompt_suffix
                or tuple(ids[sampled:end]) != turn.generation.tokens
            ):
                continue
            if end > length:
                best, length = turn, end
            open_ends += [(t, end) for t in self._after.get(turn.id, [])]
        return best

    def find_text(self, root: str, text: str, sampled: Callable[[Turn], str]) -> FoundText:
        """Find the longest stored sequence whose text a raw prompt continues.

        `sampled` returns the whole text that a turn sampled.
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

    def classify_raw_fork(self, turn: Turn | None, suffix: Sequence[int]) -> Fork | None:
        """Return why a raw prompt does not continue the attempt's only conversation, or None."""
        peers = self._after.get(turn.id if turn else None, [])
        if any(peer.call.prompt_suffix == tuple(suffix) for peer in peers):
            return Fork.RESAMPLED
        if turn is not None:
            return Fork.BRANCH if peers else None
        return Fork.NEW_CONVERSATION if peers else None

    def classify_fork(self, found: Found, root: str) -> Fork | None:
        """Return why a request does not continue the attempt's only conversation, or None."""
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
            edited = any(m.role == "assistant" and not m.extends for m in found.rest)
            branched = parent in self._after
            return Fork.EDITED_HISTORY if edited else Fork.BRANCH if branched else None
        if any(turn.call.root != root for turn in alike):
            return Fork.OTHER_TOOLS
        # Another system prompt before the same task is another agent, unless turns come with it.
        goes_on = any(message.role == "assistant" for message in found.rest)
        edited = goes_on and self._index.has_begun(root, found.rest)
        return Fork.EDITED_HISTORY if edited else Fork.NEW_CONVERSATION

    def get_turn(self, id: GenerationId) -> Turn:
        """Return a turn by its id."""
        return self._turns[id]

    def collect_path(self, turn: Turn | None) -> list[Turn]:
        """Return the turns from the beginning of a conversation to this one."""
        path: list[Turn] = []
        while turn is not None:
            path.append(turn)
            turn = self._turns[turn.call.parent] if turn.call.parent else None
        return path[::-1]

    def collect_tokens(self, turn: Turn | None) -> list[int]:
        """Return the whole stored sequence up to the end of a turn."""
        ids: list[int] = []
        for each in self.collect_path(turn):  # whole tuples at a time: there may be very many
            ids += each.call.prompt_suffix
            ids += each.generation.tokens
        return ids

    def collect_messages(self, call: Call) -> list[Message]:
        """Return the conversation through the first choice of a stored call."""
        turn = self._turns[call.generation_id(0)]
        path = self.collect_path(turn)
        return join_extensions([m for t in path for m in (*t.context, t.message)])


class _Index:
    """Index of turns by the messages of their calls, so that siblings need not be compared.

    Equal messages have the same key; messages that share a key are compared.
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
            digest = hash((digest, _build_key(message)))
        self._turns.setdefault((parent, length, digest), []).append((self._added, turn))
        self._lengths.setdefault(parent, set()).add(length)
        if parent is None:
            self._begun.add((turn.call.root, _build_opening_key(turn.context)))
        self._added += 1

    def begin(self, parent: GenerationId | None, messages: Sequence[Message]) -> list[Turn]:
        """Return the turns after `parent` whose messages are a prefix of these, oldest first."""
        lengths = self._lengths.get(parent)
        if not lengths:
            return []
        found: list[tuple[int, Turn]] = []
        digest = 0
        for length, message in enumerate(messages[: max(lengths)], 1):
            digest = hash((digest, _build_key(message)))
            if length in lengths:
                alike = self._turns.get((parent, length, digest), [])
                found += [e for e in alike if is_echo(e[1].context, messages[:length])]
        return [turn for _, turn in sorted(found, key=lambda entry: entry[0])]

    def has_begun(self, root: str, messages: Sequence[Message]) -> bool:
        """Return whether a conversation under this root has the same first message."""
        return (root, _build_opening_key(messages)) in self._begun


def _build_key(message: Message) -> Hashable:
    if message.role == "assistant":  # SDKs may drop its text, never its calls
        return tuple(call.id for call in message.tool_calls)
    return (message.role, message.content, message.tool_call_id)


def _build_opening_key(messages: Sequence[Message]) -> Hashable:
    """Return the key of the first message after the system prompt, which several may share."""
    return next((_build_key(message) for message in messages if message.role != "system"), None)
