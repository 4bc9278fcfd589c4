"""Engine of a Hugging Face model in this process, with continuous batching."""

import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import cast

import anyio
import numpy as np
import torch
from anyio import to_thread

from whet.config import LocalEngineConfig
from whet.engines.local.batch import NO_TOKEN, RunningBatch, find_longest_prefix
from whet.engines.local.forward import Forward, build_forward
from whet.engines.local.grammar import Grammars, Matcher
from whet.engines.local.sampler import draw_uniform_numbers, sample_tokens
from whet.engines.request import (
    Decode,
    SampleRequest,
    TopLogprobs,
    compute_remaining_context,
)
from whet.errors import EngineError, RequestError, boundary
from whet.io.threads import LoopEvent, set_all
from whet.models.huggingface import LocalPolicy
from whet.protocols import Engine
from whet.types import Sampling, TokenChunk, join_chunks

logger = logging.getLogger(__name__)

MIN_SHARED_PREFIX = 16
"""Tokens that a request must share with one that is prefilled to wait and copy its KV cache."""

MIN_PROMPTS = 8
"""Admitted prompts that there is room for at first, to compare others with; doubled as needed."""

MIN_ROW_CAPACITY = 64
"""Positions of the smallest KV cache row; larger ones are powers of two, so growing is rare."""


@dataclass(slots=True, eq=False)
class _PendingRequest(SampleRequest):
    """A request submitted by a task of another thread."""

    chunks: "_ChunkQueue" = field(kw_only=True)
    is_canceled: bool = False


class _ChunkQueue:
    """Chunks from the engine's thread to the task that reads them."""

    def __init__(self) -> None:
        self._queued: deque[TokenChunk | Exception] = deque()
        self._ready = LoopEvent()

    @staticmethod
    def put_all(items: "Iterable[tuple[_ChunkQueue, TokenChunk | Exception]]") -> None:
        """Add chunks, or errors that end a stream, each to its queue, in the engine's thread."""
        woken: list[LoopEvent] = []
        for queue, chunk in items:
            queue._queued.append(chunk)
            if len(queue._queued) == 1:  # else the reader was already woken
                woken.append(queue._ready)
        set_all(woken)

    async def take(self) -> TokenChunk:
        """Wait for chunks and return all queued ones as one. Raises a queued error."""
        while not self._queued:
            self._ready.clear()
            await self._ready.wait()
        chunks: list[TokenChunk] = []
        while self._queued:
            if isinstance(chunk := self._queued[0], Exception):
                if chunks:
                    break
                raise chunk
            chunks.append(chunk)
            self._queued.popleft()
        return join_chunks(chunks)


class LocalEngine(Engine):
    """One thread runs the model: prefill of new requests, then one token for every active one.

    A request that was preempted, or whose weights changed, is prefilled again with the tokens it
    has sampled so far, so that each token's log-probability is that of a plain forward pass of its
    own version.
    """

    def __init__(
        self,
        policy: LocalPolicy,
        config: LocalEngineConfig,
        decode: Decode,
        *,
        grammars: Grammars | None = None,
        threads: int | None = None,
        forward: Callable[[LocalPolicy, int], Forward] = build_forward,
    ) -> None:
        """`decode` is used for stop strings only.

        Without `grammars` a request with a grammar is refused. `forward` builds the forward passes
        for a policy and a number of KV cache positions.
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
        self._batch: RunningBatch[_PendingRequest] = RunningBatch()
        self._waiting: deque[_PendingRequest] = deque()
        self._wake = threading.Condition()
        self._closed = False
        self._reason = "the engine is closed"
        """Why requests fail once it is."""
        self._random = Random()
        """For requests without a seed. Not seeded by the run, so that equal requests differ."""
        self._revision = policy.revision
        self._version = policy.version
        self._passes = 0
        self.prefilled = 0
        """Prompt tokens computed so far, without those reused from the KV cache."""
        self._thread = threading.Thread(target=self._run, name="whet-engine", daemon=True)
        self._thread.start()

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[TokenChunk]:
        remaining = compute_remaining_context(prompt, self.context_length, self._policy.vocabulary)
        matcher = await self._create_matcher(sampling)
        chunks = _ChunkQueue()
        request = _PendingRequest(
            tokens=list(prompt),
            sampling=sampling,
            limit=min(sampling.max_tokens or remaining, remaining),
            stream=stream,
            chunks=chunks,
            seed=self._random.getrandbits(64) if sampling.seed is None else sampling.seed % 2**64,
            matcher=matcher,
        )
        self._submit(request)
        try:
            while True:
                chunk = await chunks.take()
                yield chunk
                if chunk.stop:
                    return
        finally:
            request.is_canceled = True

    @property
    def active(self) -> int:
        """Number of requests being sampled."""
        return len(self._batch)

    async def close(self) -> None:
        with self._wake:
            self._closed = True
            self._wake.notify()
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(self._thread.join)

    async def _create_matcher(self, sampling: Sampling) -> Matcher | None:
        if sampling.grammar is None:
            return None
        if self._grammars is None:
            raise RequestError("this engine does not support grammars")
        # Compiling a large grammar takes long.
        return await to_thread.run_sync(
            self._grammars.create_matcher, sampling.grammar, sampling.stop_ids
        )

    def _submit(self, request: _PendingRequest) -> None:
        with self._wake:
            if self._closed:
                raise EngineError(self._reason)
            self._waiting.append(request)
            self._wake.notify()

    # ----------------------------------------------------------------- the engine's own thread

    def _run(self) -> None:
        if self._threads:
            torch.set_num_threads(self._threads)
        try:
            with boundary(EngineError, "the engine stopped"):
                while self._wait_for_requests():
                    self._try_pass()
        except EngineError as error:  # not even the cache can be cleared, as on a lost GPU
            logger.error("%s", error)
            self._reason = str(error)
        with self._wake:
            self._closed = True
        self._fail_all(EngineError(self._reason))

    def _wait_for_requests(self) -> bool:
        """Wait until there is something to sample; returns False once the engine is closed."""
        with self._wake:
            self._wake.wait_for(lambda: self._waiting or len(self._batch) or self._closed)
            return not self._closed

    @torch.inference_mode()
    def _try_pass(self) -> None:
        """Run a pass; if it fails, so do all requests."""
        try:
            with boundary(EngineError, "sampling failed"):
                self._run_pass()
        except EngineError as error:
            logger.error("sampling failed requests=%d error=%s", len(self._batch), error)
            self._fail_all(error)
            self._cache.active = 0
            self._cache.clear()

    def _run_pass(self) -> None:
        with self._policy.lock:
            if self._revision != self._policy.revision:
                self._revision = self._policy.revision
                for row in range(len(self._batch)):
                    self._flush(row)
                self._cache.clear()
            self._version = self._policy.version
            self._passes += 1
            self._remove([request.is_canceled for request in self._batch.requests])
            if not len(self._batch) or self._passes % self._forward.steps_per_prefill == 0:
                self._admit()
                self._prefill()
                self._admit()  # those that waited for a prefix of the first
            self._prefill()
            self._sample_step()

    def _admit(self) -> None:
        """Move waiting requests into the batch, reusing the longest cached prefix of each."""
        deferred: list[_PendingRequest] = []
        try:
            self._admit_fitting(deferred)
        finally:  # no request is lost when a pass fails
            with self._wake:
                self._waiting.extendleft(reversed(deferred))

    def _admit_fitting(self, deferred: list[_PendingRequest]) -> None:
        """Admit the requests that fit; the others, and one that fails, are left in `deferred`."""
        with self._wake:
            width = max((len(request.tokens) for request in self._waiting), default=0)
        # The prompts admitted here: one with the same beginning waits for their prefill.
        prompts_NL = np.full((MIN_PROMPTS, width), NO_TOKEN, np.int32)
        admitted = 0
        placed: dict[bytes, tuple[int, int]] = {}
        waiting: set[bytes] = set()  # prompts that wait for another one's prefill
        longest = self._batch.longest
        while request := self._pop_waiting():
            deferred.append(request)
            tokens = np.asarray(request.tokens, np.int32)
            longest = max(longest, len(tokens))
            # A prompt longer than `width` arrived in the meantime.
            if len(tokens) > width or not self._fits(len(self._batch) + 1, longest):
                break
            self._make_room(len(self._batch) + 1, longest)
            # Equal prompts of a group share the search of the first.
            key = tokens.tobytes()
            if key in waiting:
                continue
            if equal := placed.get(key):
                (source, shared), coming = equal, len(tokens) - 1
            else:
                source, shared = self._cache.find_longest_prefix(tokens)
                can_gain = shared + MIN_SHARED_PREFIX <= len(tokens)  # by waiting for a prefill
                coming = find_longest_prefix(prompts_NL[:admitted], tokens)[1] if can_gain else 0
            if coming >= shared + MIN_SHARED_PREFIX:
                waiting.add(key)
                continue
            shared = min(shared, len(tokens) - 1)
            self._activate(request, source, shared)
            deferred.pop()
            placed.setdefault(key, (len(self._batch) - 1, shared))
            if admitted == len(prompts_NL):
                prompts_NL = np.concatenate([prompts_NL, np.full_like(prompts_NL, NO_TOKEN)])
            prompts_NL[admitted, : len(tokens)] = tokens
            admitted += 1

    def _pop_waiting(self) -> _PendingRequest | None:
        with self._wake:
            while self._waiting:
                request = self._waiting.popleft()
                if not request.is_canceled:
                    return request
        return None

    def _choose_capacity(self, length: int) -> int:
        """Capacity of a KV cache row for this many tokens: a power of two, within the budget."""
        return min(max(MIN_ROW_CAPACITY, 1 << length.bit_length()), self._budget)

    def _fits(self, rows: int, length: int) -> bool:
        """Whether this many rows, the longest of this length, fit the KV cache budget."""
        return rows * self._choose_capacity(length) <= self._budget

    def _make_room(self, rows: int, length: int) -> None:
        """Resize the KV cache for this many active rows; idle ones stay while the budget lasts."""
        cache = self._cache
        capacity = max(cache.capacity, self._choose_capacity(length))
        if rows * capacity > self._budget:
            capacity = self._choose_capacity(length)
        most = self._budget // capacity
        full = rows > len(self._batch) and cache.length_S[len(self._batch) :].all()
        wanted = min(most, max(rows, 8, 2 * cache.rows if full else cache.rows))
        if cache.positions:  # the memory is allocated in any case
            wanted = most
        if (wanted, capacity) != (cache.rows, cache.capacity):
            cache.resize(wanted, capacity)

    def _activate(self, request: _PendingRequest, source: int, shared: int) -> None:
        """Make a request active, in an idle row that holds the prefix it shares with `source`."""
        cache = self._cache
        row = len(self._batch)
        if source < row or shared < cache.length_S[source]:
            # Evict an empty row first, else the least recently used.
            target = row
            if cache.length_S[row]:
                target += int(np.lexsort((cache.used_S[row:], cache.length_S[row:] > 0))[0])
            cache.copy_prefix(source, target, shared)
            source = target
        cache.swap(row, source)
        self._batch.add(request)
        cache.active = len(self._batch)

    def _prefill(self) -> None:
        """Compute missing keys and values, except those of each row's last token.

        `_sample_step` computes these.
        """
        while rows := self._select_prefill():
            new_ids: list[list[int]] = []
            for row in rows:
                start = int(self._cache.length_S[row])
                tokens = self._batch.requests[row].tokens
                new_ids.append(tokens[start:-1][: self._forward.prefill_tokens])
            self._forward.prefill(rows, new_ids)
            self.prefilled += sum(map(len, new_ids))

    def _select_prefill(self) -> list[int]:
        """Rows to prefill together: of similar lengths, since padding is wasted computation."""
        missing_B = self._batch.total_B - 1 - self._cache.length_S[: len(self._batch)]
        rows: list[int] = []
        incomplete = np.flatnonzero(missing_B > 0)
        for row in cast(
            list[int], incomplete[np.argsort(missing_B[incomplete], kind="stable")].tolist()
        ):
            if rows and (len(rows) + 1) * int(missing_B[row]) > self._forward.prefill_tokens:
                break
            rows.append(row)
        return rows

    def _sample_step(self) -> None:
        """Sample one token for every active row."""
        while not self._fits(len(self._batch), self._batch.longest):
            self._preempt()
        batch = self._batch
        if not len(batch):
            return
        self._make_room(len(batch), batch.longest)
        self._cache.used_S[: len(batch)] = self._passes
        logits_BV = self._forward.step(batch.last_B)
        special = batch.requests if batch.any_needs_every_token else ()
        sampled = sample_tokens(
            logits_BV,
            batch.build_transform(self._policy.device),
            draw_uniform_numbers(batch.seed_B, batch.sampled_B),
            matchers=[request.matcher for request in special],
            tops=[request.sampling.top_logprobs for request in special],
        )
        rows = batch.record(sampled.token_B, sampled.logprob_B)
        due = [
            (row, batch.requests[row], self._flush(row, sampled.tops[row] if sampled.tops else ()))
            for row in cast(list[int], rows.tolist())
        ]
        ended = {
            row for row, _, chunk in due if isinstance(chunk, Exception) or (chunk and chunk.stop)
        }
        # Rows are free before their readers are woken.
        self._remove([row in ended for row in range(len(batch))])
        _ChunkQueue.put_all((request.chunks, chunk) for _, request, chunk in due if chunk)

    def _flush(self, row: int, top: TopLogprobs = ()) -> TokenChunk | Exception | None:
        """Give a request its buffered tokens; returns the chunk or the error to deliver."""
        request, sampled = self._batch.requests[row], self._batch.flush_row(row)
        if request.sampling.top_logprobs and sampled.tokens:
            sampled = sampled._replace(tops=[top])
        try:
            return request.append(sampled, self._version, self._decode)
        except RequestError as error:  # of this request only: the others continue
            return error

    def _remove(self, removed: Sequence[bool]) -> None:
        """Remove rows from the batch; their KV cache rows become idle and keep what they hold."""
        if not any(removed):
            return
        order = list(range(len(removed)))
        stay = len(order)
        for row in reversed(range(len(removed))):
            if removed[row]:
                stay -= 1
                order[row], order[stay] = order[stay], order[row]
        self._cache.reorder(order)
        self._batch.reorder(order[:stay])
        self._cache.active = stay

    def _preempt(self) -> None:
        """Move the request with the fewest sampled tokens back to the queue, with its tokens."""
        row = int(self._batch.sampled_B.argmin())
        self._flush(row)
        with self._wake:
            self._waiting.appendleft(self._batch.requests[row])
        self._remove([index == row for index in range(len(self._batch))])

    def _fail_all(self, error: EngineError) -> None:
        with self._wake:
            failed = [*self._batch.requests, *self._waiting]
            self._waiting.clear()
        self._batch = RunningBatch()
        _ChunkQueue.put_all((request.chunks, error) for request in failed)
