"""What happens to a model request of any wire format: find, render, sample, record."""

import hashlib
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import cached_property

from anyio import Event, Lock, create_task_group
from pydantic import JsonValue

from whet.gateway.constraint import Constraint
from whet.gateway.graph import Graph, Turn
from whet.gateway.messages import Message
from whet.gateway.render import Renderer
from whet.gateway.speech import Speech, learn_speech
from whet.gateway.text import read_message
from whet.protocols import AttemptLog, Engine
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    CallId,
    Fork,
    Generation,
    GenerationId,
    Origin,
    Piece,
    Sampling,
    SamplingOverride,
    digest_tokens,
)

GRAPHS_KEPT = 4096
"""Conversations held in memory; the others are read back from the store when continued."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A model request in canonical form: messages, or raw ids."""

    messages: tuple[Message, ...] = ()
    ids: tuple[int, ...] = ()
    """The prompt itself, for formats that render nothing."""
    tools: tuple[JsonValue, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    stream: bool = False
    calls_tools: bool = False
    """Whether tool calls in the text are looked for."""
    constraint: Constraint | None = None
    """What the answer must be, if it is not free."""
    shown: dict[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """What the wire format needs to show the call again."""


@dataclass(frozen=True, slots=True)
class Source:
    """Who asks."""

    attempt: Attempt | None
    """None for a call that names no attempt: served, never recorded."""
    dialect: str
    model: str
    agent: str
    request: str
    """Digest of the request."""
    is_retry: bool
    """The client says it has sent this request before."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine will be given, and where it hangs in the attempt's graph."""

    call: CallId
    attempt: AttemptId | None
    ask: Ask
    sampling: Sampling
    tokens: tuple[int, ...]
    root: str
    parent: GenerationId | None
    messages: tuple[Message, ...]
    """After the parent's."""
    context: tuple[int, ...]
    """After the parent's."""
    origin: Origin
    created: float
    recorded: Call | None = None
    """The call that answered this very request before, if this is a retry of it."""


@dataclass(slots=True)
class _Sampled:
    """A generation as it grows."""

    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    last: Piece | None = None

    def add(self, piece: Piece) -> None:
        self.tokens += piece.tokens
        self.logprobs += piece.logprobs
        self.versions += piece.versions
        self.last = piece


class Service:
    """Serves the calls of attempts from one engine, and records each before it is answered."""

    def __init__(
        self,
        *,
        engine: Engine,
        log: AttemptLog,
        renderer: Renderer,
        models: Sequence[str],
    ) -> None:
        self.renderer = renderer
        self.models = tuple(models)
        """The names agents may ask for."""
        self._engine = engine
        self._log = log
        self._graphs: OrderedDict[AttemptId, Graph] = OrderedDict()
        self._loading = Lock()
        self._under_way: dict[tuple[AttemptId, str], Event] = {}
        self._undelivered: set[tuple[AttemptId, str]] = set()

    async def graph(self, attempt: Attempt | None) -> Graph:
        """What is known of an attempt's conversations."""
        return Graph() if attempt is None else await self._graph(attempt.id)

    async def prompt(self, source: Source, ask: Ask, graph: Graph) -> Prompt:
        """Find what is known of the conversation and render the rest."""
        if (call := await self._answered(source, graph)) is not None:
            return self._again(call, ask, graph)
        root = self._root(source.model, ask.tools)
        turn, rest, fork, lossy = self._place(ask, root, graph)
        stored = graph.tokens(turn)
        context = self._context(turn, rest, ask, len(stored))
        forced = source.attempt.rollout.sampling if source.attempt else SamplingOverride()
        return Prompt(
            call=CallId(secrets.token_hex(12)),
            attempt=source.attempt.id if source.attempt else None,
            ask=ask,
            sampling=self._sampling(ask, forced, (*stored, *context)),
            tokens=(*stored, *context),
            root=root,
            parent=turn.id if turn else None,
            messages=tuple(rest),
            context=tuple(context),
            origin=Origin(
                dialect=source.dialect,
                model=source.model,
                agent=source.agent,
                request=source.request,
                fork=fork,
                lossy=lossy,
                shown=ask.shown,
            ),
            created=time.time(),
        )

    async def complete(
        self, prompt: Prompt, on_piece: Callable[[int, Piece], Awaitable[None]]
    ) -> Call:
        """Sample every choice, then record the call. Durable once this returns."""
        if prompt.recorded is not None:
            for index, generation in enumerate(prompt.recorded.generations):
                await on_piece(index, _whole_piece(generation))
            return prompt.recorded
        if prompt.attempt is None:
            return await self._sample(prompt, on_piece)
        key = (prompt.attempt, prompt.origin.request)
        self._under_way[key] = Event()
        try:
            call = await self._sample(prompt, on_piece)
            await self._log.append(call)
        finally:
            self._under_way.pop(key).set()
        (await self._graph(prompt.attempt)).add(call)
        self._undelivered.add(key)
        return call

    def delivered(self, prompt: Prompt) -> None:
        """The client has the whole reply: the same request again is a new one."""
        if prompt.attempt is not None:
            self._undelivered.discard((prompt.attempt, prompt.origin.request))

    # ------------------------------------------------------------- before sampling

    async def _answered(self, source: Source, graph: Graph) -> Call | None:
        """The call that a retry asks for again; waits for one that is still being sampled.

        Equal requests are not retries by themselves: an agent may want two samples. One is a
        retry if the client says so, or if the reply to the first never reached it.
        """
        if source.attempt is None:
            return None
        key = (source.attempt.id, source.request)
        while source.is_retry and key in self._under_way:
            await self._under_way[key].wait()
        if not source.is_retry and key not in self._undelivered:
            return None
        same = [c for c in graph.calls.values() if c.origin.request == source.request]
        return same[-1] if same else None

    def _again(self, call: Call, ask: Ask, graph: Graph) -> Prompt:
        parent = graph.turn(call.parent) if call.parent else None
        return Prompt(
            call=call.id,
            attempt=call.attempt,
            ask=ask,
            sampling=call.generations[0].sampling,
            tokens=(*graph.tokens(parent), *call.context),
            root=call.root,
            parent=call.parent,
            messages=tuple(Message.from_json(m) for m in call.messages),
            context=call.context,
            origin=call.origin,
            created=call.created,
            recorded=call,
        )

    def _place(
        self, ask: Ask, root: str, graph: Graph
    ) -> tuple[Turn | None, Sequence[Message], Fork | None, bool]:
        """The turn to continue, the messages after it, and why it is not the obvious one."""
        if ask.ids:
            return graph.find_tokens(ask.ids), (), None, False
        found = graph.find(root, ask.messages)
        fork = graph.fork(found, root)
        refused = self.renderer.refuses(graph.path(found.turn), found.rest) if found.turn else None
        if refused:
            return None, ask.messages, refused, False
        return found.turn, found.rest, fork, found.lossy

    def _context(
        self, turn: Turn | None, rest: Sequence[Message], ask: Ask, stored: int
    ) -> Sequence[int]:
        if ask.ids:
            return ask.ids[stored:]
        if turn is None:
            return self.renderer.whole(rest, ask.tools)
        closed = turn.generation.tokens[-1] in self.renderer.stop_ids
        return self.renderer.tail(rest, ask.tools, closed=closed)

    @cached_property
    def _speech(self) -> Speech:
        return learn_speech(self.renderer)

    def _sampling(self, ask: Ask, forced: SamplingOverride, prompt: Sequence[int]) -> Sampling:
        update = forced.model_dump(exclude_none=True)
        update["stop_ids"] = tuple(dict.fromkeys((*ask.sampling.stop_ids, *self.renderer.stop_ids)))
        if ask.constraint is not None:
            opened = self.renderer.opens(prompt)
            update["grammar"] = ask.constraint.grammar(self._speech, opened=opened)
        return ask.sampling.model_copy(update=update)

    def _root(self, model: str, tools: Sequence[JsonValue]) -> str:
        key = json.dumps([model, list(tools)], sort_keys=True)
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    async def _graph(self, attempt: AttemptId) -> Graph:
        if attempt not in self._graphs:
            async with self._loading:
                if attempt not in self._graphs:
                    self._graphs[attempt] = Graph(await self._log.calls(attempt))
        self._graphs.move_to_end(attempt)
        graph = self._graphs[attempt]
        while len(self._graphs) > GRAPHS_KEPT:
            forgotten, _ = self._graphs.popitem(last=False)
            self._undelivered = {key for key in self._undelivered if key[0] != forgotten}
        return graph

    # ------------------------------------------------------------- sampling

    async def _sample(
        self, prompt: Prompt, on_piece: Callable[[int, Piece], Awaitable[None]]
    ) -> Call:
        choices = [_Sampled() for _ in range(prompt.ask.n)]

        async def sample(index: int) -> None:
            pieces = self._engine.generate(prompt.tokens, prompt.sampling, stream=prompt.ask.stream)
            async with aclosing(pieces):
                async for piece in pieces:
                    choices[index].add(piece)
                    await on_piece(index, piece)

        if len(choices) == 1:
            await sample(0)
        else:
            try:
                async with create_task_group() as tasks:
                    for index in range(len(choices)):
                        tasks.start_soon(sample, index)
            except ExceptionGroup as group:
                raise group.exceptions[0] from group
        return self._call(prompt, choices)

    def _call(self, prompt: Prompt, choices: Sequence[_Sampled]) -> Call:
        return Call(
            id=prompt.call,
            attempt=prompt.attempt or AttemptId(""),
            parent=prompt.parent,
            root=prompt.root,
            messages=tuple(m.to_json() for m in prompt.messages),
            context=prompt.context,
            prompt_length=len(prompt.tokens),
            prompt_digest=digest_tokens(prompt.tokens).hexdigest(),
            generations=tuple(self._generation(prompt, choice) for choice in choices),
            created=prompt.created,
            origin=prompt.origin,
        )

    def _generation(self, prompt: Prompt, choice: _Sampled) -> Generation:
        assert choice.last is not None
        assert choice.last.stop is not None
        message = read_message(
            self.renderer, choice.tokens, prompt.sampling, tools=prompt.ask.calls_tools
        )
        return Generation(
            tokens=tuple(choice.tokens),
            logprobs=tuple(choice.logprobs),
            versions=tuple(choice.versions),
            stop=choice.last.stop,
            sampling=prompt.sampling,
            message=message.to_json(),
        )


def _whole_piece(generation: Generation) -> Piece:
    return Piece(generation.tokens, generation.logprobs, generation.versions, stop=generation.stop)
