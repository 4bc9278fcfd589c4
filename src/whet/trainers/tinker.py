"""Trains at a Tinker service: rows become datums, losses keep their names."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whet.config import AdamConfig, LossConfig
from whet.durable import whole_folder
from whet.errors import TrainerError, boundary
from whet.policies.tinker import Datum, Floats, TinkerPolicy
from whet.protocols import Trainer
from whet.types import Metrics, Row

STATE = "state.json"
NOTHING = {"loss": 0.0, "trained_tokens": 0.0}
CLIPPED = ("ppo", "cispo", "gspo")


class TinkerTrainer(Trainer):
    """What a row weighs is in its advantages, since the service's losses are plain sums."""

    def __init__(self, policy: TinkerPolicy) -> None:
        self._policy = policy
        self._published: int | None = None
        """The edition of the weights that are sampled from."""
        self._states: dict[Path, str] = {}
        """Where the service keeps what our checkpoints stand for."""

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        for row in rows:
            _refuse_unusable(row)
        if not rows:
            return NOTHING
        data = [_datum(row, loss) for row in rows]
        logprobs, value = await self._policy.forward_backward(data, loss.name, _settings(loss))
        return {"loss": value, **self._measured(rows, logprobs, loss)}

    async def optim_step(self, adam: AdamConfig) -> Metrics:
        found = await self._policy.optim_step(adam)
        named = {name.split(":")[0]: value for name, value in found.items()}
        return {**named, "learning_rate": adam.lr}

    async def publish(self) -> int:
        if self._published != self._policy.edition:
            await self._policy.publish()
            self._published = self._policy.edition
        return self._policy.version

    async def save(self, folder: Path) -> None:
        path = await self._policy.save()
        state = {"path": path, "version": self._policy.version}
        with whole_folder(folder) as to:
            _write(to, state)
        before, self._states[folder] = self._states.get(folder), path
        gone = [known for known in self._states if not known.exists()]
        for old in [before, *map(self._states.pop, gone)]:
            if old is not None:
                await self._policy.forget(old)

    async def restore(self, folder: Path) -> None:
        with boundary(TrainerError, f"cannot read the checkpoint {str(folder)!r}"):
            state = json.loads((folder / STATE).read_text())
            path, version = str(state["path"]), int(state["version"])
        await self._policy.restore(path, version)
        self._states[folder] = path

    async def export(self, folder: Path) -> None:
        files = await self._policy.export()
        with whole_folder(folder) as to:
            _write_files(to, files)

    def _measured(self, rows: Sequence[Row], logprobs: list[Floats], loss: LossConfig) -> Metrics:
        """Means over trained tokens; the entropy is estimated from what was sampled."""
        spans = [(lp, s) for row, lp in zip(rows, logprobs, strict=True) for s in row.spans]
        now = np.concatenate([lp[s.start - 1 : s.end - 1] for lp, s in spans])
        sampled = np.concatenate([np.asarray(s.logprobs, np.float32) for _, s in spans])
        gap = now - sampled
        ratio = np.exp(np.clip(gap, None, 20.0))
        outside = (ratio < 1 - loss.clip_low) | (ratio > 1 + loss.clip_high)
        ages = [self._policy.version - version for _, s in spans for version in s.versions]
        return {
            "trained_tokens": float(len(now)),
            "logprob_gap": float(np.abs(gap).mean()),
            "mismatch_kl": float((ratio - 1 - gap).mean()),
            "clip_fraction": float(outside.mean()),
            "entropy": float(-sampled.mean()),
            "staleness": float(np.mean(ages)),
        }


def _datum(row: Row, loss: LossConfig) -> Datum:
    length = len(row.tokens) - 1
    sampled, credit, counted = (np.zeros(length, np.float32) for _ in range(3))
    for span in row.spans:
        where = slice(span.start - 1, span.end - 1)
        sampled[where] = span.logprobs
        credit[where] = np.asarray(span.advantages, np.float32) * span.weight
        counted[where] = 1.0
    inputs: dict[str, Floats | NDArray[np.int64]] = {"target_tokens": np.array(row.tokens[1:])}
    if loss.name == "cross_entropy":
        inputs["weights"] = credit
    else:
        inputs |= {"logprobs": sampled, "advantages": credit}
    if loss.name == "gspo":
        inputs["sequence_ratio_mask"] = counted
    return Datum(row.tokens[:-1], inputs)


def _settings(loss: LossConfig) -> dict[str, float]:
    """Thresholds are always sent: servers differ in what they take without."""
    if loss.name not in CLIPPED:
        return {}
    return {
        "clip_low_threshold": 1 - loss.clip_low,
        "clip_high_threshold": 1 + loss.clip_high,
    }


def _refuse_unusable(row: Row) -> None:
    for span in row.spans:
        if not all(map(math.isfinite, (*span.logprobs, *span.advantages, span.weight))):
            raise TrainerError(f"generation {span.generation!r} has numbers that are not finite")
        if (span.temperature, span.top_p, span.top_k) != (1.0, 1.0, 0):
            raise TrainerError(
                f"generation {span.generation!r} was sampled at temperature {span.temperature}, "
                f"top_p {span.top_p}, top_k {span.top_k}; the Tinker service scores tokens at 1, 1 "
                "and 0: have the agent ask for nothing else, or set runner.temperature to 1"
            )


def _write(folder: Path, state: dict[str, str | int]) -> None:
    (folder / STATE).write_text(json.dumps(state))


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise TrainerError(f"the service names a file outside the folder: {name!r}")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
