"""Trainer for Tinker datums: tokens, targets for every position, and a loss by Tinker's name.

Unlike a row, a datum has a target for every position and gets the log-probability of each back.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from whet.config import AdamStep, LossConfig, explain
from whet.errors import RequestError, TrainerError
from whet.models.distribution import SamplingTransform
from whet.models.huggingface import LocalPolicy
from whet.trainers.local import MicroBatches
from whet.trainers.loss import LOSSES, compute_ratios
from whet.trainers.packing import Batch, PrefixTree
from whet.trainers.snapshot import check_checkpoint

Floats = NDArray[np.float32]

CLIPPED = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
SAMPLED = ("logprobs", "advantages")
INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": SAMPLED,
    "ppo": SAMPLED,
    "cispo": SAMPLED,
    "dro": SAMPLED,
    "gspo": (*SAMPLED, "sequence_ratio_mask"),
}
"""Inputs that each loss needs besides the targets."""
SETTINGS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": CLIPPED,
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
    "dro": {"beta": 0.05},
    "gspo": CLIPPED,
}
"""Settings of each loss with their defaults. Clip thresholds may also be inputs, by target."""


@dataclass(frozen=True, slots=True, eq=False)
class Datum:
    """A sequence with one or several targets for each position."""

    tokens: tuple[int, ...]
    targets: NDArray[np.int64]
    """Shape (N,) or (N, K)."""
    inputs: Mapping[str, Floats]
    """Arrays of the targets' shape."""


class DatumResult(NamedTuple):
    """Result of a pass over datums."""

    logprobs: list[Floats]
    """Log-probabilities of the targets, in the order and shapes of the datums."""
    loss: float


class DatumTrainer:
    """Trains a policy's adapters with AdamW; shared prefixes are computed once."""

    def __init__(self, policy: LocalPolicy, *, threads: int | None = None) -> None:
        self._policy = policy
        self._micro_batches = MicroBatches(policy, threads)

    async def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str,
        settings: Mapping[str, float],
        *,
        forward_only: bool = False,
    ) -> DatumResult:
        """Accumulate the gradient of a loss, unless `forward_only`.

        Raises:
            RequestError: the data or the settings do not fit the loss.
        """
        config = _build_config(loss, settings)
        for index, datum in enumerate(data):
            self._check_datum(datum, index, loss)
        return await self._micro_batches.run_in_thread(
            lambda: self._run(data, config, forward_only)
        )

    async def optim_step(self, adam: AdamStep) -> float:
        """Apply the gradient, clear it and return its norm."""
        return await self._micro_batches.run_in_thread(
            lambda: self._micro_batches.weights.step(adam)
        )

    async def save(self, folder: Path) -> None:
        """Write weights and optimizer into an existing folder."""
        await self._micro_batches.run_in_thread(lambda: self._micro_batches.weights.save(folder))

    async def restore(self, folder: Path, *, optimizer: bool) -> None:
        """Load what `save` wrote. Raises TrainerError before changing anything."""
        version = self._policy.version + 1
        weights = self._micro_batches.weights

        def work() -> None:
            check_checkpoint(folder)
            weights.restore(folder, version, optimizer=optimizer)

        await self._micro_batches.run_in_thread(work)

    # ----------------------------------------------------------------- in a worker thread

    def _run(self, data: Sequence[Datum], config: LossConfig, forward_only: bool) -> DatumResult:
        with torch.set_grad_enabled(not forward_only):
            found = list(
                self._micro_batches.run(
                    data, lambda tree: self._run_tree(tree, config, forward_only)
                )
            )
        scored = {key: logprobs for part in found for key, logprobs in part.logprobs.items()}
        return DatumResult([scored[id(datum)] for datum in data], math.fsum(p.loss for p in found))

    def _run_tree(self, tree: PrefixTree[Datum], config: LossConfig, forward_only: bool) -> "_Part":
        batch = _build_batch(tree, config, self._policy.device)
        logp_N = self._score(tree, batch)
        loss_N = LOSSES[config.name](logp_N, compute_ratios(logp_N, batch, config), batch, config)
        value = loss_N.sum()
        loss = value.item()
        if not math.isfinite(loss):
            if bool(logp_N.isfinite().all()):
                raise RequestError(f"the loss is {loss}: weights or advantages are too large")
            raise TrainerError(f"the loss is {loss}: the model's logits are not finite")
        flat = cast(Floats, logp_N.detach().float().cpu().numpy())
        ends = np.cumsum([datum.targets.size for datum, _ in tree.rows])
        parts = np.split(flat, ends[:-1])
        if not forward_only:
            weights = self._micro_batches.weights
            weights.accumulate(weights.compute_gradient(value))
        return _Part(
            {
                id(datum): part.reshape(datum.targets.shape)
                for (datum, _), part in zip(tree.rows, parts, strict=True)
            },
            loss,
        )

    def _score(self, tree: PrefixTree[Datum], batch: Batch) -> Tensor:
        """Log-probabilities of the targets; a target that several rows share is scored once.

        Most positions of a group are those of its prompt, and logits are what costs most.
        """
        pair_N = batch.source_N * self._policy.vocabulary + batch.target_N
        pair_M, place_N = cast(tuple[Tensor, Tensor], torch.unique(pair_N, return_inverse=True))
        once = replace(
            batch,
            source_N=pair_M // self._policy.vocabulary,
            target_N=pair_M % self._policy.vocabulary,
            transform=batch.transform.select(slice(0, len(pair_M))),
        )
        return self._micro_batches.score(
            self._micro_batches.compute_hidden_states(tree), once
        ).logp_N[place_N]

    def _check_datum(self, datum: Datum, index: int, loss: str) -> None:
        where = f"datum {index}"
        most = self._policy.context_length
        if not 1 <= len(datum.tokens) <= most:
            raise RequestError(
                f"{where} has {len(datum.tokens)} tokens; this model takes 1 to {most}"
            )
        shape = datum.targets.shape
        if len(shape) not in (1, 2) or shape[0] != len(datum.tokens) or 0 in shape:
            raise RequestError(
                f"{where} has target_tokens of shape {shape} for "
                f"{len(datum.tokens)} tokens; expected one or K targets for each"
            )
        ids = [*datum.tokens, int(datum.targets.min()), int(datum.targets.max())]
        if min(ids) < 0 or max(ids) >= self._policy.vocabulary:
            raise RequestError(f"{where} has ids outside 0 to {self._policy.vocabulary - 1}")
        optional = SETTINGS[loss].keys() & CLIPPED.keys()
        if set(datum.inputs) - optional != set(INPUTS[loss]):
            may = f" and may have {', '.join(sorted(optional))}" if optional else ""
            raise RequestError(
                f"{where} has {', '.join(sorted(datum.inputs)) or 'no inputs'}; {loss!r} takes "
                f"target_tokens, {', '.join(INPUTS[loss])}{may}"
            )
        for name, values in datum.inputs.items():
            if values.shape != shape:
                raise RequestError(
                    f"{where} has {name} of shape {values.shape}; target_tokens have {shape}"
                )
            if not np.isfinite(values).all():
                raise RequestError(f"{where} has {name} that are not finite")


class _Part(NamedTuple):
    logprobs: dict[int, Floats]
    """By the identity of the datum."""
    loss: float


def _build_config(loss: str, settings: Mapping[str, float]) -> LossConfig:
    known = SETTINGS.get(loss)
    if known is None:
        raise RequestError(f"unknown loss {loss!r}: expected {', '.join(SETTINGS)}")
    if odd := set(settings) - set(known):
        raise RequestError(
            f"the loss {loss!r} has no setting {min(odd)!r}: expected {', '.join(known) or 'none'}"
        )
    merged = {**known, **settings}
    values: dict[str, float | str | None] = {"name": loss}
    if loss in ("ppo", "gspo"):  # the hosted service has no such bound
        values["dual_clip"] = None
    if "beta" in merged:
        values["beta"] = merged["beta"]
    if "clip_low_threshold" in merged:
        values["clip_low"] = 1 - merged["clip_low_threshold"]
        values["clip_high"] = merged["clip_high_threshold"] - 1
    try:
        return LossConfig.model_validate(values)
    except ValidationError as error:
        raise RequestError(f"settings of the loss {loss!r}: {explain(error)}") from error


def _build_batch(tree: PrefixTree[Datum], config: LossConfig, device: torch.device) -> Batch:
    data = [datum for datum, _ in tree.rows]
    sizes = [datum.targets.size for datum in data]

    def concatenate(name: str, default: float | None = None) -> Tensor:
        """An input of all datums, with a default where a datum may lack it."""
        parts = [
            datum.inputs[name].ravel()
            if default is None or name in datum.inputs
            else np.full(datum.targets.size, default)
            for datum in data
        ]
        return torch.from_numpy(np.concatenate(parts).astype(np.float32)).to(device)

    sources = [np.repeat(nodes, datum.targets.size // len(nodes)) for datum, nodes in tree.rows]
    has = data[0].inputs
    target_N = torch.from_numpy(np.concatenate([d.targets.ravel() for d in data])).to(device)
    zero_N = torch.zeros(len(target_N), device=device)
    # `cross_entropy` calls the weight of a target what rows call its advantage.
    advantage_N = concatenate("weights" if "weights" in has else "advantages")
    low, high = config.clip_range
    clips = any(datum.inputs.keys() & CLIPPED.keys() for datum in data)
    return Batch(
        source_N=torch.from_numpy(np.concatenate(sources)).to(device),
        target_N=target_N,
        row_N=torch.from_numpy(np.repeat(np.arange(len(data)), sizes)).to(device),
        rows=len(data),
        version_N=zero_N,
        sampled_N=concatenate("logprobs") if "logprobs" in has else zero_N,
        advantage_N=advantage_N,
        weight_N=torch.ones_like(zero_N),
        transform=SamplingTransform.from_settings([(1.0, 1.0, 0)], device).select(
            torch.zeros_like(target_N)
        ),
        counted_N=(concatenate("sequence_ratio_mask") != 0).float()
        if "sequence_ratio_mask" in has
        else None,
        clip_N=(concatenate("clip_low_threshold", low), concatenate("clip_high_threshold", high))
        if clips
        else None,
    )
