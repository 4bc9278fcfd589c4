"""Samples from a Hugging Face model in this process, many requests in flight at once."""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from whet.config import EngineConfig
from whet.engines.sampling import Request, draw, fresh_generator, seeded
from whet.engines.slots import SlotCache, common_prefix
from whet.errors import EngineError, PromptTooLong, boundary
from whet.policies.local import LocalPolicy
from whet.protocols import Engine
from whet.types import Piece, Sampling

logger = logging.getLogger(__name__)

PREFILL_TOKENS = 4096
"""Most padded tokens in one prefill pass; bounds its memory."""

WORTH_WAITING_FOR = 16
"""Shared tokens for which a request waits one pass, to copy what another is about to compute."""


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
        threads: int | None = None,
    ) -> None:
        """`decode` turns ids into text, for stop strings alone."""
        self._policy = policy
        self._budget = config.kv_tokens
        self.context_length = min(
            config.max_context or policy.context_length, policy.context_length, self._budget - 1
        )
        self._decode = decode
        self._threads = threads
        self._cache = SlotCache()
        self._active: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._generator = fresh_generator(policy.device)
        self._version = policy.version
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
        arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        request = Request(
            prompt=prompt,
            sampling=sampling,
            limit=min(sampling.max_tokens or room, room),
            stream=stream,
            deliver=lambda piece: loop.call_soon_threadsafe(arrived.put_nowait, piece) and None,
            generator=seeded(sampling.seed, self._policy.device),
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

    async def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)

    def _submit(self, request: Request) -> None:
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
            if self._version != self._policy.version:
                self._version = self._policy.version
                self._cache.forget()
            self._passes += 1
            self._leave([r.cancelled for r in self._active])
            self._admit()
            self._prefill()
            self._step()

    def _admit(self) -> None:
        """Give waiting requests a slot, starting from the longest prefix some slot holds."""
        later: list[Request] = []
        fresh: list[NDArray[np.int32]] = []
        while request := self._next_waiting():
            tokens = np.asarray(request.tokens, np.int32)
            if not self._fits(len(self._active) + 1, len(tokens)):
                later.append(request)
                break
            source, shared = self._cache.longest_prefix(tokens)
            if any(common_prefix(f, tokens) >= shared + WORTH_WAITING_FOR for f in fresh):
                later.append(request)
                continue
            self._place(request, source, min(shared, len(tokens) - 1))
            fresh.append(tokens)
        with self._wake:
            self._waiting.extendleft(reversed(later))

    def _next_waiting(self) -> Request | None:
        with self._wake:
            while self._waiting:
                request = self._waiting.popleft()
                if not request.cancelled:
                    return request
        return None

    def _fits(self, rows: int, length: int) -> bool:
        """Whether so many active rows, one of them this long, stay within the budget."""
        return rows == 1 or rows * self._cache.capacity_for(length) <= self._budget

    def _make_room(self, rows: int, length: int) -> None:
        """Slots for so many active rows of this length; idle ones stay while the budget lasts."""
        cache = self._cache
        most = max(rows, self._budget // cache.capacity_for(length))
        if len(cache.slots) > most:
            cache.drop_idle(most)
        empty = any(len(slot.tokens) == 0 for slot in cache.slots[len(self._active) :])
        grown = len(cache.slots) if empty else max(8, 2 * len(cache.slots))
        cache.reserve(max(rows, min(most, grown)), length)

    def _place(self, request: Request, source: int, shared: int) -> None:
        cache = self._cache
        row = len(self._active)
        held = cache.slots[source] if shared else None
        self._make_room(row + 1, len(request.prompt) + len(request.drawn))
        idle = range(row, len(cache.slots))
        if held and source in idle and shared == len(held.tokens):
            target = source
        else:
            target = min(idle, key=lambda i: (len(cache.slots[i].tokens) > 0, cache.slots[i].used))
            survives = held is not None and source < len(cache.slots)
            cache.copy_prefix(source, target, shared if survives else 0)
        cache.swap(row, target)
        self._active.append(request)
        cache.active = len(self._active)

    def _prefill(self) -> None:
        """Compute what the slots lack, but for the last token of rows that lack only that."""
        cache = self._cache
        lacking = [
            (row, request.tokens)
            for row, request in enumerate(self._active)
            if len(request.prompt) + len(request.drawn) - len(cache.slots[row].tokens) > 1
        ]
        # Like lengths together: padding is computed in vain.
        lacking.sort(key=lambda pair: len(pair[1]) - len(cache.slots[pair[0]].tokens))
        batch: list[tuple[int, list[int]]] = []
        for row, tokens in lacking:
            width = len(tokens) - len(cache.slots[row].tokens)
            if batch and (len(batch) + 1) * width > PREFILL_TOKENS:
                self._prefill_rows(batch)
                batch = []
            batch.append((row, tokens))
        if batch:
            self._prefill_rows(batch)

    def _prefill_rows(self, batch: Sequence[tuple[int, list[int]]]) -> None:
        # All but the last token: `_step` then samples for every row alike.
        news = [tokens[len(self._cache.slots[row].tokens) : -1] for row, tokens in batch]
        self._forward(torch.tensor([row for row, _ in batch]), news)
        self.prefilled += sum(map(len, news))
        for row, tokens in batch:
            self._cache.slots[row].tokens = np.asarray(tokens[:-1], np.int32)

    def _step(self) -> None:
        """One more token for every active row."""
        longest = max((len(r.prompt) + len(r.drawn) for r in self._active), default=0)
        while not self._fits(len(self._active), longest):
            self._move_aside()
        if not self._active:
            return
        self._make_room(len(self._active), longest)
        last = [r.drawn[-1].token if r.drawn else r.prompt[-1] for r in self._active]
        logits_BV = self._forward(slice(0, len(last)), [[token] for token in last])
        for slot, token in zip(self._cache.slots, last, strict=False):
            slot.tokens = np.append(slot.tokens, np.int32(token))
            slot.used = self._passes
        drawn = draw(logits_BV, self._active, self._generator)
        ended = [
            request.take(one, self._version, self._decode)
            for request, one in zip(self._active, drawn, strict=True)
        ]
        self._leave(ended)

    def _forward(self, rows: slice | torch.Tensor, news: Sequence[Sequence[int]]) -> torch.Tensor:
        """Run the model on each row's new tokens, right-padded; logits of the last column."""
        cache, device = self._cache, self._policy.device
        held = cache.slots[rows] if isinstance(rows, slice) else [cache.slots[i] for i in rows]
        starts = [len(slot.tokens) for slot in held]
        width = max(map(len, news))
        cache.length = max(start + len(new) for start, new in zip(starts, news, strict=True)) + 1
        ids_BT = torch.tensor([[*new, *[0] * (width - len(new))] for new in news], device=device)
        position_BT = torch.tensor(starts, device=device)[:, None] + torch.arange(
            width, device=device
        )
        # Padding is written to a spare last column, or where the row's next tokens will go.
        position_BT = position_BT.clamp(max=cache.length - 1)
        mask_B1TL = torch.arange(cache.length, device=device) <= position_BT[:, None, :, None]
        cache.rows, cache.positions_BT = rows, position_BT
        output = self._policy.model(
            input_ids=ids_BT,
            attention_mask=mask_B1TL,
            position_ids=position_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return output.logits[:, -1]

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
        """The youngest request waits until there is room again; it keeps what it sampled."""
        with self._wake:
            self._waiting.appendleft(self._active[-1])
        self._leave([False] * (len(self._active) - 1) + [True])

    def _fail_all(self, error: EngineError) -> None:
        with self._wake:
            failed = [*self._active, *self._waiting]
            self._waiting.clear()
        self._active.clear()
        self._cache = SlotCache()
        for request in failed:
            request.deliver(error)
