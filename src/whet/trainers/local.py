"""Trainer of the Hugging Face model in this process, whose weights the local engine samples from.

`LocalTrainer` computes the loss of one prefix tree at a time; `MicroBatches` packs rows into trees
that fit into memory and halves them when memory runs out.
"""

import logging
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TypeVar, cast

import torch
from anyio import to_thread
from torch import Tensor

from whet.config import AdamStep, LossConfig
from whet.errors import NonFiniteUpdate, TrainerError, boundary
from whet.io.files import atomic_folder
from whet.models.huggingface import LocalPolicy
from whet.models.tree_attention import can_run_flash
from whet.protocols import TrainingBackend
from whet.trainers.logprobs import PolicyScores, score_tokens
from whet.trainers.loss import (
    LossFunction,
    compute_ratios,
    compute_total_loss,
    count_corrected,
    estimate_kl,
)
from whet.trainers.master_weights import MasterWeights
from whet.trainers.packing import MASKED_TREE_NODES, Batch, PrefixTree, R, check_rows, pack
from whet.trainers.snapshot import Snapshot, check_checkpoint, is_checkpoint
from whet.types import GenerationId, Metrics, Row

logger = logging.getLogger(__name__)

T = TypeVar("T")

MIN_MICRO_BATCH_TOKENS = 64

PASS_TOTALS = ("loss", "trained_tokens", "computed_tokens")
MEANS = ("logprob_gap", "mismatch_kl", "clip_fraction", "entropy", "staleness")
"""Over trained tokens; so are `reference_kl` and `corrected_fraction`, where the loss has them."""


class LocalTrainer(TrainingBackend):
    """Policy gradients over packed prefix trees, AdamW on the policy's own weights."""

    def __init__(
        self,
        policy: LocalPolicy,
        *,
        threads: int | None = None,
        custom_loss: LossFunction | None = None,
        micro_batches: "MicroBatches | None" = None,
    ) -> None:
        """`custom_loss` is the function that `loss.name` names, where it is the user's own."""
        self._policy = policy
        self._custom_loss = custom_loss
        self._micro_batches = micro_batches or MicroBatches(policy, threads)
        self._weights = self._micro_batches.weights
        self._snapshot: Snapshot | None = None
        """The last snapshot, while it may not be copied yet."""
        self._log_ratios: dict[GenerationId, list[float]] = {}

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        return await self.run_in_thread(lambda: self._forward_backward(rows, loss))

    async def recompute_logprobs(self, rows: Sequence[Row]) -> list[Row]:
        return await self.run_in_thread(lambda: self._recompute_logprobs(rows))

    async def optim_step(self, adam: AdamStep) -> Metrics:
        return await self.run_in_thread(lambda: self._optim_step(adam))

    def take_log_ratios(self) -> Mapping[GenerationId, Sequence[float]]:
        taken, self._log_ratios = self._log_ratios, {}
        return taken

    async def publish(self) -> int:
        # The engine samples from these very weights, and every step raised their version.
        return self._policy.version

    async def snapshot(self) -> Callable[[Path], None]:
        await self.run_in_thread(self._complete_snapshot)
        self._snapshot = Snapshot(self._weights.list_tensors(), self._policy.version)
        return self._snapshot.write

    async def save(self, folder: Path) -> None:
        write = await self.snapshot()
        await self.run_in_thread(lambda: write(folder))

    async def restore(self, folder: Path) -> None:
        await self.run_in_thread(lambda: self._restore(folder))

    async def start_from(self, folder: Path) -> None:
        """Load the weights of a checkpoint or a PEFT adapter as those before training.

        Raises:
            TrainerError: they do not fit the model; nothing was changed.
        """
        await self.run_in_thread(lambda: self._start_from(folder))

    async def keep_reference(self) -> None:
        """Keep the weights as they are now as those before training, for `loss.kl`."""
        self._policy.keep_reference()

    async def export(self, folder: Path) -> None:
        def write() -> None:
            with atomic_folder(folder) as to:
                self._policy.write_model(to)

        await self.run_in_thread(write)

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run long work in a worker thread, on this trainer's share of the CPU cores."""
        return await self._micro_batches.run_in_thread(work)

    # ----------------------------------------------------------------- in a worker thread

    def _optim_step(self, adam: AdamStep) -> Metrics:
        self._complete_snapshot()
        return {"grad_norm": self._weights.step(adam), "learning_rate": adam.lr}

    def _complete_snapshot(self) -> None:
        """Copy what the last snapshot still has to write, before the weights change."""
        if self._snapshot is not None:
            self._snapshot.copy()
            self._snapshot = None

    def _forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        check_rows(rows)
        optional = {"reference_kl": loss.kl > 0, "corrected_fraction": loss.correction is not None}
        means = (*MEANS, *(name for name, wanted in optional.items() if wanted))
        sums: dict[str, float] = dict.fromkeys((*PASS_TOTALS, *means), 0.0)
        for found in self._micro_batches.run(rows, lambda tree: self._train_tree(tree, loss)):
            for name, value in found.items():
                sums[name] += value
        tokens = max(1.0, sums["trained_tokens"])
        return {**sums, **{name: sums[name] / tokens for name in means}}

    def _train_tree(self, tree: PrefixTree[Row], loss: LossConfig) -> dict[str, float]:
        """Accumulate a tree's gradient, all of it or nothing; returns sums of its metrics."""
        reference_N = self._compute_reference_logprobs(tree) if loss.kl else None
        scores, batch = self._micro_batches.score_tree(tree, entropy_grad=bool(loss.entropy))
        ratio_N = compute_ratios(scores.logp_N, batch, loss)
        value = compute_total_loss(scores, ratio_N, reference_N, batch, loss, self._custom_loss)
        gradient = self._weights.compute_gradient(value)
        sums = self._measure(value, scores, ratio_N, reference_N, batch, loss)
        if not math.isfinite(sums["loss"]):
            finite = bool(scores.logp_N.isfinite().all())
            cause = "advantages are too large" if finite else "the model's logits are not finite"
            raise NonFiniteUpdate(f"the loss is {sums['loss']}: {cause}")
        self._keep_log_ratios(tree, scores.logp_N.detach() - batch.sampled_N)
        self._weights.accumulate(gradient)  # last: a pass that fails is repeated
        return {**sums, "computed_tokens": float(tree.size)}

    def _keep_log_ratios(self, tree: PrefixTree[Row], log_ratio_N: Tensor) -> None:
        values = iter(cast(list[float], log_ratio_N.tolist()))
        for segment in (segment for row, _ in tree.rows for segment in row.segments):
            found = list(islice(values, len(segment.logprobs)))
            self._log_ratios.setdefault(segment.generation, found)

    def _recompute_logprobs(self, rows: Sequence[Row]) -> list[Row]:
        check_rows(rows)
        with torch.no_grad():
            parts = list(self._micro_batches.run(rows, self._recompute_tree))
        known = {key: row for part in parts for key, row in part.items()}
        return [known[id(row)] for row in rows]

    def _recompute_tree(self, tree: PrefixTree[Row]) -> dict[int, Row]:
        """The tree's rows with the log-probabilities of the current weights, by identity."""
        scores, _ = self._micro_batches.score_tree(tree)
        values = iter(cast(list[float], scores.logp_N.tolist()))
        return {
            id(row): replace(
                row,
                segments=tuple(
                    replace(s, old_logprobs=tuple(islice(values, len(s.logprobs))))
                    for s in row.segments
                ),
            )
            for row, _ in tree.rows
        }

    def _compute_reference_logprobs(self, tree: PrefixTree[Row]) -> Tensor:
        """Log-probabilities of the sampled tokens under the weights before training."""
        with torch.no_grad(), self._policy.use_reference():
            scores, _ = self._micro_batches.score_tree(tree)
            return scores.logp_N

    @torch.no_grad()
    def _measure(
        self,
        value: Tensor,
        scores: PolicyScores,
        ratio_N: Tensor,
        reference_N: Tensor | None,
        batch: Batch,
        loss: LossConfig,
    ) -> dict[str, float]:
        """Sums of the metrics over a batch, copied from the device in one transfer."""
        logp_N = scores.logp_N
        log_ratio_N = logp_N - batch.sampled_N
        kl_N = estimate_kl(-log_ratio_N, torch.zeros_like(logp_N))
        low, high = loss.clip_range
        outside_N = (ratio_N < low) | (ratio_N > high)
        sums = {
            "loss": value,
            "logprob_gap": log_ratio_N.abs().sum(),
            "mismatch_kl": kl_N.sum(),
            "clip_fraction": outside_N.sum(),
            "entropy": scores.entropy_N.sum(),
            "staleness": (self._policy.version - batch.version_N).sum(),
        }
        if reference_N is not None:
            sums["reference_kl"] = estimate_kl(logp_N, reference_N).sum()
        if loss.correction:
            sums["corrected_fraction"] = count_corrected(logp_N, batch, loss)
        fetched = cast(list[float], torch.stack([v.double() for v in sums.values()]).tolist())
        return {**dict(zip(sums, fetched, strict=True)), "trained_tokens": float(len(logp_N))}

    def _start_from(self, folder: Path) -> None:
        self._complete_snapshot()
        if is_checkpoint(folder):
            check_checkpoint(folder)
        self._weights.start_from(folder)

    def _restore(self, folder: Path) -> None:
        self._complete_snapshot()
        self._weights.restore(folder, check_checkpoint(folder))


class MicroBatches:
    """Forward and backward passes of a policy over as many packed tokens as memory holds."""

    def __init__(
        self, policy: LocalPolicy, threads: int | None, weights: MasterWeights | None = None
    ) -> None:
        self.weights = weights or MasterWeights(policy)
        self._policy = policy
        self._threads = threads
        self._max_tokens = policy.config.micro_batch_tokens or policy.choose_micro_batch_tokens()

    async def run_in_thread(self, work: Callable[[], T]) -> T:
        """Run long work in a worker thread, on this trainer's share of the CPU cores."""

        def with_threads() -> T:
            if self._threads:
                torch.set_num_threads(self._threads)
            with boundary(TrainerError, "training failed"):
                return work()

        return await to_thread.run_sync(with_threads)

    def run(self, rows: Sequence[R], run_tree: Callable[[PrefixTree[R]], T]) -> Generator[T]:
        """Pack rows into trees and yield what `run_tree` returns for each.

        `run_tree` accumulates a tree's gradient wholly or not at all. On any other failure the
        accumulated gradient is dropped: half of one is worse than none. Passes without a gradient
        leave it alone.
        """
        waiting: Sequence[PrefixTree[R]] = self._build_trees(rows)
        try:
            while waiting:
                done, found = self._try_tree(waiting[0], run_tree)
                if not done:  # pack the rest again, into smaller trees
                    left: list[R] = [row for tree in waiting for row, _ in tree.rows]
                    waiting = self._build_trees(left)
                    continue
                waiting = waiting[1:]
                yield cast(T, found)
        except BaseException:
            if torch.is_grad_enabled():
                self.weights.drop_gradient()
            raise

    def compute_hidden_states(self, tree: PrefixTree[R]) -> Tensor:
        """The last hidden state of each node."""
        device = self._policy.device
        if not self._policy.packs_rows:  # a single row, whose masks are the model's own affair
            ids_1T = torch.from_numpy(tree.tokens).to(device)[None]
            output = self._policy.body(input_ids=ids_1T, use_cache=False)
            return cast(Tensor, output.last_hidden_state)[0]
        if self._flash:
            # The mask is ignored, but without one transformers would build its own.
            shape = {"branches": tree.build_branches(device)}
            mask_11LL = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        else:
            shape, mask_11LL = {}, tree.build_mask(device)[None, None]
        output = self._policy.body(
            input_ids=torch.from_numpy(tree.tokens).to(device)[None],
            attention_mask=mask_11LL,
            position_ids=torch.from_numpy(tree.depth).to(device)[None],
            use_cache=False,
            **shape,
        )
        return cast(Tensor, output.last_hidden_state)[0]

    def score_tree(
        self, tree: PrefixTree[Row], *, entropy_grad: bool = False
    ) -> tuple[PolicyScores, Batch]:
        """Score the sampled tokens of a tree."""
        hidden_LD = self.compute_hidden_states(tree)
        # Built while a GPU still computes the hidden states; the copy to it waits for them.
        batch = Batch.from_tree(tree).to(self._policy.device)
        return self.score(hidden_LD, batch, entropy_grad=entropy_grad), batch

    def score(self, hidden_LD: Tensor, batch: Batch, *, entropy_grad: bool = False) -> PolicyScores:
        """Score a batch's tokens; no other logits are computed."""
        return score_tokens(
            hidden_LD.index_select(0, batch.source_N),
            self._policy.head,
            batch.target_N,
            batch.transform,
            entropy_grad=entropy_grad,
        )

    def _build_trees(self, rows: Sequence[R]) -> Sequence[PrefixTree[R]]:
        if not self._policy.packs_rows:
            return list(pack(rows, max_tokens=0))
        enough = self._max_tokens if self._flash else MASKED_TREE_NODES
        return list(pack(rows, self._max_tokens, enough=enough))

    @property
    def _flash(self) -> bool:
        return can_run_flash(self._policy.device, self._policy.dtype)

    def _try_tree(
        self, tree: PrefixTree[R], run_tree: Callable[[PrefixTree[R]], T]
    ) -> tuple[bool, T | None]:
        """Run one tree; if memory ran out, lower the micro-batch size and return False."""
        try:
            return True, run_tree(tree)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            single = len({row.tokens for row, _ in tree.rows}) == 1
            if single or self._max_tokens <= MIN_MICRO_BATCH_TOKENS:
                raise TrainerError(
                    f"out of memory on a pass of {tree.size} tokens: set "
                    "trainer.gradient_checkpointing, or lower engine.kv_tokens or the longest "
                    f"answer; nothing was changed ({_read_first_line(error)})"
                ) from error
        # Outside the handler, whose traceback keeps the tensors alive that are to be freed.
        self._max_tokens = max(MIN_MICRO_BATCH_TOKENS, min(self._max_tokens, tree.size) // 2)
        logger.warning("out of memory, trainer.micro_batch_tokens is %d now", self._max_tokens)
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()
        return False, None


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Whether an error says that memory ran out."""
    message = "can't allocate memory"  # torch's for a CPU
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or message in str(error)


def _read_first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
