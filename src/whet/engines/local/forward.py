"""Forward passes of the local engine: new tokens of some rows in, logits out, keys and values kept.

`EagerForward` runs the policy's model as it is, with attention over whole rows and a mask.
`CudaGraphForward` is for a GPU: every pass has one of few shapes, attention reads the KV pool by
position and length, and so each shape is captured once as a CUDA graph and replayed. A step of
SmolLM2-135M launches 1,500 kernels; on an H200 at batch 256 it takes 17 ms eagerly, 2.7 ms as a
graph.
"""

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from whet.engines.local import pool_attention as attention
from whet.engines.local.batch import KVCache
from whet.errors import ConfigError, EngineError, boundary
from whet.models.huggingface import LocalPolicy
from whet.models.rounding import DISTURBED_RUNS, simulate_rounding_errors
from whet.models.transfer import copy_to_device
from whet.models.tree_attention import list_probe_ids

logger = logging.getLogger(__name__)

Ids = NDArray[np.int64]

MIN_PREFILL_WIDTH = 16
"""Columns of the narrowest prefill; wider ones are powers of two."""
MIN_PREFILL_TOKENS = 512
"""Padded tokens of the smallest prefill: fewer take a GPU as long, and each shape is captured."""
MAX_LOGIT_GAP = 0.5
"""Mean difference in logits up to which two implementations agree; far above bf16 rounding in most
models, see `_measure_max_gap`."""
MAX_LOGIT_GAP_FP32 = 0.01
"""The same in fp32, where rounding moves no model far."""
PROBE_TOKENS = 8
"""Tokens of the row by which implementations are compared."""
COMPARED_LOGITS = 100
"""Number of the highest logits that are compared."""
CAPTURE_LOCK = threading.Lock()
"""Held while a graph is captured: a capture begins by synchronizing the GPU, which is forbidden
during another capture, and all captures of a process use one stream."""


class Forward(Protocol):
    """Runs the model on the rows of its cache. Used by one thread, under the policy's lock."""

    cache: KVCache
    prefill_tokens: int
    """Maximum number of padded tokens in a prefill pass; bounds its memory."""
    steps_per_prefill: int
    """Steps of running rows between two prefills of new ones."""

    def prefill(self, rows: Sequence[int], new_ids: Sequence[Sequence[int]]) -> None:
        """Compute and cache the keys and values of each row's new tokens."""
        ...

    def step(self, token_B: Ids) -> Tensor:
        """Append one token to every active row; returns the logits of the next token, (B, V)."""
        ...


class BatchLayout(NamedTuple):
    """The tokens of a pass and their positions, in host memory."""

    ids_BT: Ids
    position_BT: Ids
    index_BT: Ids
    """Position of the pool that each token's keys and values are written to."""
    base_B: Ids
    """Position of the pool at which each row begins."""

    @classmethod
    def build_prefill(
        cls,
        cache: KVCache,
        rows: Sequence[int],
        new_ids: Sequence[Sequence[int]],
        shape: Sequence[int],
    ) -> "BatchLayout":
        """Lay out new tokens of some rows; padding is written to the padding position."""
        ids_BT, position_BT = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        index_BT = np.full(shape, cache.padding_position, np.int64)
        base_B = np.full(shape[0], cache.padding_position, np.int64)
        base_B[: len(rows)] = cache.slot_S[list(rows)] * cache.capacity
        for i, (row, new) in enumerate(zip(rows, new_ids, strict=True)):
            count = len(new)
            ids_BT[i, :count] = new
            position_BT[i, :count] = cache.length_S[row] + np.arange(count)
            index_BT[i, :count] = base_B[i] + position_BT[i, :count]
        return cls(ids_BT, position_BT, index_BT, base_B)

    @classmethod
    def build_step(cls, cache: KVCache, token_B: Ids, rows: int) -> "BatchLayout":
        """Lay out one token for each active row, padded to a number of rows."""
        active = len(token_B)
        ids_BT, position_BT = np.zeros((rows, 1), np.int64), np.zeros((rows, 1), np.int64)
        base_B = np.full(rows, cache.padding_position, np.int64)
        ids_BT[:active, 0] = token_B
        position_BT[:active, 0] = cache.length_S[:active]
        base_B[:active] = cache.slot_S[:active] * cache.capacity
        return cls(ids_BT, position_BT, base_B[:, None] + position_BT, base_B)


class EagerForward(Forward):
    """Runs the model as it is, on any device."""

    prefill_tokens = 4096
    steps_per_prefill = 1

    def __init__(self, policy: LocalPolicy) -> None:
        self.cache = KVCache()
        self._policy = policy

    def prefill(self, rows: Sequence[int], new_ids: Sequence[Sequence[int]]) -> None:
        shape = (len(rows), max(map(len, new_ids)))
        self._run(rows, BatchLayout.build_prefill(self.cache, rows, new_ids, shape), keep=0)
        self.cache.extend(rows, new_ids)

    def step(self, token_B: Ids) -> Tensor:
        rows = slice(0, len(token_B))
        layout = BatchLayout.build_step(self.cache, token_B, len(token_B))
        logits_BV = self._run(rows, layout, keep=1)[:, -1]
        self.cache.extend_active(token_B)
        return logits_BV

    def _run(self, rows: slice | Sequence[int], layout: BatchLayout, *, keep: int) -> Tensor:
        cache, device = self.cache, self._policy.device
        cache.read_rows, cache.read_length = rows, int(layout.position_BT.max()) + 1
        ids_BT, position_BT, index_BT = (torch.from_numpy(a).to(device) for a in layout[:3])
        cache.write_index_N = index_BT.flatten()
        column_L = torch.arange(cache.read_length, device=device)
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


class CudaGraphForward(Forward):
    """Passes of few shapes, each a CUDA graph. On a CPU they run without graphs, for tests."""

    prefill_tokens = 16_384
    steps_per_prefill = 4
    """Requests that arrive one by one share the padding of the smallest prefill."""

    def __init__(self, policy: LocalPolicy, positions: int) -> None:
        self._device = policy.device
        self._model = attention.clone_for_pool(cast(PreTrainedModel, policy.model))
        layers = int(self._model.config.get_text_config().num_hidden_layers)
        self.cache = KVCache(positions, layers)
        self._graphs: dict[tuple[int, int], _CapturedGraph] = {}
        self._memory = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        """Memory that the graphs share, since only one runs at a time."""

    def prefill(self, rows: Sequence[int], new_ids: Sequence[Sequence[int]]) -> None:
        shape = round_prefill_shape(len(rows), max(map(len, new_ids)))
        self._run(BatchLayout.build_prefill(self.cache, rows, new_ids, shape))
        self.cache.extend(rows, new_ids)

    def step(self, token_B: Ids) -> Tensor:
        active = len(token_B)
        logits_BV = self._run(BatchLayout.build_step(self.cache, token_B, round_rows(active)))
        self.cache.extend_active(token_B)
        return logits_BV[:active]

    def _run(self, layout: BatchLayout) -> Tensor:
        shape = (layout.ids_BT.shape[0], layout.ids_BT.shape[1])
        captured = self._graphs.get(shape)
        if captured is None:
            captured = self._graphs[shape] = _CapturedGraph(shape, self._device)
        captured.fill(layout)
        if self._device.type != "cuda":
            return self._compute(captured)
        if captured.graph is None:
            with CAPTURE_LOCK:
                self._capture(captured)
        assert captured.graph is not None
        captured.graph.replay()
        return captured.output

    def _capture(self, captured: "_CapturedGraph") -> None:
        """Run once, so that lazy initialization is done, then capture."""
        self._compute(captured)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Another thread may be training and allocate memory.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            captured.output = self._compute(captured)
        captured.graph = graph

    def _compute(self, captured: "_CapturedGraph") -> Tensor:
        """Run the model: logits of a step; the result of a prefill is not used."""
        cache, one_token = self.cache, captured.width == 1
        cache.read_rows, cache.read_length = None, 0
        cache.write_index_N = captured.index_N
        run = self._model if one_token else self._model.base_model
        output = run(
            input_ids=captured.ids_BT,
            # transformers passes a 4-D mask on unchanged; the attention uses `pool_rows` instead.
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self._device),
            position_ids=captured.position_BT,
            past_key_values=cache,
            use_cache=True,
            pool_rows=attention.PoolRows(captured.base_B, captured.position_BT),
        )
        return output.logits[:, -1] if one_token else output.last_hidden_state


class _CapturedGraph:
    """The input tensors of one shape, at fixed addresses, and their graph."""

    def __init__(self, shape: tuple[int, int], device: torch.device) -> None:
        rows, self.width = shape
        size = rows * self.width
        self._inputs = torch.zeros(3 * size + rows, dtype=torch.int64, device=device)
        self.ids_BT = self._inputs[:size].view(shape)
        self.position_BT = self._inputs[size : 2 * size].view(shape)
        self.index_N = self._inputs[2 * size : 3 * size]
        self.base_B = self._inputs[3 * size :]
        self.graph: torch.cuda.CUDAGraph | None = None
        self.output = torch.empty(0)

    def fill(self, layout: BatchLayout) -> None:
        """Copy a layout to the device in one transfer."""
        values = np.concatenate([part.ravel() for part in layout])
        self._inputs.copy_(copy_to_device(values, self._inputs.device))


def check_sampling(policy: LocalPolicy) -> None:
    """Check by a tiny row that sampling with a KV cache gives the model's own logits.

    Raises:
        ConfigError: it does not, or the model has layers whose state is not kept.
    """
    name = policy.wrapped.config.model_type
    advice = "sample with --engine vllm or --engine sglang"
    if policy.partial_layers:
        raise ConfigError(
            "the local engine serves models with full attention in every layer; "
            f"{name!r} has {', '.join(policy.partial_layers)}: {advice}"
        )
    with boundary(ConfigError, f"the local engine cannot serve {name!r}, {advice}"):
        gap = _measure_sampling_gap(EagerForward(policy), policy, positions=0)
    if gap > (limit := _measure_max_gap(policy)):
        raise ConfigError(
            f"the local engine cannot serve {name!r}: its logits with a KV cache differ by "
            f"{gap:.2f} from a plain pass, which rounding does not explain (up to {limit:.2f}); "
            f"{advice}"
        )


def build_forward(policy: LocalPolicy, positions: int) -> Forward:
    """Choose the fastest implementation on the policy's device, with a pool of `positions`."""
    if policy.device.type == "cpu" or not attention.has_kernel():
        return EagerForward(policy)
    graphs = CudaGraphForward(policy, positions)
    return graphs if agrees_with_model(graphs, policy) else EagerForward(policy)


def agrees_with_model(graphs: CudaGraphForward, policy: LocalPolicy) -> bool:
    """Whether CUDA-graph passes compute what the model computes; a warning says why not."""
    slower = "sampling without CUDA graphs, several times slower"
    try:
        gap, limit = (
            _measure_sampling_gap(graphs, policy, graphs.cache.positions),
            _measure_max_gap(policy),
        )
    except EngineError as error:
        logger.warning("%s: %s", error, slower)
        return False
    logger.info("CUDA graphs compared with the model logit_gap=%.4f limit=%.4f", gap, limit)
    agrees = gap <= limit
    if not agrees:
        logger.warning("CUDA graphs give logits that differ by %.2f: %s", gap, slower)
    return agrees


@torch.inference_mode()
def _measure_sampling_gap(forward: Forward, policy: LocalPolicy, positions: int) -> float:
    """Mean difference of the highest logits after a prefill and a step to those of a plain pass."""
    ids = list_probe_ids(PROBE_TOKENS, policy.vocabulary)
    cache = forward.cache
    with policy.lock:
        plain = _compute_plain_logits(policy)
        cache.resize(1, positions or len(ids))
        cache.active = 1
        forward.prefill([0], [ids[:-1].tolist()])
        own = forward.step(ids[-1:])[0]
        cache.active = 0
        cache.clear()
    return _measure_logit_gap(own, plain)


@torch.inference_mode()
def _measure_max_gap(policy: LocalPolicy) -> float:
    """Gap up to which rounding explains it: large where rounding moves the model far."""
    if policy.dtype == torch.float32:
        return MAX_LOGIT_GAP_FP32
    with policy.lock:
        plain = _compute_plain_logits(policy)
        with simulate_rounding_errors(policy.model):
            moved = [
                _measure_logit_gap(_compute_plain_logits(policy), plain)
                for _ in range(DISTURBED_RUNS)
            ]
    return max(MAX_LOGIT_GAP, 3 * max(moved))


def _compute_plain_logits(policy: LocalPolicy) -> Tensor:
    ids_T = torch.from_numpy(list_probe_ids(PROBE_TOKENS, policy.vocabulary)).to(policy.device)
    return policy.model(input_ids=ids_T[None]).logits[0, -1]


def _measure_logit_gap(found_V: Tensor, expected_V: Tensor) -> float:
    """Mean difference of the logits that are expected to be highest."""
    top = expected_V.topk(min(COMPARED_LOGITS, len(expected_V))).indices
    return (found_V[top] - expected_V[top]).abs().mean().item()


def round_prefill_shape(rows: int, width: int) -> tuple[int, int]:
    """Round rows and width up to powers of two, and the rows to a least number of tokens.

    A shape takes a tenth of a second to capture, and requests that arrive one by one would need
    many.
    """
    width = max(MIN_PREFILL_WIDTH, _round_to_power(width))
    return max(_round_to_power(rows), MIN_PREFILL_TOKENS // width), width


def round_rows(rows: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: at most a third of the rows is padding."""
    power = _round_to_power(rows)
    return 3 * power // 4 if rows <= 3 * power // 4 and power > 2 else power


def _round_to_power(least: int) -> int:
    return 1 << (least - 1).bit_length()
