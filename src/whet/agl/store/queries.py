"""Filter, sort and page the results of the store's queries."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel

from whet.agl.store.base import Logic, Order
from whet.agl.types import PaginatedResult

M = TypeVar("M", bound=BaseModel)

Condition = Callable[[Any], bool]
"""Whether a record matches. Any: records of all kinds have conditions."""


def build_conditions(
    *,
    exact: dict[str, str | None] | None = None,
    contains: dict[str, str | None] | None = None,
    within: dict[str, Sequence[str] | None] | None = None,
) -> list[Condition]:
    """Return a condition for every value that is not None."""
    found: list[Condition] = []
    for field, value in (exact or {}).items():
        if value is not None:
            found.append(lambda record, f=field, v=value: getattr(record, f) == v)
    for field, part in (contains or {}).items():
        if part is not None:
            found.append(lambda record, f=field, p=part: p in (getattr(record, f) or ""))
    for field, values in (within or {}).items():
        if values is not None:
            allowed = frozenset(values)
            found.append(lambda record, f=field, a=allowed: getattr(record, f) in a)
    return found


def select_page(
    records: Iterable[M],
    conditions: Sequence[Condition],
    logic: Logic,
    sort_by: str | None,
    sort_order: Order,
    limit: int,
    offset: int,
) -> PaginatedResult[M]:
    """Return the matching records of a page.

    Raises:
        ValueError: the records have no field `sort_by`.
    """
    combine = any if logic == "or" else all
    found = [r for r in records if not conditions or combine(c(r) for c in conditions)]
    if sort_by is not None and found:
        if sort_by not in type(found[0]).model_fields:
            raise ValueError(
                f"cannot sort by {sort_by!r}: {type(found[0]).__name__} has no such field"
            )
        found.sort(key=lambda record: _sort_key(record, sort_by), reverse=sort_order == "desc")
    end = None if limit < 0 else offset + limit
    return PaginatedResult[M].model_construct(
        items=found[offset:end], limit=limit, offset=offset, total=len(found)
    )


def _sort_key(record: BaseModel, field: str) -> tuple[bool, Any]:
    value = getattr(record, field)
    return value is not None, value
