"""Trains the Hugging Face model of this process, whose weights the local engine samples from."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch
from anyio import to_thread
from torch import Tensor

from whet.config import AdamConfig, LossConfig
from whet.errors import TrainerError, boundary
from whet.policies.attention import runs_flash
from whet.policies.local import LocalPolicy
from whet.protocols import Trainer
from whet.trainers.batch import Batch
from whet.trainers.checkpoint import appear_whole
from whet.trainers.loss import divergence, ratios, total
from whet.trainers.scoring import Scores, score
from whet.trainers.tree import ENOUGH, Tree, pack
from whet.trainers.weights import TrainedWeights
from whet.types import Metrics, Row

logger = logging.getLogger(__name__)

T = TypeVar("T")

STATE = "state.json"

TOTALS = ("loss", "trained_tokens", "computed_tokens")
MEANS = ("logprob_gap", "mismatch_kl", "clip_fraction", "entropy", "staleness")
"""Over trained tokens; so is `reference_kl`, where there is a penalty on it."""

SMALLEST_MICRO_BATCH = 64


class LocalTrainer(Trainer):
    """Gradients by the tree of shared prefixes, AdamW on the policy's own weights."""

    def __init__(self, policy: LocalPolicy, *, threads: int | None = None) -> None:
        self._policy = policy
        self._threads = threads
        self._weights = TrainedWeights(policy)
        self._most_tokens = policy.config.micro_batch_tokens or policy.micro_batch_tokens()

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        return await self._in_thread(lambda: self._forward_backward(rows, loss))

    async def optim_step(self, adam: AdamConfig) -> Metrics:
        return await self._in_thread(
            lambda: {"grad_norm": self._weights.step(adam), "learning_rate": adam.lr}
        )

    async def publish(self) -> int:
        # The engine samples from these very weights, and every step raised their version.
        return self._policy.version

    async def save(self, folder: Path) -> None:
        await self._in_thread(lambda: appear_whole(folder, self._write_state))

    async def restore(self, folder: Path) -> None:
        await self._in_thread(lambda: self._restore(folder))

    async def export(self, folder: Path) -> None:
        await self._in_thread(lambda: appear_whole(folder, self._policy.write_model))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        def on_all_cores() -> T:
            if self._threads:
                torch.set_num_threads(self._threads)
            with boundary(TrainerError, "training failed"):
                return work()

        return await to_thread.run_sync(on_all_cores)

    # ----------------------------------------------------------------- in a worker thread

    def _forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        _refuse_unusable(rows)
        means = (*MEANS, "reference_kl") if loss.kl else MEANS
        sums: dict[str, float] = dict.fromkeys((*TOTALS, *means), 0.0)
        waiting = self._trees(rows)
        try:
            while waiting:
                found = self._attempt(waiting[0], loss)
                if found is None:  # with less at once from here on
                    waiting = self._trees([row for tree in waiting for row, _ in tree.rows])
                    continue
                waiting = waiting[1:]
                for name, value in found.items():
                    sums[name] += value
        except BaseException:
            self._weights.drop_gradient()  # half a gradient is worse than none
            raise
        tokens = max(1.0, sums["trained_tokens"])
        return {**sums, **{name: sums[name] / tokens for name in means}}

    def _trees(self, rows: Sequence[Row]) -> Sequence[Tree]:
        enough = self._most_tokens if self._flash else ENOUGH
        return list(pack(rows, self._most_tokens, enough=enough))

    @property
    def _flash(self) -> bool:
        return runs_flash(self._policy.device, self._policy.dtype)

    def _attempt(self, tree: Tree, loss: LossConfig) -> dict[str, float] | None:
        """One tree; nothing if memory ran out, and passes are smaller from then on."""
        try:
            return self._one_tree(tree, loss)
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            alone = len({row.tokens for row, _ in tree.rows}) == 1
            if alone or self._most_tokens <= SMALLEST_MICRO_BATCH:
                raise TrainerError(
                    f"out of memory on a pass of {tree.size} tokens: set "
                    "trainer.gradient_checkpointing, or lower engine.kv_tokens or the longest "
                    f"answer; nothing was changed ({_first_line(error)})"
                ) from error
        # Outside the handler, whose error holds on to what is to be freed.
        self._most_tokens = max(SMALLEST_MICRO_BATCH, min(self._most_tokens, tree.size) // 2)
        logger.warning("out of memory, trainer.micro_batch_tokens is %d now", self._most_tokens)
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _one_tree(self, tree: Tree, loss: LossConfig) -> dict[str, float]:
        """Add a tree's gradient, all of it or nothing."""
        batch = Batch.of(tree, self._policy.device)
        reference_N = self._reference(tree, batch) if loss.kl else None
        scores = self._score(tree, batch, entropy_slope=bool(loss.entropy))
        ratio_N = ratios(scores.logp_N, batch, loss)
        value = total(scores, ratio_N, reference_N, batch, loss)
        gradient = self._weights.gradient(value)
        sums = self._measure(value, scores, ratio_N, reference_N, batch, loss)
        if not math.isfinite(sums["loss"]):
            raise TrainerError(f"the loss is {sums['loss']}: the model's logits are not finite")
        self._weights.add(gradient)
        return {**sums, "computed_tokens": float(tree.size)}

    def _score(self, tree: Tree, batch: Batch, *, entropy_slope: bool) -> Scores:
        """Scores of the sampled tokens; no other logits are computed."""
        device = self._policy.device
        if self._flash:
            # The mask is not looked at, but there has to be one: transformers would make its own.
            shape = {"branches": tree.branches(device)}
            mask_11LL = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        else:
            shape, mask_11LL = {}, tree.mask(device)[None, None]
        output = self._policy.body(
            input_ids=torch.from_numpy(tree.tokens).to(device)[None],
            attention_mask=mask_11LL,
            position_ids=torch.from_numpy(tree.depth).to(device)[None],
            use_cache=False,
            **shape,
        )
        hidden_ND = cast(Tensor, output.last_hidden_state)[0, batch.source_N]
        return score(
            hidden_ND,
            self._policy.head,
            batch.target_N,
            batch.shaping,
            entropy_slope=entropy_slope,
        )

    def _reference(self, tree: Tree, batch: Batch) -> Tensor:
        """Log-probabilities of the sampled tokens before training."""
        with torch.no_grad(), self._policy.reference():
            return self._score(tree, batch, entropy_slope=False).logp_N

    @torch.no_grad()
    def _measure(
        self,
        value: Tensor,
        scores: Scores,
        ratio_N: Tensor,
        reference_N: Tensor | None,
        batch: Batch,
        loss: LossConfig,
    ) -> dict[str, float]:
        """Sums over the batch, fetched from the device at once."""
        logp_N = scores.logp_N
        log_ratio_N = logp_N - batch.sampled_N
        kl_N = divergence(-log_ratio_N, torch.zeros_like(logp_N))
        outside_N = (ratio_N < 1 - loss.clip_low) | (ratio_N > 1 + loss.clip_high)
        sums = {
            "loss": value,
            "logprob_gap": log_ratio_N.abs().sum(),
            "mismatch_kl": kl_N.sum(),
            "clip_fraction": outside_N.sum(),
            "entropy": scores.entropy_N.sum(),
            "staleness": (self._policy.version - batch.version_N).sum(),
        }
        if reference_N is not None:
            sums["reference_kl"] = divergence(logp_N, reference_N).sum()
        fetched = cast(list[float], torch.stack([v.double() for v in sums.values()]).tolist())
        return {**dict(zip(sums, fetched, strict=True)), "trained_tokens": float(len(logp_N))}

    def _write_state(self, folder: Path) -> None:
        self._weights.save(folder)
        (folder / STATE).write_text(json.dumps({"version": self._policy.version}))

    def _restore(self, folder: Path) -> None:
        with boundary(TrainerError, f"cannot read the checkpoint {str(folder)!r}"):
            version = int(json.loads((folder / STATE).read_text())["version"])
        self._weights.restore(folder, version)


def _out_of_memory(error: RuntimeError | MemoryError) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "can't allocate memory" in str(error)  # how torch says it of a CPU


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _refuse_unusable(rows: Sequence[Row]) -> None:
    for row in rows:
        if not row.trained_tokens:
            raise TrainerError(f"a row of rollout {row.rollout!r} has no sampled tokens")
        for span in row.spans:
            if not all(map(math.isfinite, (*span.logprobs, *span.advantages, span.weight))):
                raise TrainerError(
                    f"generation {span.generation!r} has a log-probability, advantage or weight "
                    "that is not finite: nothing was changed"
                )
            if span.start < 1:
                raise TrainerError(f"generation {span.generation!r} has no context")
