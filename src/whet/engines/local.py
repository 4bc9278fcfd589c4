"""Samples from a Hugging Face model in this process, many requests in flight at once."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import cast

import anyio
import numpy as np
import torch
from anyio import to_thread

from whet.config import EngineConfig
from whet.engines.forward import Forward, build_forward
from whet.engines.grammar import Grammars, Matcher
from whet.engines.lanes import Lanes
from whet.engines.request import Drawn, Request, Top, room_after
from whet.engines.sampling import draw
from whet.engines.slots import NOTHING, longest_prefix
from whet.errors import EngineError, RequestError, boundary
from whet.policies.local import LocalPolicy
from whet.protocols import Engine
from whet.types import Piece, Sampling, join_pieces

logger = logging.getLogger(__name__)

WORTH_WAITING_FOR = 16
"""Shared tokens for which a request waits one pass, to copy what another is about to compute."""

SMALLEST_CAPACITY = 64
"""Of a slot. Larger ones are powers of two, so that growing is rare."""


@dataclass(slots=True, eq=False)
class _Request(Request):
    """A request of another thread."""

    deliver: Callable[[Piece | Exception], None] = field(kw_only=True)
    cancelled: bool = False

    def advance(
        self, drawn: Drawn, version: int, decode: Callable[[Sequence[int]], str]
    ) -> Piece | Exception | None:
        """Take tokens; returns what is to be delivered."""
        try:
            return self.take(drawn, version, decode)
        except RequestError as error:  # its own fault: the others go on
            return error


class _Arrivals:
    """What the engine's thread has for a request, until the task that asked takes it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._at_hand: deque[Piece | Exception] = deque()
        self._news = asyncio.Event()

    def put(self, piece: Piece | Exception) -> None:
        """From the engine's thread."""
        self._at_hand.append(piece)
        # Whoever has not taken the one before yet has been told, or is about to be.
        if len(self._at_hand) == 1:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                self._loop.call_soon_threadsafe(self._news.set)

    async def take(self) -> Piece:
        """All that there is, once there is something. Raises what was put in its stead."""
        while not self._at_hand:
            self._news.clear()
            await self._news.wait()
        pieces: list[Piece] = []
        while self._at_hand:
            if isinstance(piece := self._at_hand[0], Exception):
                if pieces:
                    break
                raise piece
            pieces.append(piece)
            self._at_hand.popleft()
        return join_pieces(pieces)


class LocalEngine(Engine):
    """One thread runs the model: prefill what is new, then one token for every active request.

    A request that was moved aside, or whose weights changed under it, is simply prefilled again
    with what it has sampled so far, so each token's log-probability is that of a plain forward
    pass of its own version.
    """

    def __init__(
        self,
        policy: LocalPolicy,
        config: EngineConfig,
        decode: Callable[[Sequence[int]], str],
        *,
        grammars: Grammars | None = None,
        threads: int | None = None,
        forward: Callable[[LocalPolicy, int], Forward] = build_forward,
    ) -> None:
        """`decode` turns ids into text, for stop strings alone.

        Without `grammars` a request that has a grammar is refused. `forward` makes what runs the
        model, for a policy and a number of positions to keep.
        """
        self._policy = policy
        self._budget = config.kv_tokens
        self.context_length = min(
            config.max_context or policy.context_length, policy.context_length, self._budget - 1
        )
        self._decode = decode
        self._grammars = grammars
        self._threads = threads
        self._forward = forward(policy, self._budget)
        self._cache = self._forward.cache
        self._lanes: Lanes[_Request] = Lanes()
        self._waiting: deque[_Request] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._random = Random()
        """Of requests without a seed. No seed of the run decides it: equal requests differ."""
        self._edition = policy.edition
        self._version = policy.version
        self._passes = 0
        self.prefilled = 0
        """Prompt tokens computed so far; what a prefix saved is not in it."""
        self._thread = threading.Thread(target=self._run, name="whet-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[Piece]:
        room = room_after(prompt, self.context_length, self._policy.vocabulary)
        matcher = await self._matcher(sampling)
        arrivals = _Arrivals()
        request = _Request(
            tokens=list(prompt),
            sampling=sampling,
            limit=min(sampling.max_tokens or room, room),
            stream=stream,
            deliver=arrivals.put,
            seed=self._random.getrandbits(64) if sampling.seed is None else sampling.seed % 2**64,
            matcher=matcher,
        )
        self._submit(request)
        try:
            while True:
                piece = await arrivals.take()
                yield piece
                if piece.stop:
                    return
        finally:
            request.cancelled = True

    @property
    def active(self) -> int:
        """How many requests are being sampled."""
        return len(self._lanes)

    async def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self._thread.join)

    async def _matcher(self, sampling: Sampling) -> Matcher | None:
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            raise RequestError("this engine cannot hold its samples to a grammar")
        # A large grammar takes its time to compile.
        return await to_thread.run_sync(self._grammars.matcher, sampling.grammar, sampling.stop_ids)

    def _submit(self, request: _Request) -> None:
        with self._wake:
            if self._closed:
                raise EngineError("the engine is closed")
            self._waiting.append(request)
            self._wake.notify()

    # ----------------------------------------------------------------- the engine's own thread

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._waiting or len(self._lanes) or self._closed)
                if self._closed:
                    break
            try:
                with boundary(EngineError, "sampling failed"):
                    self._pass()
            except EngineError as error:
                logger.error("sampling failed requests=%d error=%s", len(self._lanes), error)
                self._fail_all(error)
        self._fail_all(EngineError("the engine was closed"))

    @torch.inference_mode()
    def _pass(self) -> None:
        with self._policy.lock:
            if self._edition != self._policy.edition:
                self._edition = self._policy.edition
                for row in range(len(self._lanes)):
                    self._hand_over(row)
                self._cache.forget()
            self._version = self._policy.version
            self._passes += 1
            self._leave([request.cancelled for request in self._lanes.requests])
            self._admit()
            self._prefill()
            self._step()

    def _admit(self) -> None:
        """Give waiting requests a slot, starting from the longest prefix some slot holds."""
        later: list[_Request] = []
        try:
            self._admit_most(later)
        finally:  # whatever happens, none is lost
            with self._wake:
                self._waiting.extendleft(reversed(later))

    def _admit_most(self, later: list[_Request]) -> None:
        """Admit those that may be; the others, and one that fails, are in `later`."""
        with self._wake:
            longest = max((len(request.tokens) for request in self._waiting), default=0)
            fresh = np.full((len(self._waiting), longest), NOTHING, np.int32)
        admitted = 0
        placed: dict[bytes, tuple[int, int]] = {}
        waiting: set[bytes] = set()
        longest = self._lanes.longest
        while admitted < len(fresh) and (request := self._next_waiting()):
            later.append(request)
            tokens = np.asarray(request.tokens, np.int32)
            longest = max(longest, len(tokens))
            # One that is longer than all counted came after them.
            if len(tokens) > fresh.shape[1] or not self._fits(len(self._lanes) + 1, longest):
                break
            self._make_room(len(self._lanes) + 1, longest)
            # The rest of a group is known from the first of it, without another search.
            key = tokens.tobytes()
            if key in waiting:
                continue
            if equal := placed.get(key):
                (source, shared), coming = equal, len(tokens) - 1
            else:
                source, shared = self._cache.longest_prefix(tokens)
                coming = longest_prefix(fresh[:admitted], tokens)[1]
            if coming >= shared + WORTH_WAITING_FOR:
                waiting.add(key)
                continue
            shared = min(shared, len(tokens) - 1)
            self._place(request, source, shared)
            later.pop()
            placed.setdefault(key, (len(self._lanes) - 1, shared))
            fresh[admitted, : len(tokens)] = tokens
            admitted += 1

    def _next_waiting(self) -> _Request | None:
        with self._wake:
            while self._waiting:
                request = self._waiting.popleft()
                if not request.cancelled:
                    return request
        return None

    def _capacity(self, length: int) -> int:
        """How long a slot must be for a row of this length, and a spare column for padding."""
        return min(max(SMALLEST_CAPACITY, 1 << length.bit_length()), self._budget)

    def _fits(self, rows: int, length: int) -> bool:
        """Whether so many active rows, the longest of this length, stay within the budget."""
        return rows * self._capacity(length) <= self._budget

    def _make_room(self, rows: int, length: int) -> None:
        """Slots for so many active rows of this length; idle ones stay while the budget lasts."""
        cache = self._cache
        capacity = max(cache.capacity, self._capacity(length))
        if rows * capacity > self._budget:
            capacity = self._capacity(length)
        most = self._budget // capacity
        full = rows > len(self._lanes) and cache.length_S[len(self._lanes) :].all()
        wanted = min(most, max(rows, 8, 2 * cache.slots if full else cache.slots))
        if cache.positions:  # the memory is taken in any case
            wanted = most
        if (wanted, capacity) != (cache.slots, cache.capacity):
            cache.resize(wanted, capacity)

    def _place(self, request: _Request, source: int, shared: int) -> None:
        """Make a request active, in an idle slot that then holds what it shares with `source`."""
        cache = self._cache
        row = len(self._lanes)
        if source < row or shared < cache.length_S[source]:
            # Empty ones first, then the one used longest ago.
            target = row
            if cache.length_S[row]:
                target += int(np.lexsort((cache.used_S[row:], cache.length_S[row:] > 0))[0])
            cache.copy_prefix(source, target, shared)
            source = target
        cache.swap(row, source)
        self._lanes.add(request)
        cache.active = len(self._lanes)

    def _prefill(self) -> None:
        """Compute what rows lack, but for the last token of each: `_step` begins with those."""
        while rows := self._next_prefill():
            news: list[list[int]] = []
            for row in rows:
                start = int(self._cache.length_S[row])
                tokens = self._lanes.requests[row].tokens
                news.append(tokens[start:-1][: self._forward.prefill_tokens])
            self._forward.prefill(rows, news)
            self.prefilled += sum(map(len, news))

    def _next_prefill(self) -> list[int]:
        """Rows to prefill together: of like lengths, since padding is computed in vain."""
        lack_B = self._lanes.total_B - 1 - self._cache.length_S[: len(self._lanes)]
        rows: list[int] = []
        lacking = np.flatnonzero(lack_B > 0)
        for row in cast(list[int], lacking[np.argsort(lack_B[lacking], kind="stable")].tolist()):
            if rows and (len(rows) + 1) * int(lack_B[row]) > self._forward.prefill_tokens:
                break
            rows.append(row)
        return rows

    def _step(self) -> None:
        """One more token for every active row."""
        while not self._fits(len(self._lanes), self._lanes.longest):
            self._move_aside()
        lanes = self._lanes
        if not len(lanes):
            return
        self._make_room(len(lanes), lanes.longest)
        self._cache.used_S[: len(lanes)] = self._passes
        logits_BV = self._forward.step(lanes.last_B)
        watched = lanes.requests if lanes.any_watched else ()
        drawn = draw(
            logits_BV,
            lanes.shaping(self._policy.device),
            lanes.points(),
            matchers=[request.matcher for request in watched],
            tops=[request.sampling.top_logprobs for request in watched],
        )
        rows = lanes.record(drawn.token_B, drawn.logprob_B)
        due = [
            (row, lanes.requests[row], self._hand_over(row, drawn.tops[row] if drawn.tops else ()))
            for row in cast(list[int], rows.tolist())
        ]
        gone = {
            row for row, _, piece in due if isinstance(piece, Exception) or (piece and piece.stop)
        }
        # Rows are free before anyone hears of it.
        self._leave([row in gone for row in range(len(lanes))])
        for _, request, piece in due:
            if piece is not None:
                request.deliver(piece)

    def _hand_over(self, row: int, top: Top = ()) -> Piece | Exception | None:
        """Give a request the tokens kept back for it; returns what is to be delivered."""
        request, drawn = self._lanes.requests[row], self._lanes.hand_over(row)
        if request.sampling.top_logprobs and drawn.tokens:
            drawn = drawn._replace(tops=[top])
        return request.advance(drawn, self._version, self._decode)

    def _leave(self, gone: Sequence[bool]) -> None:
        """Make the slots of these rows idle; they keep what they hold."""
        if not any(gone):
            return
        order = list(range(len(gone)))
        stay = len(order)
        for row in reversed(range(len(gone))):
            if gone[row]:
                stay -= 1
                order[row], order[stay] = order[stay], order[row]
        self._cache.reorder(order)
        self._lanes.reorder(order[:stay])
        self._cache.active = stay

    def _move_aside(self) -> None:
        """The request that sampled least waits until there is room again; it loses nothing."""
        row = int(self._lanes.drawn_B.argmin())
        self._hand_over(row)
        with self._wake:
            self._waiting.appendleft(self._lanes.requests[row])
        self._leave([index == row for index in range(len(self._lanes))])

    @torch.inference_mode()
    def _fail_all(self, error: EngineError) -> None:
        with self._wake:
            failed = [*self._lanes.requests, *self._waiting]
            self._waiting.clear()
        self._lanes = Lanes()
        self._cache.active = 0
        self._cache.forget()
        for request in failed:
            request.deliver(error)
