"""Trains the Hugging Face model of this process, whose weights the local engine samples from."""

import json
import math
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from anyio import to_thread
from safetensors.torch import load_file, save_file
from torch import Tensor

from whet.config import AdamConfig, LossConfig
from whet.errors import TrainerError, boundary
from whet.policies.distribution import Shaping, log_probs
from whet.policies.local import LocalPolicy
from whet.protocols import Trainer
from whet.trainers.loss import LOSSES
from whet.trainers.tree import Tree, pack
from whet.types import Metrics, Row

T = TypeVar("T")

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class LocalTrainer(Trainer):
    """Gradients by the tree of shared prefixes, AdamW on the policy's own weights."""

    def __init__(self, policy: LocalPolicy, *, threads: int | None = None) -> None:
        self._policy = policy
        self._threads = threads
        self._parameters = policy.trainable()
        self._adam = torch.optim.AdamW(self._parameters.values(), lr=1.0)

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        return await self._in_thread(lambda: self._forward_backward(rows, loss))

    async def optim_step(self, adam: AdamConfig) -> Metrics:
        return await self._in_thread(lambda: self._optim_step(adam))

    async def publish(self) -> int:
        # The engine samples from these very weights, and every step raised their version.
        return self._policy.version

    async def save(self, folder: Path) -> None:
        await self._in_thread(lambda: _appear_whole(folder, self._write_state))

    async def restore(self, folder: Path) -> None:
        await self._in_thread(lambda: self._restore(folder))

    async def export(self, folder: Path) -> None:
        await self._in_thread(lambda: _appear_whole(folder, self._write_export))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        def on_all_cores() -> T:
            if self._threads:
                torch.set_num_threads(self._threads)
            with boundary(TrainerError, "training failed"):
                return work()

        return await to_thread.run_sync(on_all_cores)

    # ----------------------------------------------------------------- in a worker thread

    def _forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        sums: dict[str, float] = defaultdict(float)
        trees = 0
        for tree in pack(rows, self._policy.config.micro_batch_tokens):
            for name, value in self._one_tree(tree, loss).items():
                sums[name] += value
            sums["computed_tokens"] += len(tree.tokens)
            trees += 1
        tokens = sums["trained_tokens"]
        per_token = ("mismatch_kl", "clip_fraction", "entropy", "staleness")
        return {**sums, **{name: sums[name] / tokens for name in per_token if tokens}}

    def _one_tree(self, tree: Tree, loss: LossConfig) -> dict[str, float]:
        batch = _Batch.of(tree, self._policy.device)
        logits_UV = self._logits(tree, batch.nodes_U)
        logp_NV = log_probs(logits_UV[batch.source_N], batch.shaping)
        logp_N = logp_NV.gather(1, batch.target_N[:, None])[:, 0]
        log_ratio_N = logp_N - batch.sampled_N
        ratio_N = log_ratio_N.exp()
        value = LOSSES[loss.name](ratio_N, batch.advantage_N, batch.weight_N, loss)
        value.backward()
        with torch.no_grad():
            outside_N = (ratio_N < 1 - loss.clip_low) | (ratio_N > 1 + loss.clip_high)
            p_NV = logp_NV.exp()
            entropy_N = -(p_NV * logp_NV.masked_fill(p_NV == 0, 0.0)).sum(dim=-1)
            return {
                "loss": value.item(),
                "trained_tokens": float(len(logp_N)),
                "mismatch_kl": (ratio_N - 1 - log_ratio_N).sum().item(),
                "clip_fraction": outside_N.sum().item(),
                "entropy": entropy_N.sum().item(),
                "staleness": (self._policy.version - batch.version_N).sum().item(),
            }

    def _logits(self, tree: Tree, nodes_U: Tensor) -> Tensor:
        """Logits of the nodes that predict sampled tokens; no others are computed."""
        device = self._policy.device
        node_L = torch.arange(len(tree.tokens), device=device)
        end_L = torch.tensor(tree.end, device=device)
        mask_LL = (node_L[None, :] <= node_L[:, None]) & (node_L[:, None] < end_L[None, :])
        output = self._policy.model(
            input_ids=torch.tensor([tree.tokens], device=device),
            attention_mask=mask_LL[None, None],
            position_ids=torch.tensor([tree.depth], device=device),
            use_cache=False,
            logits_to_keep=nodes_U,
        )
        return output.logits[0]

    def _optim_step(self, adam: AdamConfig) -> Metrics:
        norm = torch.nn.utils.clip_grad_norm_(self._parameters.values(), adam.max_grad_norm)
        if not math.isfinite(norm.item()):
            self._adam.zero_grad()
            raise TrainerError(
                f"the gradient's norm is {norm.item()}: nothing was changed; "
                "a lower adam.lr or finite rewards may help"
            )
        for settings in self._adam.param_groups:
            settings.update(
                lr=adam.lr,
                betas=(adam.beta1, adam.beta2),
                eps=adam.eps,
                weight_decay=adam.weight_decay,
            )
        with self._policy.lock:
            self._adam.step()
            self._policy.version += 1
        self._adam.zero_grad()
        return {"grad_norm": norm.item()}

    def _write_state(self, folder: Path) -> None:
        save_file({n: p.detach() for n, p in self._parameters.items()}, folder / WEIGHTS)
        moments = {
            f"{name}/{moment}": self._adam.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in MOMENTS
            if parameter in self._adam.state
        }
        save_file(moments, folder / OPTIMIZER)
        (folder / STATE).write_text(json.dumps({"version": self._policy.version}))

    def _restore(self, folder: Path) -> None:
        with boundary(TrainerError, f"cannot read the checkpoint {str(folder)!r}"):
            weights = load_file(folder / WEIGHTS)
            moments = load_file(folder / OPTIMIZER)
            version = int(json.loads((folder / STATE).read_text())["version"])
        shapes = {n: p.shape for n, p in self._parameters.items()}
        if {n: w.shape for n, w in weights.items()} != shapes:
            raise TrainerError(
                f"the checkpoint {str(folder)!r} is of another model or other trainer settings"
            )
        with self._policy.lock, torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
                if f"{name}/step" in moments:
                    state = {m: moments[f"{name}/{m}"] for m in MOMENTS}
                    on_device = state | {
                        m: state[m].to(parameter.device) for m in ("exp_avg", "exp_avg_sq")
                    }
                    self._adam.state[parameter] = on_device
            self._policy.version = version

    def _write_export(self, folder: Path) -> None:
        """An ordinary PEFT adapter folder, or with full weights a Hugging Face model folder."""
        with self._policy.lock:
            self._policy.wrapped.save_pretrained(folder)
        for file in self._policy.folder.iterdir():
            if file.name.startswith(("tokenizer", "chat_template", "additional_chat", "special")):
                copy = shutil.copytree if file.is_dir() else shutil.copy2
                copy(file, folder / file.name)


class _Batch:
    """The sampled tokens of a tree, flat: one entry for each token of each row that trains it."""

    def __init__(
        self,
        nodes_U: Tensor,
        source_N: Tensor,
        target_N: Tensor,
        numbers_N4: Tensor,
        shaping: Shaping,
    ) -> None:
        self.nodes_U = nodes_U
        """The distinct nodes whose logits are needed."""
        self.source_N = source_N
        """Index into `nodes_U` of the node that predicts each token."""
        self.target_N = target_N
        self.sampled_N, self.advantage_N, self.weight_N, self.version_N = numbers_N4.unbind(1)
        self.shaping = shaping

    @classmethod
    def of(cls, tree: Tree, device: torch.device) -> "_Batch":
        sources: list[int] = []
        targets: list[int] = []
        numbers: list[tuple[float, float, float, float]] = []
        settings: list[tuple[float, float, int]] = []
        for row, nodes in tree.rows:
            for span in row.spans:
                sources += nodes[span.start - 1 : span.end - 1]
                targets += row.tokens[span.start : span.end]
                count = len(span.logprobs)
                weights = [span.weight] * count
                columns = (span.logprobs, span.advantages, weights, span.versions)
                numbers += zip(*columns, strict=True)
                settings += [(span.temperature, span.top_p, span.top_k)] * count
        nodes_U, source_N = torch.tensor(sources, device=device).unique(return_inverse=True)
        return cls(
            nodes_U,
            source_N,
            torch.tensor(targets, device=device),
            torch.tensor(numbers, dtype=torch.float32, device=device),
            Shaping.of(settings, device),
        )


def _appear_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder under another name, then rename it: a kill leaves all of it or nothing."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)
