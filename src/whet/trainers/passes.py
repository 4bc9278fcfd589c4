"""Forward and backward passes over packed sequences, as many at once as memory holds."""

import logging
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar, cast

import torch
from anyio import to_thread
from torch import Tensor

from whet.errors import TrainerError, boundary
from whet.policies.attention import runs_flash
from whet.policies.local import LocalPolicy
from whet.trainers.batch import Batch
from whet.trainers.scoring import Scores, score
from whet.trainers.tree import ENOUGH, R, Tree, pack
from whet.trainers.weights import TrainedWeights

logger = logging.getLogger(__name__)

T = TypeVar("T")

SMALLEST_MICRO_BATCH = 64


class Passes:
    """A policy, its trained weights, and how much of it fits into memory."""

    def __init__(self, policy: LocalPolicy, threads: int | None) -> None:
        self.weights = TrainedWeights(policy)
        self._policy = policy
        self._threads = threads
        self._most_tokens = policy.config.micro_batch_tokens or policy.micro_batch_tokens()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Do work that takes long, on as many cores as it may have."""

        def on_all_cores() -> T:
            if self._threads:
                torch.set_num_threads(self._threads)
            with boundary(TrainerError, "training failed"):
                return work()

        return await to_thread.run_sync(on_all_cores)

    def each(self, rows: Sequence[R], one_tree: Callable[[Tree[R]], T]) -> Generator[T]:
        """What `one_tree` makes of the rows, some at a time; it does a tree wholly or not at all.

        Whatever fails, the gradient is dropped: half of one is worse than none.
        """
        waiting: Sequence[Tree[R]] = self._trees(rows)
        try:
            while waiting:
                done, found = self._attempt(waiting[0], one_tree)
                if not done:  # with less at once from here on
                    left: list[R] = [row for tree in waiting for row, _ in tree.rows]
                    waiting = self._trees(left)
                    continue
                waiting = waiting[1:]
                yield cast(T, found)
        except BaseException:
            self.weights.drop_gradient()
            raise

    def hidden(self, tree: Tree[R]) -> Tensor:
        """The last hidden state of each node."""
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
        return cast(Tensor, output.last_hidden_state)[0]

    def score(self, hidden_LD: Tensor, batch: Batch, *, entropy_slope: bool = False) -> Scores:
        """Scores of a batch's tokens; no other logits are computed."""
        return score(
            hidden_LD.index_select(0, batch.source_N),
            self._policy.head,
            batch.target_N,
            batch.shaping,
            entropy_slope=entropy_slope,
        )

    def _trees(self, rows: Sequence[R]) -> Sequence[Tree[R]]:
        enough = self._most_tokens if self._flash else ENOUGH
        return list(pack(rows, self._most_tokens, enough=enough))

    @property
    def _flash(self) -> bool:
        return runs_flash(self._policy.device, self._policy.dtype)

    def _attempt(self, tree: Tree[R], one_tree: Callable[[Tree[R]], T]) -> tuple[bool, T | None]:
        """One tree; not done if memory ran out, and passes are smaller from then on."""
        try:
            return True, one_tree(tree)
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
        return False, None


def _out_of_memory(error: RuntimeError | MemoryError) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return "can't allocate memory" in str(error)  # how torch says it of a CPU


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
