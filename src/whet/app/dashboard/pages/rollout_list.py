"""Pages of rollouts and groups, filtered and sorted in the database."""

import itertools
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue

from whet.app.dashboard.pages.payload import describe_task
from whet.app.dashboard.run_catalog import OpenedRun
from whet.protocols import Store
from whet.runners.judges.group_ranking import is_ranking
from whet.store.queries import rollout_pages
from whet.store.queries.rollout_pages import GroupRow, PageCursor, RolloutFilter, RolloutRow
from whet.types import AttemptId

EXCERPT = 300
"""Characters of a task in a list."""
CURSOR = r"^\d{1,18}(,-?\d{1,20}(\.\d{1,20})?(e[+-]?\d{1,3})?)?$"
"""A place in the list: a number of order, and for some orders a reward."""
MAX_JUDGED = 4
"""Groups of a page whose spans are read for the scores of a judge."""


class RolloutQuery(BaseModel):
    """Query of a page of rollouts."""

    model_config = ConfigDict(extra="forbid")

    status: Literal["queued", "running", "succeeded", "failed"] | None = None
    mode: Literal["train", "val", "test"] | None = None
    group: Annotated[str, Field(max_length=500)] | None = None
    step: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Counted from 1."""
    agent: Annotated[str, Field(max_length=200)] | None = None
    policy: Annotated[str, Field(max_length=200)] | None = None
    text: Annotated[str, Field(max_length=200)] | None = None
    min_reward: FiniteFloat | None = None
    max_reward: FiniteFloat | None = None
    forked: bool = False
    task: Annotated[str, Field(max_length=500)] | None = None
    """Id of a rollout: only rollouts with the same task are listed."""
    order: rollout_pages.Order = "newest"
    after: Annotated[str, Field(pattern=CURSOR)] | None = None
    """Cursor that the previous page returned."""
    limit: Annotated[int, Field(ge=1, le=200)] = 50

    def build_filter(self, task: JsonValue = None) -> RolloutFilter:
        """Build the filter of this query; `task` is the task of the rollout it names."""
        return RolloutFilter(
            status=self.status,
            mode=self.mode,
            group=self.group,
            step=None if self.step is None else self.step - 1,
            agent=self.agent,
            policy=self.policy,
            text=self.text,
            task=task,
            min_reward=self.min_reward,
            max_reward=self.max_reward,
            forked=self.forked,
        )


class GroupQuery(BaseModel):
    """Query of a page of groups."""

    model_config = ConfigDict(extra="forbid")

    mode: Literal["train", "val", "test"] = "train"
    step: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    before: Annotated[int, Field(ge=0, lt=2**62)] | None = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50


async def read_rollouts(run: OpenedRun, query: RolloutQuery) -> dict[str, object]:
    """Return a page of rollouts, and the cursor of the next one. Raises NotFound.

    The first page has their number, and whether a judge adds to their rewards.

    A page with a cursor may have fewer rollouts than `limit`: its search was cut short.
    """
    task = None
    if query.task is not None:
        task = (await run.store.browse(rollout_pages.read_rollout, query.task)).task
    where = query.build_filter(task)
    page = await run.store.browse(
        rollout_pages.read_page,
        where,
        order=query.order,
        after=_parse_cursor(query.after),
        limit=query.limit,
    )
    is_first = query.after is None
    rows = [serialize_row(row) for row in page.rows]
    count = rollout_pages.count_page
    return {
        "rollouts": rows,
        "next": page.next and _encode_cursor(page.next),
        "searched": page.searched,
        "total": await run.store.browse(count, where, query.order) if is_first else None,
        "judged": await is_judged(run.store, page.rows) if is_first else None,
    }


async def is_judged(store: Store, rows: Sequence[RolloutRow]) -> bool:
    """Whether a judge scored one of the first groups: training adds its scores to the rewards."""
    ended = {row.group: row for row in rows if row.step is not None and row.status == "succeeded"}
    for row in itertools.islice(ended.values(), MAX_JUDGED):
        spans = await store.spans(AttemptId(f"{row.id}.{row.attempts}"))
        if any(map(is_ranking, spans)):
            return True
    return False


def serialize_row(row: RolloutRow | GroupRow) -> dict[str, object]:
    """Return a rollout or a group as its list shows it."""
    step = None if row.step is None else row.step + 1
    return {**row._asdict(), "task": describe_task(row.task, EXCERPT), "step": step}


async def read_groups(run: OpenedRun, query: GroupQuery) -> dict[str, object]:
    """Return a page of groups, the newest first."""
    rows = await run.store.browse(
        rollout_pages.read_groups,
        mode=query.mode,
        step=None if query.step is None else query.step - 1,
        before=query.before,
        limit=query.limit + 1,
    )
    page = rows[: query.limit]
    return {
        "groups": [serialize_row(row) for row in page],
        "next": page[-1].seq if len(rows) > query.limit else None,
    }


def _encode_cursor(last: PageCursor) -> str:
    return str(last.seq) if last.reward is None else f"{last.seq},{last.reward!r}"


def _parse_cursor(text: str | None) -> PageCursor | None:
    if text is None:
        return None
    seq, _, reward = text.partition(",")
    return PageCursor(int(seq), float(reward) if reward else 0.0)
