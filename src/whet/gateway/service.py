"""What happens to a model request of any wire format: find, render, sample, record."""

import hashlib
import json
import secrets
import time
from asyncio import TaskGroup
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from functools import cached_property, lru_cache
from itertools import count
from typing import NamedTuple, Protocol

from anyio import to_thread
from pydantic import JsonValue

from whet.errors import EngineError, LeaseLost, PromptTooLong
from whet.gateway.calls import Ask, Completed, Prompt, Source
from whet.gateway.conversations import Conversations
from whet.gateway.graph import DELETED, TEXT, Graph, Turn
from whet.gateway.memory import PromptMemory
from whet.gateway.messages import Message
from whet.gateway.pieces import OnPiece, SampledSoFar, tell_nobody
from whet.gateway.render import Renderer
from whet.gateway.retries import Retries
from whet.gateway.speech import Speech, learn_speech
from whet.gateway.text import read_message
from whet.protocols import AttemptLog, Engine, SpanLog
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    CallId,
    Fork,
    Generation,
    Origin,
    Piece,
    Sampling,
    SamplingOverride,
    digest_tokens,
)

LONGEST_TOKEN = 256
"""Characters; no common vocabulary has a longer one, so a text may be refused before it is encoded
when even such tokens would not bring it into the context."""

NO_WATCH = nullcontext()

LARGE_REQUEST = 256 * 2**10
"""Bytes from which on a request is rendered beside the event loop, to hold up nobody else's."""


class _Place(NamedTuple):
    """Where a request hangs in the graph, and what of it is new."""

    turn: Turn | None
    messages: Sequence[Message] = ()
    raw: str | Sequence[int] = ()
    fork: Fork | None = None
    lossy: bool = False


class Log(AttemptLog, SpanLog, Protocol):
    """Where attempts are kept, and what they tell."""


class Service:
    """Serves the calls of attempts from one engine, and records each before it is answered."""

    def __init__(
        self,
        *,
        engine: Engine,
        log: Log,
        renderer: Renderer,
        models: Sequence[str],
        context_length: int | None = None,
        prepare: Callable[[Attempt], Awaitable[None]] | None = None,
    ) -> None:
        """`prepare` returns once the engine has the weights an attempt is to be served with."""
        self.renderer = renderer
        self.context_length = context_length
        """Most tokens of a prompt and its answer, if it is known."""
        self.log = log
        """Where calls are recorded, and whatever else agents tell."""
        self.models = tuple(models)
        """The names agents may ask for."""
        self._engine = engine
        self._prepare = prepare
        self._retries = Retries()
        self._conversations = Conversations(log, self._retries.forget)
        self._rendered = PromptMemory()
        self._instance = secrets.token_hex(8)
        self._numbers = count(1)

    async def find(self, attempt: AttemptId | None) -> tuple[Attempt | None, Graph]:
        """An attempt that is running, or was a moment ago, and what is known of its conversations.

        Raises as `AttemptLog.attempt` does.
        """
        return (None, Graph()) if attempt is None else await self._conversations.find(attempt)

    async def prompt(self, source: Source, ask: Ask, graph: Graph) -> Prompt:
        """Find what is known of the conversation and render the rest."""
        if (call := await self._answered(source)) is not None:
            return self._again(call, ask, await self._conversations.graph(call.attempt))
        if self._prepare is not None and source.attempt is not None:
            await self._prepare(source.attempt)
        self._check_length(ask)
        root = _root(source.model, _tools_of(ask))
        place = self._place(ask, root, graph)
        stored = graph.tokens(place.turn)
        context = await self._context(place, ask, root, large=source.size > LARGE_REQUEST)
        forced = source.attempt.rollout.sampling if source.attempt else SamplingOverride()
        tokens = (*stored, *context)
        return Prompt(
            call=self._new_id(),
            attempt=source.attempt.id if source.attempt else None,
            ask=ask,
            sampling=self._sampling(ask, forced, tokens),
            tokens=tokens,
            root=root,
            parent=place.turn.id if place.turn else None,
            messages=tuple(place.messages),
            context=context,
            origin=Origin.unchecked(
                dialect=source.dialect,
                model=source.model,
                agent=source.agent,
                tools=tuple(map(_tool_name, ask.tools)),
                request=source.request,
                fork=graph.fork_raw(place.turn, context) if ask.raw is not None else place.fork,
                lossy=place.lossy,
                shown={**ask.shown, **({TEXT: place.raw} if isinstance(place.raw, str) else {})},
            ),
            created=time.time(),
        )

    async def complete(
        self,
        prompt: Prompt,
        on_piece: OnPiece = tell_nobody,
        watch: AbstractContextManager[object] = NO_WATCH,
    ) -> Completed:
        """Sample every choice, then record the call. Durable once this returns.

        `watch` is entered around the sampling, which it may end: what was sampled whole is
        recorded even if the client leaves then, for it may ask again.
        """
        if prompt.recorded is not None:
            again = [_sampled(generation) for generation in prompt.recorded.generations]
            for index, sampled in enumerate(again):
                if (wait := on_piece(index, sampled)) is not None:
                    await wait
            return _completed(prompt.recorded, again)
        if prompt.attempt is None:
            with watch:
                return await self._sample(prompt, on_piece)
        with self._retries.answering((prompt.attempt, prompt.origin.request)):
            with watch:
                done = await self._sample(prompt, on_piece)
            try:
                await self.log.append(done.call)
            except LeaseLost:
                self._conversations.ended(prompt.attempt)
                raise
            await self._conversations.add(done.call, prompt.messages, done.messages)
        return done

    async def delete(self, call: Call) -> None:
        """Show a call to nobody any more, nor after a restart. What it sampled stays recorded.

        Raises:
            LeaseLost: its attempt has ended.
        """
        deletion = Call(
            id=self._new_id(),
            attempt=call.attempt,
            parent=None,
            root=call.root,
            messages=(),
            context=(),
            prompt_length=0,
            prompt_digest=digest_tokens(()).hexdigest(),
            generations=(),
            created=time.time(),
            origin=Origin(dialect="delete", model=call.origin.model, shown={DELETED: call.id}),
        )
        await self.log.append(deletion)
        await self._conversations.add(deletion)

    def lost(self, prompt: Prompt) -> None:
        """The client did not get the whole reply: an equal request is answered with it, once."""
        if prompt.attempt is None:
            return
        graph = self._conversations.held(prompt.attempt)
        if graph is not None and prompt.call in graph.calls:
            self._retries.lose((prompt.attempt, prompt.origin.request), prompt.call)

    # ------------------------------------------------------------- before sampling

    async def _answered(self, source: Source) -> Call | None:
        """The call that a retry asks for again; waits for one that is still being sampled."""
        if source.attempt is None:
            return None
        key = (source.attempt.id, source.request)
        while True:
            if (lost := self._retries.take_lost(key)) is not None:
                return (await self._conversations.graph(source.attempt.id)).calls[lost]
            if self._retries.take_unanswered(key) or not source.is_retry:
                return None
            if (running := self._retries.running(key)) is None:
                break
            await running.wait()
        graph = await self._conversations.graph(source.attempt.id)
        same = [call for call in graph.calls.values() if call.origin.request == source.request]
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

    def _check_length(self, ask: Ask) -> None:
        if self.context_length is None:
            return
        said = [ask.raw] if isinstance(ask.raw, str) else [m.content for m in ask.messages]
        length = sum(map(len, said))
        if length > self.context_length * LONGEST_TOKEN:
            raise PromptTooLong(
                f"the prompt has {length} characters, which cannot fit into "
                f"{self.context_length} tokens"
            )

    def _place(self, ask: Ask, root: str, graph: Graph) -> _Place:
        """The turn to continue, what comes after it, and why it is not the obvious one."""
        if isinstance(ask.raw, str):
            known = graph.find_text(root, ask.raw, self._sampled_text)
            return _Place(known.turn, raw=known.rest)
        if ask.raw is not None:
            turn = graph.find_tokens(ask.raw)
            return _Place(turn, raw=ask.raw[len(graph.tokens(turn)) :])
        found = graph.find(root, ask.messages)
        fork = graph.fork(found, root)
        refused = self.renderer.refuses(graph.path(found.turn), found.rest) if found.turn else None
        if refused:
            return _Place(None, ask.messages, fork=refused)
        return _Place(found.turn, found.rest, fork=fork, lossy=found.lossy)

    async def _context(self, place: _Place, ask: Ask, root: str, *, large: bool) -> tuple[int, ...]:
        """The ids after the turn that is continued."""
        key = (root, tuple(place.messages))
        from_beginning = place.turn is None and ask.raw is None
        if from_beginning and (known := self._rendered.get(key)) is not None:
            return known
        if large:
            context = tuple(await to_thread.run_sync(self._render, place, ask))
        else:
            context = tuple(self._render(place, ask))
        if from_beginning and not self.renderer.template.tells_time:
            self._rendered.put(key, context)
        return context

    def _render(self, place: _Place, ask: Ask) -> Sequence[int]:
        if isinstance(place.raw, str):
            return self.renderer.template.encode(place.raw)
        if ask.raw is not None:
            return place.raw
        if place.turn is None:
            return self.renderer.whole(place.messages, ask.tools)
        turn = place.turn
        closed = turn.generation.tokens[-1] in self.renderer.stop_ids
        return self.renderer.tail(place.messages, ask.tools, closed=closed, turn=turn.message)

    def _sampled_text(self, turn: Turn) -> str:
        """All that a turn sampled, as a client would write it behind the prompt."""
        template, ids = self.renderer.template, turn.generation.tokens
        if ids[-1] in self.renderer.stop_ids:
            return template.decode(ids[:-1]) + template.token_text(ids[-1])
        return template.decode(ids)

    def _new_id(self) -> CallId:
        return CallId(f"{self._instance}{next(self._numbers):08x}")

    @cached_property
    def _speech(self) -> Speech:
        return learn_speech(self.renderer)

    def _sampling(self, ask: Ask, forced: SamplingOverride, prompt: Sequence[int]) -> Sampling:
        # Sampling is frozen, which gives it a hash that is not in its type.
        asked = (ask.sampling, tuple(vars(forced).items()), self.renderer.stop_ids)
        sampling = _merged(*asked)  # pyright: ignore[reportArgumentType]
        if ask.constraint is None:
            return sampling
        grammar = ask.constraint.grammar(self._speech, opened=self.renderer.opens(prompt))
        return sampling.model_copy(update={"grammar": grammar})

    # ------------------------------------------------------------- sampling

    async def _sample(self, prompt: Prompt, on_piece: OnPiece) -> Completed:
        choices = [SampledSoFar() for _ in range(prompt.ask.n)]
        if len(choices) == 1:
            await self._sample_choice(prompt, 0, choices[0], on_piece)
        else:
            try:
                async with TaskGroup() as tasks:
                    for index, sampled in enumerate(choices):
                        tasks.create_task(self._sample_choice(prompt, index, sampled, on_piece))
            except ExceptionGroup as group:
                raise group.exceptions[0] from group
        return _completed(self._call(prompt, choices), choices)

    async def _sample_choice(
        self, prompt: Prompt, index: int, sampled: SampledSoFar, on_piece: OnPiece
    ) -> None:
        pieces = self._engine.generate(
            prompt.tokens, prompt.sampling, stream=prompt.ask.stream, affinity=prompt.attempt or ""
        )
        async with aclosing(pieces):
            async for piece in pieces:
                sampled.pieces.append(piece)
                if not sampled.expected and (wait := on_piece(index, sampled)) is not None:
                    await wait

    def _call(self, prompt: Prompt, choices: Sequence[SampledSoFar]) -> Call:
        """What the choices come to, which have their messages then."""
        return Call.unchecked(
            id=prompt.call,
            attempt=prompt.attempt or AttemptId(""),
            parent=prompt.parent,
            root=prompt.root,
            messages=tuple([m.to_json() for m in prompt.messages]),
            context=prompt.context,
            prompt_length=len(prompt.tokens),
            prompt_digest=digest_tokens(prompt.tokens).hexdigest(),
            generations=tuple([self._generation(prompt, choice) for choice in choices]),
            created=prompt.created,
            origin=prompt.origin,
        )

    def _generation(self, prompt: Prompt, sampled: SampledSoFar) -> Generation:
        choice = sampled.since(0)
        assert choice.stop is not None
        if not len(choice.tokens) == len(choice.logprobs) == len(choice.versions):
            raise EngineError(
                f"the engine gave {len(choice.tokens)} tokens, {len(choice.logprobs)} "
                f"log-probabilities and {len(choice.versions)} versions"
            )
        message = read_message(
            self.renderer,
            choice.tokens,
            prompt.sampling,
            tools=prompt.ask.calls_tools,
            schemas=prompt.ask.tools,
            prompt=prompt.tokens,
            as_text=prompt.ask.raw is not None,
        )
        if not prompt.ask.several_calls:
            message = message._replace(tool_calls=message.tool_calls[:1])
        sampled.message = message
        return Generation.unchecked(
            tokens=choice.tokens,
            logprobs=choice.logprobs,
            versions=choice.versions,
            stop=choice.stop,
            sampling=prompt.sampling,
            message=message.to_json(),
        )


@lru_cache(1024)
def _merged(
    asked: Sampling, forced: tuple[tuple[str, float | None], ...], stop_ids: tuple[int, ...]
) -> Sampling:
    """As asked, but for what the rollout forces; it ends where the template ends a turn."""
    update: dict[str, object] = {name: value for name, value in forced if value is not None}
    update["stop_ids"] = tuple(dict.fromkeys((*asked.stop_ids, *stop_ids)))
    return asked.model_copy(update=update)


@lru_cache(256)
def _root(model: str, tools: str) -> str:
    """What a conversation hangs on, as a digest; `tools` are JSON."""
    key = f"[{json.dumps(model)}, {tools}]"
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _tools_of(ask: Ask) -> str:
    if ask.raw is not None:
        return "null"
    return json.dumps(ask.tools, sort_keys=True) if ask.tools else "[]"


def _tool_name(tool: JsonValue) -> str:
    match tool:
        case {"function": {"name": str(name)}}:
            return name
        case _:
            return ""


def _sampled(generation: Generation) -> SampledSoFar:
    again = SampledSoFar()
    again.pieces.append(
        Piece(generation.tokens, generation.logprobs, generation.versions, stop=generation.stop)
    )
    again.message = Message.from_json(generation.message)
    return again


def _completed(call: Call, choices: Sequence[SampledSoFar]) -> Completed:
    messages = [choice.message for choice in choices if choice.message is not None]
    assert len(messages) == len(choices)
    return Completed(call, messages, [choice.since(0).top for choice in choices])
