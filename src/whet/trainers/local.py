"""Trains the Hugging Face model of this process, whose weights the local engine samples from."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from whet.config import AdamConfig, LossConfig
from whet.durable import whole_folder
from whet.errors import TrainerError, boundary
from whet.policies.local import LocalPolicy
from whet.protocols import Trainer
from whet.trainers.batch import Batch
from whet.trainers.loss import divergence, ratios, total
from whet.trainers.passes import Passes
from whet.trainers.scoring import Scores
from whet.trainers.tree import Tree
from whet.types import Metrics, Row

STATE = "state.json"

TOTALS = ("loss", "trained_tokens", "computed_tokens")
MEANS = ("logprob_gap", "mismatch_kl", "clip_fraction", "entropy", "staleness")
"""Over trained tokens; so is `reference_kl`, where there is a penalty on it."""


class LocalTrainer(Trainer):
    """Gradients by the tree of shared prefixes, AdamW on the policy's own weights."""

    def __init__(self, policy: LocalPolicy, *, threads: int | None = None) -> None:
        self._policy = policy
        self._passes = Passes(policy, threads)

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        return await self._passes.in_thread(lambda: self._forward_backward(rows, loss))

    async def optim_step(self, adam: AdamConfig) -> Metrics:
        return await self._passes.in_thread(
            lambda: {"grad_norm": self._passes.weights.step(adam), "learning_rate": adam.lr}
        )

    async def publish(self) -> int:
        # The engine samples from these very weights, and every step raised their version.
        return self._policy.version

    async def save(self, folder: Path) -> None:
        await self._passes.in_thread(lambda: _write(folder, self._write_state))

    async def restore(self, folder: Path) -> None:
        await self._passes.in_thread(lambda: self._restore(folder))

    async def export(self, folder: Path) -> None:
        await self._passes.in_thread(lambda: _write(folder, self._policy.write_model))

    # ----------------------------------------------------------------- in a worker thread

    def _forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        _refuse_unusable(rows)
        means = (*MEANS, "reference_kl") if loss.kl else MEANS
        sums: dict[str, float] = dict.fromkeys((*TOTALS, *means), 0.0)
        for found in self._passes.each(rows, lambda tree: self._one_tree(tree, loss)):
            for name, value in found.items():
                sums[name] += value
        tokens = max(1.0, sums["trained_tokens"])
        return {**sums, **{name: sums[name] / tokens for name in means}}

    def _one_tree(self, tree: Tree[Row], loss: LossConfig) -> dict[str, float]:
        """Add a tree's gradient, all of it or nothing."""
        reference_N = self._reference(tree) if loss.kl else None
        hidden_LD = self._passes.hidden(tree)
        # A GPU is still at work on those; moving things there waits for it.
        batch = Batch.of(tree).to(self._policy.device)
        scores = self._passes.score(hidden_LD, batch, entropy_slope=bool(loss.entropy))
        ratio_N = ratios(scores.logp_N, batch, loss)
        value = total(scores, ratio_N, reference_N, batch, loss)
        gradient = self._passes.weights.gradient(value)
        sums = self._measure(value, scores, ratio_N, reference_N, batch, loss)
        if not math.isfinite(sums["loss"]):
            raise TrainerError(f"the loss is {sums['loss']}: the model's logits are not finite")
        self._passes.weights.add(gradient)
        return {**sums, "computed_tokens": float(tree.size)}

    def _reference(self, tree: Tree[Row]) -> Tensor:
        """Log-probabilities of the sampled tokens before training."""
        with torch.no_grad(), self._policy.reference():
            batch = Batch.of(tree).to(self._policy.device)
            return self._passes.score(self._passes.hidden(tree), batch).logp_N

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
        self._passes.weights.save(folder)
        (folder / STATE).write_text(json.dumps({"version": self._policy.version}))

    def _restore(self, folder: Path) -> None:
        with boundary(TrainerError, f"cannot read the checkpoint {str(folder)!r}"):
            version = int(json.loads((folder / STATE).read_text())["version"])
        self._passes.weights.restore(folder, version)


def _write(folder: Path, write: Callable[[Path], None]) -> None:
    with whole_folder(folder) as to:
        write(to)


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
