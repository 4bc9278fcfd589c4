"""Training on several GPUs of one machine: a copy of the model on each, one optimizer.

Rank 0 deals the rows of an update to all ranks, which accumulate their gradients; these are summed
at rank 0, which takes the optimizer's step and gives the new weights to the others. The loss is a
sum over tokens, so the gradient is that of one process, up to the order of sums.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import distributed as dist

from whet.config import AdamStep, LossConfig
from whet.errors import TrainerError, WhetError, boundary
from whet.models.huggingface import LocalPolicy
from whet.trainers.local import PASS_TOTALS, LocalTrainer
from whet.trainers.loss import LossFunction
from whet.trainers.master_weights import MasterWeights
from whet.trainers.packing import check_rows
from whet.trainers.parallel.ranks import OwnRank, RankCommand, RankGroup, RankLost, RankReply
from whet.types import Metrics, Row

T = TypeVar("T")


class DataParallelTrainer(LocalTrainer):
    """The trainer of rank 0, which gives each other rank its share of the rows."""

    def __init__(
        self, policy: LocalPolicy, ranks: RankGroup, *, custom_loss: LossFunction | None = None
    ) -> None:
        super().__init__(policy, threads=ranks.address.threads, custom_loss=custom_loss)
        self._ranks = ranks

    async def connect(self) -> None:
        """Connect with the other ranks, and send them this rank's weights."""

        def connect() -> None:
            self._ranks.connect(self._policy.device, lambda: None, shard=False)
            self._share_weights()

        await self.run_in_thread(connect)

    async def keep_reference(self) -> None:
        await self.run_in_thread(self._keep_reference)

    # ----------------------------------------------------------------- in a worker thread

    def _forward_backward(self, rows: Sequence[Row], loss: LossConfig) -> Metrics:
        check_rows(rows)
        own, *parts = deal_rows(rows, self._ranks.address.size)
        commands = [RankCommand(name="forward_backward", rows=tuple(p), loss=loss) for p in parts]
        run_own = super()._forward_backward
        metrics, replies = self._run_independently(commands, lambda: run_own(own, loss))
        for reply in replies:
            for generation, values in reply.log_ratios.items():
                self._log_ratios.setdefault(generation, list(values))
        return merge_metrics([metrics, *(reply.metrics for reply in replies)])

    def _recompute_logprobs(self, rows: Sequence[Row]) -> list[Row]:
        check_rows(rows)
        own, *parts = dealt = deal_rows(rows, self._ranks.address.size)
        commands = [RankCommand(name="recompute", rows=tuple(part)) for part in parts]
        run_own = super()._recompute_logprobs
        computed, replies = self._run_independently(commands, lambda: run_own(own))
        return restore_order(rows, dealt, [computed, *(reply.rows for reply in replies)])

    def _optim_step(self, adam: AdamStep) -> Metrics:
        self._ranks.run_everywhere(
            RankCommand(name="reduce_gradient"), lambda: reduce_gradient(self._weights, rank=0)
        )
        metrics = super()._optim_step(adam)
        self._share_weights()
        return metrics

    def _restore(self, folder: Path) -> None:
        super()._restore(folder)
        self._drop_gradients()
        self._share_weights()

    def _start_from(self, folder: Path) -> None:
        super()._start_from(folder)
        self._share_weights()

    def _keep_reference(self) -> None:
        commands = [RankCommand(name="keep_reference") for _ in self._ranks.others]
        self._run_independently(commands, self._policy.keep_reference)

    def _share_weights(self) -> None:
        command = RankCommand(name="receive_weights", version=self._policy.version)
        self._ranks.run_everywhere(command, lambda: broadcast_weights(self._policy))

    def _run_independently(
        self, commands: Sequence[RankCommand], own: Callable[[], T]
    ) -> tuple[T, list[RankReply]]:
        """Run a command on each other rank and `own` here, without collectives.

        If any of them fails, all accumulated gradients are dropped.
        """
        for rank, command in zip(self._ranks.others, commands, strict=True):
            rank.send(command)
        results: list[T] = []
        replies: list[RankReply] = []
        failures: list[WhetError] = []
        try:
            with boundary(TrainerError, "training failed"):
                results.append(own())
        except WhetError as error:  # raised below, once the other ranks have replied
            failures.append(error)
        for rank in self._ranks.others:
            try:
                replies.append(rank.receive())
            except RankLost:
                self._ranks.stop()
                raise
            except WhetError as error:
                failures.append(error)
        if failures:
            self._drop_gradients()
            raise failures[0]
        return results[0], replies

    def _drop_gradients(self) -> None:
        self._weights.drop_gradient()
        for rank in self._ranks.others:
            rank.send(RankCommand(name="drop_gradient"))
        for rank in self._ranks.others:
            rank.receive()


class RankWorker(LocalTrainer):
    """The trainer of any other rank: runs the commands of rank 0, without an optimizer step."""

    def __init__(
        self, policy: LocalPolicy, own: OwnRank, *, custom_loss: LossFunction | None = None
    ) -> None:
        super().__init__(policy, threads=own.address.threads, custom_loss=custom_loss)
        self._own = own

    def serve(self) -> None:
        """Answer commands until rank 0 closes the channel."""
        self._own.serve(self._run, ends_on_error=False)

    def _run(self, command: RankCommand) -> RankReply:
        match command.name:
            case "forward_backward":
                assert command.loss is not None
                metrics = self._forward_backward(command.rows, command.loss)
                return RankReply(metrics=metrics, log_ratios=self.take_log_ratios())
            case "recompute":
                return RankReply(rows=tuple(self._recompute_logprobs(command.rows)))
            case "drop_gradient":
                self._weights.drop_gradient()
            case "reduce_gradient":
                reduce_gradient(self._weights, rank=self._own.address.rank)
                self._weights.drop_gradient()
            case "receive_weights":
                with self._policy.update(command.version):
                    broadcast_weights(self._policy)
            case "keep_reference":
                self._policy.keep_reference()
            case _:
                raise TrainerError(f"a copy of the model has no command {command.name!r}")
        return RankReply()


def deal_rows(rows: Sequence[Row], parts: int) -> list[list[Row]]:
    """Divide rows into parts of about equal cost in tokens.

    Sorted by their tokens, rows that share a prefix are neighbors: a part computes it once.
    """
    ordered = sorted(rows, key=lambda row: row.tokens)
    costs = list(_count_new_tokens(ordered))
    total, before = sum(costs), 0
    dealt: list[list[Row]] = [[] for _ in range(parts)]
    for row, cost in zip(ordered, costs, strict=True):
        # The middle of a row's tokens decides its part, so that parts are contiguous.
        dealt[min(parts - 1, int((before + cost / 2) * parts / max(1, total)))].append(row)
        before += cost
    return dealt


def restore_order(
    rows: Sequence[Row], dealt: Sequence[Sequence[Row]], results: Sequence[Sequence[Row]]
) -> list[Row]:
    """Return the results of dealt rows in the order that the rows had before they were dealt."""
    pairs = zip(dealt, results, strict=True)
    found = {id(old): new for part, done in pairs for old, new in zip(part, done, strict=True)}
    return [found[id(row)] for row in rows]


def _count_new_tokens(ordered: Sequence[Row]) -> Iterator[int]:
    """Yield for each row the number of tokens after the prefix it shares with the row before."""
    last: tuple[int, ...] = ()
    for row in ordered:
        pairs = enumerate(zip(last, row.tokens, strict=False))
        shared = next((n for n, (a, b) in pairs if a != b), min(len(last), len(row.tokens)))
        yield len(row.tokens) - shared
        last = row.tokens


def merge_metrics(parts: Sequence[Metrics]) -> Metrics:
    """Merge the metrics of parts of the rows: totals add up, means are over trained tokens."""
    sums = {name: sum(part[name] for part in parts) for name in PASS_TOTALS}
    tokens = max(1.0, sums["trained_tokens"])
    means = {
        name: sum(part[name] * part["trained_tokens"] for part in parts) / tokens
        for name in parts[0]
        if name not in PASS_TOTALS
    }
    return {**sums, **means}


def reduce_gradient(weights: MasterWeights, *, rank: int) -> None:
    """Sum the accumulated gradients of all ranks at rank 0, in fp32; the others' are undefined."""
    gradient = weights.get_accumulated()
    detached = weights.detach_weights()
    used = torch.tensor([float(grad is not None) for grad in gradient], device=detached[0].device)
    dist.all_reduce(used)
    summed: list[torch.Tensor | None] = []
    is_used = cast(list[float], used.tolist())
    for grad, weight, count in zip(gradient, detached, is_used, strict=True):
        if not count:  # no rank has a gradient: the optimizer skips such a weight
            summed.append(None)
            continue
        total = torch.zeros_like(weight) if grad is None else grad
        dist.reduce(total, dst=0)
        summed.append(total)
    if rank == 0:
        weights.replace_gradient(summed)


def broadcast_weights(policy: LocalPolicy) -> None:
    """Copy the trainable weights of rank 0 to the other ranks."""
    with torch.no_grad():
        for parameter in policy.get_trainable().values():
            dist.broadcast(parameter.data, src=0)
