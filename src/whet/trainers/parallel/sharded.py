"""Training on several GPUs of one machine with a sharded model, by torch's FSDP2.

Every rank runs as many passes as the others, on rows of its own, because layers are gathered from
all ranks. Rank 0 has the whole model besides: it samples, is published and exported.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch import distributed as dist

from whet.config import AdamStep, LossConfig
from whet.config.learning import UNSHARDED_KEYS
from whet.config.section import changed_keys
from whet.errors import NonFiniteUpdate, TrainerError, boundary
from whet.io.files import atomic_folder
from whet.models.huggingface import LocalPolicy
from whet.protocols import TrainingBackend
from whet.trainers.local import LocalTrainer, MicroBatches, is_out_of_memory
from whet.trainers.logprobs import PolicyScores
from whet.trainers.loss import LossFunction
from whet.trainers.packing import Batch, PrefixTree, R, check_rows, pack
from whet.trainers.parallel.data_parallel import deal_rows, merge_metrics, restore_order
from whet.trainers.parallel.ranks import RankAddress, RankCommand, RankGroup, RankReply
from whet.trainers.parallel.shards import ShardWeights, shard_policy
from whet.trainers.snapshot import Snapshot, check_checkpoint, is_checkpoint
from whet.types import GenerationId, Metrics, Row, SampledSegment

T = TypeVar("T")

IDLE_ROW = Row(
    tokens=(0, 0),
    segments=(
        SampledSegment(
            generation=GenerationId(""),
            start=1,
            logprobs=(0.0,),
            versions=(0,),
            advantages=(0.0,),
            weight=0.0,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
        ),
    ),
    rollout="",
    group="",
)
[IDLE_TREE] = pack([IDLE_ROW], max_tokens=2)
"""Tree that a rank runs while it has no rows left and others do: its loss is 0."""


BYTES_PER_TRAINED_WEIGHT = 16
"""A weight, its gradient and its two moments, in fp32."""


def should_shard(policy: LocalPolicy) -> bool:
    """Return whether to divide a model among GPUs, rather than to copy it to each."""
    setting = policy.config.shard
    if setting != "auto" or policy.device.type == "cpu":
        return setting == "on"
    _, memory = torch.cuda.mem_get_info(policy.device)
    return not changed_keys(policy.config) & UNSHARDED_KEYS and 2 * count_bytes(policy) > memory


def count_bytes(policy: LocalPolicy) -> int:
    """Return the bytes that training a copy of the model needs, without activations."""
    weights = sum(p.numel() * p.element_size() for p in policy.model.parameters())
    trained = sum(parameter.numel() for parameter in policy.get_trainable().values())
    return weights + BYTES_PER_TRAINED_WEIGHT * trained


class ShardedTrainer(TrainingBackend):
    """The trainer of rank 0, which deals rows to all ranks and has the whole model."""

    def __init__(self, part: "ModelShard", whole: LocalPolicy, ranks: RankGroup) -> None:
        self._part = part
        self._whole = whole
        self._ranks = ranks
        self._log_ratios: dict[GenerationId, Sequence[float]] = {}

    async def forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        def compute() -> Metrics:
            command = RankCommand(name="forward_backward", loss=loss)
            replies = self._run_dealt(self._deal_rows(rows), command)
            for reply in replies:
                for generation, values in reply.log_ratios.items():
                    self._log_ratios.setdefault(generation, values)
            return merge_metrics([reply.metrics for reply in replies])

        try:
            return await self._part.run_in_thread(compute)
        except NonFiniteUpdate:
            await self._run(RankCommand(name="drop_gradient"))
            raise

    async def recompute_logprobs(self, rows: Sequence[Row]) -> list[Row]:
        def compute() -> list[Row]:
            dealt = self._deal_rows(rows)
            replies = self._run_dealt(dealt, RankCommand(name="recompute"))
            return restore_order(rows, dealt, [reply.rows for reply in replies])

        return await self._part.run_in_thread(compute)

    async def optim_step(self, adam: AdamStep) -> Metrics:
        return (await self._run(RankCommand(name="step", adam=adam))).metrics

    def take_log_ratios(self) -> Mapping[GenerationId, Sequence[float]]:
        taken, self._log_ratios = self._log_ratios, {}
        return taken

    async def publish(self) -> int:
        return self._whole.version  # every step copies the weights to the whole model

    async def snapshot(self) -> Callable[[Path], None]:
        await self._run(RankCommand(name="gather"))
        tensors = self._part.take_gathered()
        return Snapshot(tensors, self._whole.version, is_copied=True).write

    async def save(self, folder: Path) -> None:
        write = await self.snapshot()
        await self._part.run_in_thread(lambda: write(folder))

    async def restore(self, folder: Path) -> None:
        version = await self._part.run_in_thread(lambda: check_checkpoint(folder))
        with boundary(TrainerError, f"cannot read the checkpoint {str(folder)!r}"):
            self._part.check(folder)  # before other ranks change theirs
        await self._run(RankCommand(name="restore", folder=folder, version=version))

    async def start_from(self, folder: Path) -> None:
        """Load the weights of a checkpoint or a PEFT adapter as those before training.

        Raises:
            TrainerError: they do not fit the model; nothing was changed.
        """
        if is_checkpoint(folder):
            await self._part.run_in_thread(lambda: check_checkpoint(folder))
        with boundary(TrainerError, f"cannot start from {str(folder)!r}"):
            self._part.check(folder)
        await self._run(RankCommand(name="start_from", folder=folder))

    async def keep_reference(self) -> None:
        """Keep the weights as they are now as those before training, for `loss.kl`."""
        await self._run(RankCommand(name="keep_reference"))

    async def export(self, folder: Path) -> None:
        def write() -> None:
            with atomic_folder(folder) as to:
                self._whole.write_model(to)

        await self._part.run_in_thread(write)

    async def _run(self, command: RankCommand) -> RankReply:
        """Run a command on all ranks; returns the reply of this one."""
        own = self._part.run
        return await self._part.run_in_thread(
            lambda: self._ranks.run_everywhere(command, lambda: own(command))
        )

    def _deal_rows(self, rows: Sequence[Row]) -> list[list[Row]]:
        check_rows(rows)
        return deal_rows(rows, self._ranks.address.size)

    def _run_dealt(self, dealt: Sequence[Sequence[Row]], command: RankCommand) -> list[RankReply]:
        """Run a command on all ranks, each on its rows; returns all replies, in order."""
        own, *others = (command.model_copy(update={"rows": tuple(part)}) for part in dealt)
        reply, replies = self._ranks.run_together(others, lambda: self._part.run(own))
        return [reply, *replies]


class ModelShard(LocalTrainer):
    """A rank's shard of the model, and its share of the work."""

    def __init__(
        self,
        policy: LocalPolicy,
        address: RankAddress,
        *,
        whole: LocalPolicy | None = None,
        custom_loss: LossFunction | None = None,
    ) -> None:
        """Shard a policy, on all ranks together; `whole` is the model that gets its weights."""
        batches = ShardMicroBatches(policy, address)
        super().__init__(policy, custom_loss=custom_loss, micro_batches=batches)
        self._shards = batches.shards
        self._whole = whole
        self._non_finite: list[NonFiniteUpdate] = []
        self._gathered: Mapping[str, Mapping[str, Tensor]] = {}

    def check(self, folder: Path) -> None:
        """Check that weights fit the model. Raises TrainerError, or what reading them raises."""
        self._shards.check(folder)

    def take_gathered(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return what the command `gather` has gathered at rank 0."""
        taken, self._gathered = self._gathered, {}
        return taken

    def run(self, command: RankCommand) -> RankReply:
        """Run this rank's part of a command, which all ranks run together.

        Raises:
            NonFiniteUpdate: after the last collective.
        """
        match command.name:
            case "forward_backward":
                assert command.loss is not None
                metrics = self._forward_backward(command.rows, command.loss)
                return RankReply(metrics=metrics, log_ratios=self.take_log_ratios())
            case "recompute":
                return RankReply(rows=tuple(self._recompute_logprobs(command.rows)))
            case "step":
                assert command.adam is not None
                metrics = self._optim_step(command.adam)
                self._copy_to_whole()
                return RankReply(metrics=metrics)
            case "gather":
                self._gathered = self._shards.gather_tensors()
            case "restore" | "start_from":
                assert command.folder is not None
                if command.name == "restore":
                    self._shards.restore(command.folder, command.version)
                else:
                    self._shards.start_from(command.folder)
                self._copy_to_whole()
            case "drop_gradient":
                self._shards.drop_gradient()
            case "keep_reference":
                self._shards.keep_reference()
            case _:
                raise TrainerError(f"a shard of the model has no command {command.name!r}")
        return RankReply()

    def _copy_to_whole(self) -> None:
        if self._whole is None:
            self._shards.copy_to(None)
            return
        with self._whole.update(self._policy.version):
            self._shards.copy_to(self._whole.get_trainable())

    def _forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        self._non_finite = []
        metrics = super()._forward_backward(rows, loss)
        if self._non_finite:
            raise self._non_finite[0]
        return metrics

    def _train_tree(self, tree: PrefixTree[Row], loss: LossConfig) -> dict[str, float]:
        if tree is IDLE_TREE:
            if loss.kl:
                self._compute_reference_logprobs(tree)
            scores, _ = self._micro_batches.score_tree(tree)
            self._shards.compute_gradient(0 * scores.logp_N.sum())
            return {}
        try:
            return super()._train_tree(tree, loss)
        # Raised later: other ranks wait for this one in the next passes.
        except NonFiniteUpdate as error:
            self._non_finite.append(error)
            return {}

    def _compute_reference_logprobs(self, tree: PrefixTree[Row]) -> Tensor:
        if not self._shards.has_reference:
            return super()._compute_reference_logprobs(tree)
        with torch.no_grad(), self._shards.use_reference():
            scores, _ = self._micro_batches.score_tree(tree)
            return scores.logp_N


class ShardMicroBatches(MicroBatches):
    """Passes of a sharded model, the same number on each rank."""

    def __init__(self, policy: LocalPolicy, address: RankAddress) -> None:
        self._pass = shard_policy(policy, address.size)
        # FSDP prepares itself in its first pass, which must not be one of the reference.
        with torch.no_grad():
            ids_11 = torch.zeros(1, 1, dtype=torch.int64, device=policy.device)
            self._run_pass(lambda: policy.body(input_ids=ids_11, use_cache=False))
        self.shards = ShardWeights(policy, address)
        super().__init__(policy, address.threads, self.shards)

    def run(self, rows: Sequence[R], run_tree: Callable[[PrefixTree[R]], T]) -> Generator[T]:
        trees = self._build_trees(rows)
        passes = torch.tensor(len(trees), device=self._policy.device)
        dist.all_reduce(passes, dist.ReduceOp.MAX)
        try:
            for tree in trees:
                yield self._run_tree(tree, run_tree)
            for _ in range(int(passes) - len(trees)):
                run_tree(cast(PrefixTree[R], IDLE_TREE))
        except BaseException:
            self.weights.drop_gradient()
            raise

    def score_tree(
        self, tree: PrefixTree[Row], *, entropy_grad: bool = False
    ) -> tuple[PolicyScores, Batch]:
        plain = super().score_tree
        return self._run_pass(lambda: plain(tree, entropy_grad=entropy_grad))

    def _run_pass(self, compute: Callable[[], T]) -> T:
        return cast(T, self._pass(compute))

    def _run_tree(self, tree: PrefixTree[R], run_tree: Callable[[PrefixTree[R]], T]) -> T:
        try:
            return run_tree(tree)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise TrainerError(
                f"out of memory on a pass of {tree.size} tokens of a sharded model, which all "
                "ranks run together: resume the run with trainer.micro_batch_tokens of "
                f"{max(64, tree.size // 2)} or less, or set trainer.gradient_checkpointing"
            ) from error
