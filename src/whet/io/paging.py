"""All rollouts of a run, a page at a time."""

from collections.abc import AsyncGenerator

from whet.protocols import Listings
from whet.types import Mode, RolloutRecord, Status

PAGE = 256
"""Rollouts read at a time."""


async def iterate_pages(
    listings: Listings, *, mode: Mode | None = None, status: Status | None = None
) -> AsyncGenerator[list[RolloutRecord]]:
    """Yield the rollouts of a run as enqueued, page by page."""
    after: str | None = None
    while page := await listings.rollouts(mode=mode, status=status, after=after, limit=PAGE):
        yield page
        after = page[-1].rollout.id
