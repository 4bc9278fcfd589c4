"""Types of an archive's columns: the store reads most of them back without a check."""

import json
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    FiniteFloat,
    JsonValue,
    Strict,
    create_model,
)

from whet.store.codec import parse_rollout
from whet.types import (
    Failure,
    Mode,
    Name,
    Origin,
    Outcome,
    Sampling,
    Span,
    Status,
    StopReason,
    Target,
)

_TEXT = Annotated[str, Strict()]
_BLOB = Annotated[bytes, Strict()]
_INT64 = Annotated[int, Strict(), Field(ge=-(2**63), lt=2**63)]
_FLOAT = Annotated[float, Strict()]
_FINITE = Annotated[FiniteFloat, Strict()]


def _parse_json(text: object) -> JsonValue:
    if text is None:
        return None
    if not isinstance(text, str):
        raise ValueError("expected JSON text")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("too deep") from error


_JSON = BeforeValidator(_parse_json)

COLUMNS: dict[str, Any] = {  # Any: annotations
    "id": _TEXT,
    "name": Name,
    "mode": Mode,
    "status": Status,
    "grp": _TEXT,
    "worker": _TEXT,
    "key": _TEXT,
    "trace": _TEXT,
    "parent": Annotated[str | None, Strict()],
    "root": _TEXT,
    "stop": StopReason,
    "checkpoint": Annotated[_TEXT, Field(pattern=r"^([A-Za-z0-9][A-Za-z0-9_.-]*)?$")],
    "prompt_digest": _TEXT,
    "prompt_suffix": _BLOB,
    "versions": _BLOB,
    "tokens": _BLOB,
    "logprobs": _BLOB,
    "priority": _INT64,
    "attempts": _INT64,
    "tries_left": _INT64,
    "retry_lost": _INT64,
    "pruned": _INT64,
    "number": _INT64,
    "version": _INT64,
    "step": _INT64,
    "position": _INT64,
    "prompt_length": _INT64,
    "created": _FLOAT,
    "started": _FLOAT,
    "reported": _FLOAT,
    "seen": _FLOAT,
    "due": _FLOAT,
    "ended": Annotated[float | None, Strict()],
    "lease_until": Annotated[float | None, Strict()],
    "reward": Annotated[FiniteFloat | None, Strict()],
    "failure": Annotated[Failure | None, _JSON],
    "resources": Annotated[dict[str, int] | None, _JSON],
    "messages": Annotated[list[Any], _JSON],
    "message": Annotated[dict[str, Any], _JSON],
    "origin": Annotated[Origin, _JSON],
    "sampling": Annotated[Sampling, _JSON],
    "outcome": Annotated[Outcome, _JSON],
    "target": Annotated[Target | None, _JSON],
    "metrics": Annotated[dict[str, float], _JSON],
    "advantages": Annotated[dict[str, float], _JSON],
    "rollout.id": Name,
    "rollout.body": Annotated[_TEXT, AfterValidator(parse_rollout)],
    "span.body": Annotated[Span, _JSON],
    "reward.value": _FINITE,
    "resource.value": Annotated[Any, _JSON],
    "consumed.rollout": Name,
    "worker.name": _TEXT,
}
"""Types of columns by name; of one in a table of its own where tables differ."""


def build_row_model(
    table: str, columns: Sequence[str], references: Sequence[str]
) -> type[BaseModel]:
    """Build the model of a table's rows, which checks all columns but references to other rows."""
    fields: dict[str, Any] = {  # Any: pairs of annotation and default
        column: (COLUMNS.get(f"{table}.{column}", COLUMNS.get(column)), ...)
        for column in columns
        if column not in references
    }
    return create_model(table, **fields)
