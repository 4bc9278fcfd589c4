"""Forward passes of the local engine: new tokens of some rows in, keys and values kept, logits out.

`Eager` runs the policy's model as it is, and gives attention whole rows with a mask. `Static` is
for a GPU: every pass has one of few shapes, its attention finds keys by place and length, and so
each shape is recorded once as a CUDA graph and replayed. A step of SmolLM2-135M launches 1,500
kernels; one by one they take eight times as long as they run.
"""

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from whet.engines import attention
from whet.engines.slots import SlotCache
from whet.errors import EngineError
from whet.policies.local import LocalPolicy

logger = logging.getLogger(__name__)

Ids = NDArray[np.int64]

NARROWEST = 16
"""Columns of a prefill; wider ones are powers of two."""
AGREES = 0.5
"""Mean difference in logits between two ways to compute the same: far above what bf16 rounds."""
LIKELIEST = 100
RECORDING = threading.Lock()
"""Held while a graph is recorded: nobody may wait for the whole GPU meanwhile, as recording does at
its beginning, and all recordings of a process are on one stream."""


class Forward(Protocol):
    """Runs the model on the rows of its cache. Used by one thread, under the policy's lock."""

    cache: SlotCache
    prefill_tokens: int
    """Most padded tokens in one prefill pass; bounds its memory."""

    def prefill(self, rows: Sequence[int], news: Sequence[Sequence[int]]) -> None:
        """Add each row's new tokens to its keys and values."""
        ...

    def step(self, token_B: Ids) -> Tensor:
        """Add one token to every active row; the logits of what comes next, (B, V)."""
        ...


class Places(NamedTuple):
    """Which tokens are run, and where: the host's side of a pass."""

    ids_BT: Ids
    position_BT: Ids
    index_BT: Ids
    """Where in the pool each token's keys and values go."""
    base_B: Ids
    """Where in the pool each row begins."""

    @classmethod
    def of_news(
        cls,
        cache: SlotCache,
        rows: Sequence[int],
        news: Sequence[Sequence[int]],
        shape: Sequence[int],
    ) -> "Places":
        """New tokens of some rows; what fills the shape up goes to the spare place."""
        ids_BT, position_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        index_BT = np.full(shape, cache.spare, np.int64)
        base_B = np.full(shape[0], cache.spare, np.int64)
        base_B[: len(rows)] = np.asarray(rows) * cache.capacity
        for i, (row, new) in enumerate(zip(rows, news, strict=True)):
            count = len(new)
            ids_BT[i, :count] = new
            position_BT[i, :count] = cache.length_S[row] + np.arange(count)
            index_BT[i, :count] = base_B[i] + position_BT[i, :count]
        return cls(ids_BT, position_BT, index_BT, base_B)

    @classmethod
    def of_step(cls, cache: SlotCache, token_B: Ids, rows: int) -> "Places":
        """One token for each active row, filled up to so many rows."""
        active = len(token_B)
        ids_BT, position_BT = np.zeros((rows, 1), np.int64), np.zeros((rows, 1), np.int64)
        base_B = np.full(rows, cache.spare, np.int64)
        ids_BT[:active, 0] = token_B
        position_BT[:active, 0] = cache.length_S[:active]
        base_B[:active] = np.arange(active) * cache.capacity
        return cls(ids_BT, position_BT, base_B[:, None] + position_BT, base_B)


class Eager(Forward):
    """The model as it is, on any device."""

    prefill_tokens = 4096

    def __init__(self, policy: LocalPolicy) -> None:
        self.cache = SlotCache()
        self._policy = policy

    def prefill(self, rows: Sequence[int], news: Sequence[Sequence[int]]) -> None:
        shape = (len(rows), max(map(len, news)))
        self._run(rows, Places.of_news(self.cache, rows, news, shape), keep=0)
        self.cache.extend(rows, news)

    def step(self, token_B: Ids) -> Tensor:
        rows = slice(0, len(token_B))
        places = Places.of_step(self.cache, token_B, len(token_B))
        logits_BV = self._run(rows, places, keep=1)[:, -1]
        self.cache.extend_active(token_B)
        return logits_BV

    def _run(self, rows: slice | Sequence[int], places: Places, *, keep: int) -> Tensor:
        cache, device = self.cache, self._policy.device
        cache.rows, cache.seen = rows, int(places.position_BT.max()) + 1
        ids_BT, position_BT, index_BT = (torch.from_numpy(a).to(device) for a in places[:3])
        cache.index_N = index_BT.flatten()
        column_L = torch.arange(cache.seen, device=device)
        width = ids_BT.shape[1]
        output = self._policy.model(
            input_ids=ids_BT,
            attention_mask=column_L <= position_BT[:, None, :, None],
            position_ids=position_BT,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=torch.arange(width - keep, width, device=device),
        )
        return output.logits


class Static(Forward):
    """Few shapes, each a CUDA graph. On a CPU the same passes run without graphs, for tests."""

    prefill_tokens = 16_384

    def __init__(self, policy: LocalPolicy, positions: int) -> None:
        self._device = policy.device
        self._model = attention.twin(cast(PreTrainedModel, policy.model))
        layers = int(self._model.config.get_text_config().num_hidden_layers)
        self.cache = SlotCache(positions, layers)
        self._recorded: dict[tuple[int, int], _Recorded] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        """What the graphs work in; they take turns in it."""

    def prefill(self, rows: Sequence[int], news: Sequence[Sequence[int]]) -> None:
        width = max(NARROWEST, _power_of_two(max(map(len, news))))
        shape = (round_rows(len(rows)), width)
        self._run(Places.of_news(self.cache, rows, news, shape))
        self.cache.extend(rows, news)

    def step(self, token_B: Ids) -> Tensor:
        active = len(token_B)
        logits_BV = self._run(Places.of_step(self.cache, token_B, round_rows(active)))
        self.cache.extend_active(token_B)
        return logits_BV[:active]

    def _run(self, places: Places) -> Tensor:
        shape = (places.ids_BT.shape[0], places.ids_BT.shape[1])
        recorded = self._recorded.get(shape)
        if recorded is None:
            recorded = self._recorded[shape] = _Recorded(shape, self._device)
        recorded.fill(places)
        if self._device.type != "cuda":
            return self._compute(recorded)
        if recorded.graph is None:
            with RECORDING:
                self._record(recorded)
        assert recorded.graph is not None
        recorded.graph.replay()
        return recorded.output

    def _record(self, recorded: "_Recorded") -> None:
        """Run once, so that whatever is made on first use is made, then record."""
        self._compute(recorded)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Another thread may be training meanwhile, and allocate.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            recorded.output = self._compute(recorded)
        recorded.graph = graph

    def _compute(self, recorded: "_Recorded") -> Tensor:
        """Logits of a step; of a prefill nothing anybody wants."""
        cache, one_token = self.cache, recorded.width == 1
        cache.rows, cache.seen = None, 0
        cache.index_N = recorded.index_N
        run = self._model if one_token else self._model.base_model
        output = run(
            input_ids=recorded.ids_BT,
            # Four dimensions are passed on as they are; who attends to what is in `slots`.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device),
            position_ids=recorded.position_BT,
            past_key_values=cache,
            use_cache=True,
            slots=attention.Slots(recorded.base_B, recorded.position_BT),
        )
        return output.logits[:, -1] if one_token else output.last_hidden_state


class _Recorded:
    """The tensors of one shape, always the same ones, and their graph."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        rows, self.width = shape
        size = rows * self.width
        self._all = torch.zeros(3 * size + rows, dtype=torch.int64, device=device)
        self.ids_BT = self._all[:size].view(shape)
        self.position_BT = self._all[size : 2 * size].view(shape)
        self.index_N = self._all[2 * size : 3 * size]
        self.base_B = self._all[3 * size :]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output = torch.empty(0)

    def fill(self, places: Places) -> None:
        """One transfer to the device."""
        self._all.copy_(torch.from_numpy(np.concatenate([part.ravel() for part in places])))


def build_forward(policy: LocalPolicy, positions: int) -> Forward:
    """What is fastest on the policy's device; the pool holds so many positions."""
    if policy.device.type == "cpu" or not attention.has_kernel():
        return Eager(policy)
    static = Static(policy, positions)
    if _agree(static, policy):
        return static
    logger.warning("this model's attention has a kind of its own; it is served without CUDA graphs")
    return Eager(policy)


@torch.inference_mode()
def _agree(static: Static, policy: LocalPolicy) -> bool:
    """Whether static passes compute what the model computes."""
    ids = np.arange(8) % policy.vocabulary
    with policy.lock, suppress(EngineError):
        plain = policy.model(input_ids=torch.tensor(ids[None], device=policy.device)).logits[0, -1]
        static.cache.resize(1, static.cache.positions)
        static.cache.active = 1
        static.prefill([0], [ids[:-1].tolist()])
        own = static.step(ids[-1:])[0]
        static.cache.active = 0
        static.cache.forget()
        return _near(plain, own)
    return False


def _near(plain: Tensor, own: Tensor) -> bool:
    top = plain.topk(min(LIKELIEST, len(plain))).indices
    gap = (plain[top] - own[top]).abs().mean().item()
    logger.info("static passes agree with the model to within gap=%.4f", gap)
    return gap < AGREES


def round_rows(rows: int) -> int:
    """The next of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: a third of the rows at most is for nothing."""
    power = _power_of_two(rows)
    return 3 * power // 4 if rows <= 3 * power // 4 and power > 2 else power


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
