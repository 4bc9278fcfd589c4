"""What happens to a model request, in whatever wire format it came: find, render, sample, record."""

import hashlib
import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from anyio import Lock, create_task_group
from pydantic import JsonValue

from whet.gateway.graph import Graph
from whet.gateway.messages import Message
from whet.gateway.render import Renderer
from whet.gateway.text import read_message
from whet.protocols import AttemptLog, Engine
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    CallId,
    Generation,
    GenerationId,
    Piece,
    Sampling,
    SamplingOverride,
    digest_tokens,
)

GRAPHS_KEPT = 4096
"""Conversations held in memory; the others are read back from the store when continued."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A model request in canonical form."""

    messages: tuple[Message, ...]
    tools: tuple[JsonValue, ...]
    sampling: Sampling
    n: int
    stream: bool
    calls_tools: bool
    """Whether tool calls in the text are looked for."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the engine will be given, and where it hangs in the attempt's graph."""

    call: CallId
    attempt: AttemptId
    ask: Ask
    sampling: Sampling
    tokens: tuple[int, ...]
    root: str
    parent: GenerationId | None
    messages: tuple[Message, ...]
    """After the parent's."""
    context: tuple[int, ...]
    """After the parent's."""
    created: float


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
        self, *, engine: Engine, log: AttemptLog, renderer: Renderer, policy: str
    ) -> None:
        self.renderer = renderer
        self.policy = policy
        """The name agents ask for as `model`."""
        self._engine = engine
        self._log = log
        self._graphs: OrderedDict[AttemptId, Graph] = OrderedDict()
        self._loading = Lock()

    async def prompt(self, attempt: Attempt, ask: Ask) -> Prompt:
        """Find what is known of the conversation and render the rest."""
        graph = await self._graph(attempt.id)
        root = self._root(ask.tools)
        if self.renderer.incremental:
            found = graph.find(root, ask.messages)
            turn, rest = found.turn, tuple(found.rest)
        else:
            turn, rest = None, ask.messages
        if turn is None:
            context = self.renderer.whole(rest, ask.tools)
        else:
            closed = turn.generation.tokens[-1] in self.renderer.stop_ids
            context = self.renderer.tail(rest, ask.tools, closed=closed)
        return Prompt(
            call=CallId(secrets.token_hex(12)),
            attempt=attempt.id,
            ask=ask,
            sampling=self._sampling(ask.sampling, attempt.rollout.sampling),
            tokens=(*graph.tokens(turn), *context),
            root=root,
            parent=turn.id if turn else None,
            messages=rest,
            context=tuple(context),
            created=time.time(),
        )

    async def complete(
        self, prompt: Prompt, on_piece: Callable[[int, Piece], Awaitable[None]]
    ) -> Call:
        """Sample every choice, then record the call. Durable once this returns."""
        choices = [_Sampled() for _ in range(prompt.ask.n)]

        async def sample(index: int) -> None:
            pieces = self._engine.generate(
                prompt.tokens, prompt.sampling, stream=prompt.ask.stream
            )
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
        call = self._call(prompt, choices)
        await self._log.append(call)
        (await self._graph(prompt.attempt)).add(call)
        return call

    def _call(self, prompt: Prompt, choices: Sequence[_Sampled]) -> Call:
        return Call(
            id=prompt.call,
            attempt=prompt.attempt,
            parent=prompt.parent,
            root=prompt.root,
            messages=tuple(m.to_json() for m in prompt.messages),
            context=prompt.context,
            prompt_length=len(prompt.tokens),
            prompt_digest=digest_tokens(prompt.tokens).hexdigest(),
            generations=tuple(self._generation(prompt, choice) for choice in choices),
            created=prompt.created,
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

    def _sampling(self, asked: Sampling, forced: SamplingOverride) -> Sampling:
        update = forced.model_dump(exclude_none=True)
        stop_ids = tuple(dict.fromkeys((*asked.stop_ids, *self.renderer.stop_ids)))
        return asked.model_copy(update={**update, "stop_ids": stop_ids})

    def _root(self, tools: Sequence[JsonValue]) -> str:
        key = json.dumps([self.policy, list(tools)], sort_keys=True)
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()

    async def _graph(self, attempt: AttemptId) -> Graph:
        if attempt not in self._graphs:
            async with self._loading:
                if attempt not in self._graphs:
                    self._graphs[attempt] = Graph(await self._log.calls(attempt))
        self._graphs.move_to_end(attempt)
        graph = self._graphs[attempt]
        while len(self._graphs) > GRAPHS_KEPT:
            self._graphs.popitem(last=False)
        return graph
