"""The steps of a model call in any wire format: find, render, sample, record."""

import hashlib
import json
import secrets
import time
from asyncio import TaskGroup
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from functools import cached_property
from itertools import count
from typing import NamedTuple, Protocol

from anyio import to_thread
from pydantic import JsonValue

from whet.errors import EngineError, LeaseLost, PromptTooLong
from whet.gateway.graph import DELETED, TEXT, Graph, Turn
from whet.gateway.messages import OMITTED_IMAGE, Message, find_omissions
from whet.gateway.requests import CompletedCall, ModelRequest, PreparedCall, RequestSource
from whet.gateway.sessions import PromptCache, RetryTracker, Sessions
from whet.gateway.templates.detokenize import decode_message
from whet.gateway.templates.output_format import OutputFormat, detect_output_format
from whet.gateway.templates.renderer import RenderedPrompt, Renderer
from whet.gateway.templates.suffix import Mismatch
from whet.io.threads import unwrap_group
from whet.protocols import CallLog, Engine, RewardLog, SpanLog
from whet.types import (
    Attempt,
    AttemptId,
    Call,
    CallId,
    Fork,
    Generation,
    Mode,
    Omission,
    Origin,
    Sampling,
    SamplingOverride,
    TokenChunk,
    digest_tokens,
    join_chunks,
)

MAX_TOKEN_CHARS = 256
"""Longest token of any common vocabulary: a text that could not fit even in such tokens is refused
before it is encoded."""

LARGE_REQUEST_BYTES = 256 * 2**10
"""Requests of this size are rendered in a thread, so that they do not block the event loop."""

ChunkCallback = Callable[[int, TokenChunk], Awaitable[None]]
"""Called with the index of a choice and the tokens it has sampled next."""


class _PrefixMatch(NamedTuple):
    """The stored turn that a request continues, and what of the request is new."""

    turn: Turn | None
    messages: Sequence[Message] = ()
    fork: Fork | None = None
    lossy: bool = False
    text: str | None = None
    """Of a raw prompt that is text, what is new."""


class Log(CallLog, RewardLog, SpanLog, Protocol):
    """The store of attempts, with their calls, rewards and spans."""


class CallPipeline:
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
        policy: str = "",
        shares_with: "CallPipeline | None" = None,
    ) -> None:
        """`prepare` returns once the engine has loaded the weights for an attempt.

        Where a gateway serves several policies, calls are recorded with the name of the `policy`,
        and those of one attempt are in one graph: a pipeline has the graphs and the retries of the
        one that it `shares_with`.
        """
        self.renderer = renderer
        self.context_length = context_length
        """Most tokens of a prompt with its completion, if known."""
        self.log = log
        """Store of calls, rewards and spans."""
        self.models = tuple(models)
        """Model names that agents may request."""
        self._engine = engine
        self._prepare = prepare
        self._policy = policy
        self._retries = shares_with._retries if shares_with else RetryTracker()
        self._sessions = (
            shares_with._sessions if shares_with else Sessions(log, self._retries.evict)
        )
        self._prompts = PromptCache()
        self._instance = secrets.token_hex(8)
        self._numbers = count(1)

    # ------------------------------------------------------------- the steps of a call

    async def find(self, attempt: AttemptId | None) -> tuple[Attempt | None, Graph]:
        """Return a running attempt and the graph of its calls.

        Raises as `CallLog.attempt` does.
        """
        return (None, Graph()) if attempt is None else await self._sessions.find(attempt)

    async def render(
        self, source: RequestSource, request: ModelRequest, graph: Graph
    ) -> PreparedCall:
        """Find the prefix in the graph and render the rest; a retry gets its recorded call."""
        if (recorded := await self._find_recorded(source)) is not None:
            return _replay(recorded, request, await self._sessions.load_graph(recorded.attempt))
        if self._prepare is not None and source.attempt is not None:
            await self._prepare(source.attempt)
        self._check_length(request)
        root, created = _digest_root(source.model, request), time.time()
        match, prompt = await self._match_prefix(request, root, graph, created, size=source.size)
        suffix = tuple(prompt.ids)
        tokens = (*graph.collect_tokens(match.turn), *suffix)
        text: dict[str, JsonValue] = {} if match.text is None else {TEXT: match.text}
        return PreparedCall(
            id=self._create_id(),
            attempt=source.attempt.id if source.attempt else None,
            request=request,
            sampling=self._merge_sampling(request, source.attempt, tokens),
            tokens=tokens,
            root=root,
            parent=match.turn.id if match.turn else None,
            messages=tuple(match.messages),
            prompt_suffix=suffix,
            text=prompt.text,
            origin=Origin.unchecked(
                dialect=source.dialect,
                model=source.model,
                policy=self._policy,
                agent=source.agent,
                tools=tuple(map(_read_tool_name, request.tools)),
                request=source.digest,
                fork=match.fork,
                lossy=match.lossy or any(OMITTED_IMAGE in m.content for m in match.messages),
                omitted=find_omissions(self.renderer.omissions, match.messages, request.messages),
                shown={**request.shown, **text},
            ),
            created=created,
        )

    async def sample(
        self, call: PreparedCall, on_chunk: ChunkCallback | None = None
    ) -> list[TokenChunk]:
        """Sample every choice of a call; the choices of a recorded call are replayed."""
        if call.recorded is not None:
            choices = [_to_chunk(generation) for generation in call.recorded.generations]
            for index, chunk in enumerate(choices):
                if on_chunk is not None:
                    await on_chunk(index, chunk)
            return choices
        if call.request.n == 1:
            return [await self._sample_choice(call, 0, on_chunk)]
        with unwrap_group():
            async with TaskGroup() as tasks:
                sampling = [
                    tasks.create_task(self._sample_choice(call, index, on_chunk))
                    for index in range(call.request.n)
                ]
        return [task.result() for task in sampling]

    async def record(self, call: PreparedCall, choices: Sequence[TokenChunk]) -> CompletedCall:
        """Record a sampled call. Durable once this returns; an unattributed call is not recorded.

        Raises:
            LeaseLost: the attempt has ended.
            EngineError: the engine returned an inconsistent chunk.
        """
        tops = [choice.top for choice in choices]
        if call.recorded is not None:
            answers = [Message.from_json(g.message) for g in call.recorded.generations]
            return CompletedCall(call.recorded, answers, tops)
        answers = [self._decode_message(call, choice) for choice in choices]
        if not call.request.parallel_calls:
            call, answers = _hide_calls(call, answers)
        completed = CompletedCall(_build_call(call, choices, answers), answers, tops)
        if call.attempt is not None:
            try:
                await self.log.append(completed.call)
            except LeaseLost:
                self._sessions.expire(call.attempt)
                raise
            await self._sessions.add(completed.call, call.messages, answers, call.text)
        return completed

    def track_in_flight(self, call: PreparedCall) -> AbstractContextManager[None]:
        """Mark a call as being sampled and recorded: retries wait for it."""
        if call.attempt is None or call.recorded is not None:
            return nullcontext()
        return self._retries.track((call.attempt, call.origin.request))

    @contextmanager
    def track_delivery(self, call: PreparedCall) -> Generator[None]:
        """If the reply of a recorded call is not delivered, replay it for the next equal request.

        Enter it around all that follows the rendering.
        """
        try:
            yield
        except BaseException:
            graph = self._sessions.get(call.attempt) if call.attempt else None
            if call.attempt and graph is not None and call.id in graph.calls:
                self._retries.add_undelivered((call.attempt, call.origin.request), call.id)
            raise

    async def delete(self, call: Call) -> None:
        """Hide a stored response for good; its tokens stay recorded.

        Raises:
            LeaseLost: its attempt has ended.
        """
        deletion = Call(
            id=self._create_id(),
            attempt=call.attempt,
            parent=None,
            root=call.root,
            messages=(),
            prompt_suffix=(),
            prompt_length=0,
            prompt_digest=digest_tokens(()).hexdigest(),
            generations=(),
            created=time.time(),
            origin=Origin(dialect="delete", model=call.origin.model, shown={DELETED: call.id}),
        )
        await self.log.append(deletion)
        await self._sessions.add(deletion)

    # ------------------------------------------------------------- rendering

    async def _find_recorded(self, source: RequestSource) -> Call | None:
        """Return the recorded call of a retry; waits for one that is in flight."""
        if source.attempt is None:
            return None
        key = (source.attempt.id, source.digest)
        while True:
            if (undelivered := self._retries.pop_undelivered(key)) is not None:
                return (await self._sessions.load_graph(source.attempt.id)).calls[undelivered]
            if self._retries.pop_unanswered(key) or not source.is_retry:
                return None
            if (done := self._retries.find_in_flight(key)) is None:
                break
            await done.wait()
        graph = await self._sessions.load_graph(source.attempt.id)
        equal = [call for call in graph.calls.values() if call.origin.request == source.digest]
        return equal[-1] if equal else None

    def _check_length(self, request: ModelRequest) -> None:
        if self.context_length is None:
            return
        raw = request.raw
        texts = [raw] if isinstance(raw, str) else [m.content for m in request.messages]
        length = sum(map(len, texts))
        if length > self.context_length * MAX_TOKEN_CHARS:
            raise PromptTooLong(
                f"the prompt has {length} characters; this model's context holds "
                f"{self.context_length} tokens"
            )

    async def _match_prefix(
        self, request: ModelRequest, root: str, graph: Graph, now: float, *, size: int
    ) -> tuple[_PrefixMatch, RenderedPrompt]:
        """Find the turn that a request continues, and render what follows it."""
        if request.raw is not None:
            return self._match_raw(request.raw, root, graph)
        messages = graph.restore_calls(request.messages, request.tools)
        request = request._replace(messages=messages)
        found = graph.find(root, request.messages)
        match = _PrefixMatch(
            found.turn, found.rest, graph.classify_fork(found, root), lossy=found.lossy
        )
        key = (root, request.messages)
        if match.turn is None and (cached := self._prompts.get(key)) is not None:
            return match, cached
        if size > LARGE_REQUEST_BYTES:
            match, prompt = await to_thread.run_sync(self._render, match, request, graph, now)
        else:
            match, prompt = self._render(match, request, graph, now)
        if match.turn is None and not self.renderer.template.depends_on_time:
            self._prompts.put(key, prompt)
        return match, prompt

    def _match_raw(
        self, raw: str | Sequence[int], root: str, graph: Graph
    ) -> tuple[_PrefixMatch, RenderedPrompt]:
        """Find the turn that a raw prompt continues, and the ids after it."""
        rest: str | None = None
        if isinstance(raw, str):
            turn, rest = graph.find_text(root, raw, self._decode_sampled)
            ids: Sequence[int] = self.renderer.template.encode(rest)
        else:
            turn = graph.find_tokens(self._policy, raw)
            ids = raw[len(graph.collect_tokens(turn)) :]
        fork = graph.classify_raw_fork(turn, ids)
        return _PrefixMatch(turn, fork=fork, text=rest), RenderedPrompt("", ids)

    def _render(
        self, match: _PrefixMatch, request: ModelRequest, graph: Graph, now: float
    ) -> tuple[_PrefixMatch, RenderedPrompt]:
        """Render what follows a stored turn; a fork where the template does not continue it."""
        if match.turn is not None:
            path, text = graph.collect_path(match.turn), graph.texts.get(match.turn.call.id)
            suffix = self.renderer.render_suffix(path, match.messages, request.tools, text)
            if not isinstance(suffix, Mismatch):
                return match, suffix
            match = _PrefixMatch(None, request.messages, fork=suffix.fork)
        return match, self.renderer.render_full(request.messages, request.tools, now)

    def _decode_sampled(self, turn: Turn) -> str:
        """Return the text a turn sampled, as a client would append it to the prompt."""
        template, ids = self.renderer.template, turn.generation.tokens
        if turn.is_open:
            return template.decode(ids)
        return template.decode(ids[:-1]) + template.get_token_text(ids[-1])

    def _create_id(self) -> CallId:
        return CallId(f"{self._instance}{next(self._numbers):08x}")

    @cached_property
    def _output_format(self) -> OutputFormat:
        return detect_output_format(self.renderer)

    def _merge_sampling(
        self, request: ModelRequest, attempt: Attempt | None, prompt: Sequence[int]
    ) -> Sampling:
        """Apply the rollout's overrides, the template's stop tokens and the constraint."""
        forced = attempt.rollout.sampling if attempt else SamplingOverride()
        update: dict[str, object] = forced.model_dump(exclude_none=True)
        seed = request.sampling.seed
        if seed is not None and attempt is not None and attempt.rollout.mode is Mode.TRAIN:
            update["seed"] = _mix_seed(seed, attempt.id)
        stop_ids = (*request.sampling.stop_ids, *self.renderer.stop_ids)
        update["stop_ids"] = tuple(dict.fromkeys(stop_ids))
        if request.constraint is not None:
            update["grammar"] = request.constraint.to_grammar(
                self._output_format, in_thinking=self.renderer.ends_in_thinking(prompt)
            )
        return request.sampling.model_copy(update=update)

    # ------------------------------------------------------------- sampling and recording

    async def _sample_choice(
        self, call: PreparedCall, index: int, on_chunk: ChunkCallback | None
    ) -> TokenChunk:
        stream = self._engine.generate(
            call.tokens,
            _derive_choice_sampling(call, index),
            stream=call.request.stream,
            affinity=call.attempt or "",
        )
        chunks: list[TokenChunk] = []
        async with aclosing(stream):
            async for chunk in stream:
                chunks.append(chunk)
                if on_chunk is not None:
                    await on_chunk(index, chunk)
        return join_chunks(chunks)

    def _decode_message(self, call: PreparedCall, choice: TokenChunk) -> Message:
        return decode_message(
            self.renderer,
            choice.tokens,
            call.sampling,
            parse_calls=call.request.parse_calls,
            tools=call.request.tools,
            prompt=call.tokens,
            as_text=call.request.raw is not None,
        )


def _hide_calls(
    call: PreparedCall, answers: Sequence[Message]
) -> tuple[PreparedCall, list[Message]]:
    """Keep the first tool call of each answer; the call is marked if there were more."""
    first = [answer._replace(tool_calls=answer.tool_calls[:1]) for answer in answers]
    if first == list(answers):
        return call, first
    omitted = (*call.origin.omitted, Omission.HIDDEN_CALL)
    return call._replace(origin=call.origin.model_copy(update={"omitted": omitted})), first


def _mix_seed(seed: int, attempt: AttemptId) -> int:
    """Derive an attempt's seed, without which all rollouts of a group would be the same sample."""
    mixed = hashlib.sha256(f"{seed} {attempt}".encode()).digest()
    return int.from_bytes(mixed[:8], "big") >> 1  # 63 bits: some engines take signed integers


def _replay(call: Call, request: ModelRequest, graph: Graph) -> PreparedCall:
    parent = graph.get_turn(call.parent) if call.parent else None
    return PreparedCall(
        id=call.id,
        attempt=call.attempt,
        request=request,
        sampling=call.generations[0].sampling,
        tokens=(*graph.collect_tokens(parent), *call.prompt_suffix),
        root=call.root,
        parent=call.parent,
        messages=tuple(Message.from_json(m) for m in call.messages),
        prompt_suffix=call.prompt_suffix,
        origin=call.origin,
        created=call.created,
        recorded=call,
    )


def _build_call(
    call: PreparedCall, choices: Sequence[TokenChunk], answers: Sequence[Message]
) -> Call:
    pairs = enumerate(zip(choices, answers, strict=True))
    return Call.unchecked(
        id=call.id,
        attempt=call.attempt or AttemptId(""),
        parent=call.parent,
        root=call.root,
        messages=tuple([m.to_json() for m in call.messages]),
        prompt_suffix=call.prompt_suffix,
        prompt_length=len(call.tokens),
        prompt_digest=digest_tokens(call.tokens).hexdigest(),
        generations=tuple([_build_generation(call, index, *pair) for index, pair in pairs]),
        created=call.created,
        origin=call.origin,
    )


def _derive_choice_sampling(call: PreparedCall, index: int) -> Sampling:
    """Return the sampling parameters of a choice: each has a seed of its own."""
    if call.sampling.seed is None or index == 0:
        return call.sampling
    return call.sampling.model_copy(update={"seed": call.sampling.seed + index})


def _build_generation(
    call: PreparedCall, index: int, choice: TokenChunk, answer: Message
) -> Generation:
    assert choice.stop is not None
    if not len(choice.tokens) == len(choice.logprobs) == len(choice.versions):
        raise EngineError(
            f"the engine returned {len(choice.tokens)} tokens, {len(choice.logprobs)} "
            f"log-probabilities and {len(choice.versions)} versions"
        )
    return Generation.unchecked(
        tokens=choice.tokens,
        logprobs=choice.logprobs,
        versions=choice.versions,
        stop=choice.stop,
        sampling=_derive_choice_sampling(call, index),
        message=answer.to_json(),
    )


def _to_chunk(generation: Generation) -> TokenChunk:
    return TokenChunk(
        generation.tokens, generation.logprobs, generation.versions, stop=generation.stop
    )


def _digest_root(model: str, request: ModelRequest) -> str:
    """Return the key of conversations with the same model and tools, which may share turns."""
    if request.raw is not None:
        tools = "null"
    else:
        tools = json.dumps(request.tools, sort_keys=True) if request.tools else "[]"
    key = f"[{json.dumps(model)}, {tools}]"
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _read_tool_name(tool: JsonValue) -> str:
    match tool:
        case {"function": {"name": str(name)}}:
            return name
        case _:
            return ""
