"""Samples from a Hugging Face model in this process, many requests in flight at once."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

import anyio
import numpy as np
import torch
from anyio import to_thread
from numpy.typing import NDArray

from whet.config import EngineConfig
from whet.engines.grammar import Grammars, Matcher
from whet.engines.request import Drawn, Request
from whet.engines.sampling import draw
from whet.engines.slots import SlotCache, common_prefix
from whet.errors import EngineError, PromptTooLong, RequestError, boundary
from whet.policies.local import LocalPolicy
from whet.protocols import Engine
from whet.types import Piece, Sampling

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 4096
"""Most padded tokens in one prefill pass; bounds its memory."""

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
        """Take a token; returns what is to be delivered."""
        try:
            return self.take(drawn, version, decode)
        except RequestError as error:  # its own fault: the others go on
            return error


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
    ) -> None:
        """`decode` turns ids into text, for stop strings alone.

        Without `grammars` a request that has a grammar is refused.
        """
        self._policy = policy
        self._budget = config.kv_tokens
        self.context_length = min(
            config.max_context or policy.context_length, policy.context_length, self._budget - 1
        )
        self._decode = decode
        self._grammars = grammars
        self._threads = threads
        self._cache = SlotCache()
        self._active: list[_Request] = []
        self._waiting: deque[_Request] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._random = Random()
        """Of requests without a seed. No seed of the run decides it: equal requests differ."""
        self._edition = policy.edition
        self._passes = 0
        self.prefilled = 0
        """Prompt tokens computed so far; what a prefix saved is not in it."""
        self._thread = threading.Thread(target=self._run, name="whet-engine", daemon=True)
        self._thread.start()

    async def generate(
        self, prompt: Sequence[int], sampling: Sampling, *, stream: bool = False
    ) -> AsyncGenerator[Piece]:
        room = self.context_length - len(prompt)
        if room < 1 or not prompt:
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens; this model's context holds "
                f"1 to {self.context_length - 1} and room for an answer"
            )
        if min(prompt) < 0 or max(prompt) >= self._policy.vocabulary:
            raise RequestError(f"the prompt has ids outside 0 to {self._policy.vocabulary - 1}")
        matcher = await self._matcher(sampling)
        arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def deliver(piece: Piece | Exception) -> None:
            with suppress(RuntimeError):  # the loop is closed, and nobody waits any more
                loop.call_soon_threadsafe(arrived.put_nowait, piece)

        request = _Request(
            tokens=list(prompt),
            sampling=sampling,
            limit=min(sampling.max_tokens or room, room),
            stream=stream,
            deliver=deliver,
            random=self._random if sampling.seed is None else Random(sampling.seed),
            matcher=matcher,
        )
        self._submit(request)
        try:
            while True:
                piece = await arrived.get()
                if isinstance(piece, Exception):
                    raise piece
                yield piece
                if piece.stop:
                    return
        finally:
            request.cancelled = True

    @property
    def active(self) -> int:
        """How many requests are being sampled."""
        return len(self._active)

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
                self._wake.wait_for(lambda: self._waiting or self._active or self._closed)
                if self._closed:
                    break
            try:
                with boundary(EngineError, "sampling failed"):
                    self._pass()
            except EngineError as error:
                logger.error("sampling failed requests=%d error=%s", len(self._active), error)
                self._fail_all(error)
        self._fail_all(EngineError("the engine was closed"))

    @torch.inference_mode()
    def _pass(self) -> None:
        with self._policy.lock:
            if self._edition != self._policy.edition:
                self._edition = self._policy.edition
                self._cache.forget()
            self._passes += 1
            self._leave([request.cancelled for request in self._active])
            self._admit()
            self._prefill()
            self._step()

    def _admit(self) -> None:
        """Give waiting requests a slot, starting from the longest prefix some slot holds."""
        later: list[_Request] = []
        fresh: list[NDArray[np.int32]] = []
        longest = self._longest()
        while request := self._next_waiting():
            tokens = np.asarray(request.tokens, np.int32)
            longest = max(longest, len(tokens))
            if not self._fits(len(self._active) + 1, longest):
                later.append(request)
                break
            self._make_room(len(self._active) + 1, longest)
            source, shared = self._cache.longest_prefix(tokens)
            if any(common_prefix(f, tokens) >= shared + WORTH_WAITING_FOR for f in fresh):
                later.append(request)
                continue
            self._place(request, source, min(shared, len(tokens) - 1))
            fresh.append(tokens)
        with self._wake:
            self._waiting.extendleft(reversed(later))

    def _next_waiting(self) -> _Request | None:
        with self._wake:
            while self._waiting:
                request = self._waiting.popleft()
                if not request.cancelled:
                    return request
        return None

    def _longest(self) -> int:
        return max((len(request.tokens) for request in self._active), default=0)

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
        full = rows > len(self._active) and cache.length_S[len(self._active) :].all()
        wanted = min(most, max(rows, 8, 2 * cache.slots if full else cache.slots))
        if (wanted, capacity) != (cache.slots, cache.capacity):
            cache.resize(wanted, capacity)

    def _place(self, request: _Request, source: int, shared: int) -> None:
        """Make a request active, in an idle slot that then holds what it shares with `source`."""
        cache = self._cache
        row = len(self._active)
        if source < row or shared < cache.length_S[source]:
            # Empty ones first, then the one used longest ago.
            idle = range(row, cache.slots)
            target = min(idle, key=lambda slot: (cache.length_S[slot] > 0, cache.used_S[slot]))
            cache.copy_prefix(source, target, shared)
            source = target
        cache.swap(row, source)
        self._active.append(request)
        cache.active = len(self._active)

    def _prefill(self) -> None:
        """Compute what rows lack, but for the last token of each: `_step` begins with those."""
        while rows := self._next_prefill():
            news: list[list[int]] = []
            for row in rows:
                start = int(self._cache.length_S[row])
                news.append(self._active[row].tokens[start:-1][:PREFILL_TOKENS])
            self._forward(rows, news, keep=0)
            self.prefilled += sum(map(len, news))

    def _next_prefill(self) -> list[int]:
        """Rows to prefill together: of like lengths, since padding is computed in vain."""
        lacks = [
            (len(request.tokens) - 1 - int(held), row)
            for row, (request, held) in enumerate(
                zip(self._active, self._cache.length_S, strict=False)
            )
        ]
        rows: list[int] = []
        for lack, row in sorted(lacks):
            if rows and (len(rows) + 1) * lack > PREFILL_TOKENS:
                break
            if lack > 0:
                rows.append(row)
        return rows

    def _step(self) -> None:
        """One more token for every active row."""
        while not self._fits(len(self._active), self._longest()):
            self._move_aside()
        if not self._active:
            return
        self._make_room(len(self._active), self._longest())
        rows = slice(0, len(self._active))
        self._cache.used_S[rows] = self._passes
        last = [request.tokens[-1:] for request in self._active]
        drawn = draw(self._forward(rows, last, keep=1)[:, -1], self._active)
        version = self._policy.version
        pairs = zip(self._active, drawn, strict=True)
        due = [(request, request.advance(one, version, self._decode)) for request, one in pairs]
        # Rows are free before anyone hears of it.
        self._leave([isinstance(p, Exception) or bool(p and p.stop) for _, p in due])
        for request, piece in due:
            if piece is not None:
                request.deliver(piece)

    def _forward(
        self, rows: slice | list[int], news: Sequence[Sequence[int]], *, keep: int
    ) -> torch.Tensor:
        """Run the model on each row's new tokens, right-padded; logits of the last `keep`."""
        cache, device = self._cache, self._policy.device
        starts = cache.length_S[rows]
        width = max(map(len, news))
        cache.seen = int((starts + [len(new) for new in news]).max()) + 1
        ids_BT = torch.tensor([[*new, *[0] * (width - len(new))] for new in news], device=device)
        column_T = torch.arange(width, device=device)
        # Padding is written to a spare last column, or where the row's next tokens will go.
        position_BT = (torch.tensor(starts, device=device)[:, None] + column_T).clamp(
            max=cache.seen - 1
        )
        mask_B1TL = torch.arange(cache.seen, device=device) <= position_BT[:, None, :, None]
        cache.rows, cache.positions_BT = rows, position_BT
        output = self._policy.model(
            input_ids=ids_BT,
            attention_mask=mask_B1TL,
            position_ids=position_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.arange(width - keep, width, device=device),
        )
        cache.extend(range(rows.stop) if isinstance(rows, slice) else rows, news)
        return output.logits

    def _leave(self, gone: Sequence[bool]) -> None:
        """Make the slots of these rows idle; they keep what they hold."""
        for row in reversed(range(len(gone))):
            if gone[row]:
                last = len(self._active) - 1
                self._cache.swap(row, last)
                self._active[row] = self._active[last]
                self._active.pop()
        self._cache.active = len(self._active)

    def _move_aside(self) -> None:
        """The request that sampled least waits until there is room again; it loses nothing."""
        drawn = [len(request.drawn) for request in self._active]
        row = drawn.index(min(drawn))
        with self._wake:
            self._waiting.appendleft(self._active[row])
        self._leave([index == row for index in range(len(drawn))])

    def _fail_all(self, error: EngineError) -> None:
        with self._wake:
            failed = [*self._active, *self._waiting]
            self._waiting.clear()
        self._active.clear()
        self._cache = SlotCache()
        for request in failed:
            request.deliver(error)
