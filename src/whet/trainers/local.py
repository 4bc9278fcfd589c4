"""Trains the Hugging Face model of this process, whose weights the local engine samples from."""

import json
import math
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import torch
from anyio import to_thread
from safetensors import torch as safetensors
from torch import Tensor

from whet.config import AdamConfig, LossConfig
from whet.errors import TrainerError, boundary
from whet.policies.distribution import Shaping, log_probs
from whet.policies.local import LocalPolicy
from whet.protocols import Trainer
from whet.trainers.checkpoint import appear_whole
from whet.trainers.loss import LOSSES
from whet.trainers.tree import Tree, pack
from whet.types import Metrics, Row

T = TypeVar("T")

WEIGHTS = "weights.safetensors"
OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")

TOTALS = ("loss", "trained_tokens", "computed_tokens")
MEANS = ("logprob_gap", "mismatch_kl", "clip_fraction", "entropy", "staleness")
"""Over trained tokens."""

LARGEST_LOG_RATIO = 20.0
"""Beyond it a ratio overflows, and zero times its gradient is no number."""


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
        await self._in_thread(lambda: appear_whole(folder, self._write_state))

    async def restore(self, folder: Path) -> None:
        await self._in_thread(lambda: self._restore(folder))

    async def export(self, folder: Path) -> None:
        await self._in_thread(lambda: appear_whole(folder, self._write_export))

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
        sums: dict[str, float] = dict.fromkeys((*TOTALS, *MEANS), 0.0)
        with ExitStack() as on_failure:
            on_failure.callback(self._adam.zero_grad)  # half a gradient is worse than none
            for tree in pack(rows, self._policy.config.micro_batch_tokens):
                for name, value in self._one_tree(tree, loss).items():
                    sums[name] += value
            on_failure.pop_all()
        tokens = max(1.0, sums["trained_tokens"])
        return {**sums, **{name: sums[name] / tokens for name in MEANS}}

    def _one_tree(self, tree: Tree, loss: LossConfig) -> dict[str, float]:
        batch = _Batch(tree, self._policy.device)
        logits_NV = self._logits(tree, batch.source_N)
        logp_NV = log_probs(logits_NV, batch.shaping, batch.target_N)
        logp_N = logp_NV.gather(1, batch.target_N[:, None])[:, 0]
        log_ratio_N = logp_N - batch.sampled_N
        ratio_N = log_ratio_N.clamp(max=LARGEST_LOG_RATIO).exp()
        value = LOSSES[loss.name](ratio_N, batch.advantage_N, batch.weight_N, loss)
        if not math.isfinite(value.item()):
            raise TrainerError(f"the loss is {value.item()}: the model's logits are not finite")
        value.backward()
        with torch.no_grad():
            outside_N = (ratio_N < 1 - loss.clip_low) | (ratio_N > 1 + loss.clip_high)
            entropy_N = -(logp_NV.exp() * logp_NV.clamp(min=torch.finfo().min)).sum(dim=-1)
            return {
                "loss": value.item(),
                "trained_tokens": float(len(logp_N)),
                "computed_tokens": float(len(tree.tokens)),
                "logprob_gap": log_ratio_N.abs().sum().item(),
                "mismatch_kl": (ratio_N - 1 - log_ratio_N).sum().item(),
                "clip_fraction": outside_N.sum().item(),
                "entropy": entropy_N.sum().item(),
                "staleness": (self._policy.version - batch.version_N).sum().item(),
            }

    def _logits(self, tree: Tree, nodes_N: Tensor) -> Tensor:
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
            logits_to_keep=nodes_N,
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
        with self._policy.changing(self._policy.version + 1):
            self._adam.step()
        self._adam.zero_grad()
        return {"grad_norm": norm.item()}

    def _write_state(self, folder: Path) -> None:
        weights = {name: parameter.detach() for name, parameter in self._parameters.items()}
        safetensors.save_file(weights, folder / WEIGHTS)
        moments = {
            f"{name}/{moment}": self._adam.state[parameter][moment]
            for name, parameter in self._parameters.items()
            for moment in MOMENTS
            if parameter in self._adam.state
        }
        safetensors.save_file(moments, folder / OPTIMIZER)
        (folder / STATE).write_text(json.dumps({"version": self._policy.version}))

    def _restore(self, folder: Path) -> None:
        with boundary(TrainerError, f"cannot read the checkpoint {str(folder)!r}"):
            weights = safetensors.load_file(folder / WEIGHTS)
            moments = safetensors.load_file(folder / OPTIMIZER)
            version = int(json.loads((folder / STATE).read_text())["version"])
            states = {
                name: {moment: moments[f"{name}/{moment}"].clone() for moment in MOMENTS}
                for name in weights
                if f"{name}/step" in moments
            }
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        if {name: weight.shape for name, weight in weights.items()} != shapes:
            raise TrainerError(
                f"the checkpoint {str(folder)!r} is of another model or other trainer settings"
            )
        with self._policy.changing(version), torch.no_grad():
            self._adam.state.clear()
            self._adam.zero_grad()
            for name, parameter in self._parameters.items():
                parameter.copy_(weights[name])
                if state := states.get(name):
                    step = {"step": state.pop("step")}  # which AdamW keeps on the CPU
                    averages = {moment: v.to(parameter.device) for moment, v in state.items()}
                    self._adam.state[parameter] = step | averages

    def _write_export(self, folder: Path) -> None:
        """An ordinary PEFT adapter folder, or with full weights a Hugging Face model folder."""
        with self._policy.lock:
            self._policy.wrapped.save_pretrained(str(folder))
        for file in self._policy.folder.iterdir():
            if file.name.startswith(("tokenizer", "chat_template", "additional_chat", "special")):
                copy = shutil.copytree if file.is_dir() else shutil.copy2
                copy(file, folder / file.name)


class _Batch:
    """The sampled tokens of a tree, flat: one entry for each token of each row that trains it."""

    def __init__(self, tree: Tree, device: torch.device) -> None:
        sources: list[int] = []
        targets: list[int] = []
        versions: list[int] = []
        numbers: list[tuple[float, float, float]] = []
        settings: list[tuple[float, float, int]] = []
        for row, nodes in tree.rows:
            for span in row.spans:
                count = len(span.logprobs)
                sources += nodes[span.start - 1 : span.end - 1]
                targets += row.tokens[span.start : span.end]
                versions += span.versions
                numbers += zip(span.logprobs, span.advantages, [span.weight] * count, strict=True)
                settings += [(span.temperature, span.top_p, span.top_k)] * count
        self.source_N = torch.tensor(sources, device=device)
        """The node that predicts each token."""
        self.target_N = torch.tensor(targets, device=device)
        self.version_N = torch.tensor(versions, device=device)
        numbers_N3 = torch.tensor(numbers, dtype=torch.float32, device=device)
        self.sampled_N, self.advantage_N, self.weight_N = numbers_N3.unbind(1)
        self.shaping = Shaping.of(settings, device)


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
