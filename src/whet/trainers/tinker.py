"""Trainer at a Tinker service: rows become datums, losses keep their names."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whet.config import AdamStep, LossConfig
from whet.errors import NonFiniteUpdate, TrainerError, boundary
from whet.io.files import atomic_folder, find_final_path
from whet.models.tinker import Floats, TinkerDatum, TinkerPolicy
from whet.protocols import TrainingBackend
from whet.types import GenerationId, Metrics, Row

STATE = "state.json"
NOTHING = {"loss": 0.0, "trained_tokens": 0.0}
CLIPPED = ("ppo", "cispo", "gspo")


class TinkerTrainer(TrainingBackend):
    """Trains at a Tinker service; token weights are folded into the advantages."""

    def __init__(self, policy: TinkerPolicy) -> None:
        self._policy = policy
        self._published: int | None = None
        """Revision of the weights that are served."""
        self._states: dict[Path, str] = {}
        """Path at the service of each local checkpoint folder."""
        self._log_ratios: dict[GenerationId, list[float]] = {}
        self._replaced: list[str | None] = []
        """Paths of checkpoints whose folder was written over."""

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        for row in rows:
            _check_row(row)
        if not rows:
            return NOTHING
        data = [_build_datum(row, loss) for row in rows]
        logprobs, value = await self._policy.forward_backward(
            data, loss.name, _build_settings(loss)
        )
        for row, found in zip(rows, logprobs, strict=True):
            for segment in row.segments:
                gap = found[segment.start - 1 : segment.end - 1] - np.array(segment.logprobs)
                self._log_ratios.setdefault(segment.generation, gap.tolist())
        return {"loss": value, **self._compute_metrics(rows, logprobs, loss)}

    def take_log_ratios(self) -> Mapping[GenerationId, Sequence[float]]:
        taken, self._log_ratios = self._log_ratios, {}
        return taken

    async def recompute_logprobs(self, rows: Sequence[Row]) -> list[Row]:
        raise TrainerError("loss.old_logprobs 'recomputed' needs trainer.kind 'local'")

    async def optim_step(self, adam: AdamStep) -> Metrics:
        found = await self._policy.optim_step(adam)
        metrics = {name.split(":")[0]: value for name, value in found.items()}
        return {**metrics, "learning_rate": adam.lr}

    async def publish(self) -> int:
        if self._published != self._policy.revision:
            await self._policy.publish()
            self._published = self._policy.revision
        return self._policy.version

    async def snapshot(self) -> Callable[[Path], None]:
        await self._delete_states()
        path = await self._policy.save()
        state: dict[str, str | int] = {"path": path, "version": self._policy.version}

        def write(folder: Path) -> None:
            with atomic_folder(folder) as to:
                _write(to, state)
            final = find_final_path(folder)  # it may be part of a checkpoint of several policies
            self._replaced.append(self._states.get(final))
            self._states[final] = path

        return write

    async def save(self, folder: Path) -> None:
        write = await self.snapshot()
        write(folder)
        await self._delete_states()

    async def _delete_states(self) -> None:
        """Delete the states whose checkpoint folder is gone or was written over."""
        gone = [known for known in self._states if not known.exists()]
        replaced, self._replaced = self._replaced, []
        for old in [*replaced, *map(self._states.pop, gone)]:
            if old is not None:
                await self._policy.delete(old)

    async def restore(self, folder: Path) -> None:
        with boundary(TrainerError, f"cannot read the checkpoint {str(folder)!r}"):
            state = json.loads((folder / STATE).read_text())
            path, version = str(state["path"]), int(state["version"])
        await self._policy.restore(path, version)
        self._states[folder] = path

    async def export(self, folder: Path) -> None:
        files = await self._policy.export()
        with atomic_folder(folder) as to:
            _write_files(to, files)

    def _compute_metrics(
        self, rows: Sequence[Row], logprobs: list[Floats], loss: LossConfig
    ) -> Metrics:
        """Means over trained tokens; the entropy is estimated from what was sampled."""
        segments = [(lp, s) for row, lp in zip(rows, logprobs, strict=True) for s in row.segments]
        now = np.concatenate([lp[s.start - 1 : s.end - 1] for lp, s in segments])
        sampled = np.concatenate([np.asarray(s.logprobs, np.float32) for _, s in segments])
        gap = now - sampled
        ratio = np.exp(np.clip(gap, None, 20.0))
        low, high = loss.clip_range
        outside = (ratio < low) | (ratio > high)
        ages = [self._policy.version - version for _, s in segments for version in s.versions]
        return {
            "trained_tokens": float(len(now)),
            "logprob_gap": float(np.abs(gap).mean()),
            "mismatch_kl": float((ratio - 1 - gap).mean()),
            "clip_fraction": float(outside.mean()),
            "entropy": float(-sampled.mean()),
            "staleness": float(np.mean(ages)),
        }


def _build_datum(row: Row, loss: LossConfig) -> TinkerDatum:
    length = len(row.tokens) - 1
    sampled, credit, counted = (np.zeros(length, np.float32) for _ in range(3))
    for segment in row.segments:
        where = slice(segment.start - 1, segment.end - 1)
        sampled[where] = segment.logprobs
        credit[where] = np.asarray(segment.advantages, np.float32) * segment.weight
        counted[where] = 1.0
    inputs: dict[str, Floats | NDArray[np.int64]] = {"target_tokens": np.array(row.tokens[1:])}
    if loss.name == "cross_entropy":
        inputs["weights"] = credit
    else:
        inputs |= {"logprobs": sampled, "advantages": credit}
    if loss.name == "gspo":
        inputs["sequence_ratio_mask"] = counted
    return TinkerDatum(row.tokens[:-1], inputs)


def _build_settings(loss: LossConfig) -> dict[str, float]:
    """Return the loss settings; thresholds are always sent, since servers' defaults differ."""
    if loss.name not in CLIPPED:
        return {}
    low, high = loss.clip_range
    return {"clip_low_threshold": low, "clip_high_threshold": high}


def _check_row(row: Row) -> None:
    for segment in row.segments:
        if not all(map(math.isfinite, (*segment.logprobs, *segment.advantages, segment.weight))):
            raise NonFiniteUpdate(
                f"generation {segment.generation!r} has numbers that are not finite"
            )
        if (segment.temperature, segment.top_p, segment.top_k) != (1.0, 1.0, 0):
            raise TrainerError(
                f"generation {segment.generation!r} was sampled at temperature "
                f"{segment.temperature}, top_p {segment.top_p}, top_k {segment.top_k}; the Tinker "
                "service scores tokens at 1, 1 and 0: have the agent ask for nothing else, or "
                "set runner.temperature to 1"
            )


def _write(folder: Path, state: dict[str, str | int]) -> None:
    (folder / STATE).write_text(json.dumps(state))


def _write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise TrainerError(f"the service names a file outside the folder: {name!r}")
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
