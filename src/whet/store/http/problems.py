"""Errors as they are told over HTTP, and as they are understood again."""

from typing import NamedTuple

from pydantic import ValidationError

from whet.errors import LeaseLost, NotFound, StoreClosed, StoreError
from whet.types import Value

FAULTS = {"OSError", "DatabaseError", "InterfaceError"}
OF_INPUT = {"DataError", "IntegrityError"}
"""By name, as PEP 249 has them for every database's driver."""


class Problem(Value):
    """Why something was not done."""

    code: str
    """`not_found`, `lease_lost`, `refused`, or of the request itself: `unauthorized`, `invalid`,
    `too_large`, `too_slow`, `no_such_path`, `wrong_method`, `unavailable`."""
    message: str


class Malformed(StoreError):
    """The body is not what it says it is."""


class Unauthorized(StoreError):
    """The token is missing or wrong."""


class TooLarge(StoreError):
    """The body is larger than we read."""


class TooSlow(StoreError):
    """The body did not arrive in time."""


class WrongEncoding(StoreError):
    """The body is packed in a way we do not know."""


KINDS: list[tuple[type[StoreError], int, str]] = [
    (Unauthorized, 401, "unauthorized"),
    (NotFound, 404, "not_found"),
    (LeaseLost, 409, "lease_lost"),
    (StoreClosed, 503, "unavailable"),
    (TooLarge, 413, "too_large"),
    (TooSlow, 408, "too_slow"),
    (WrongEncoding, 415, "wrong_encoding"),
    (Malformed, 400, "malformed"),
    (StoreError, 409, "refused"),
]
"""How our errors are told: the first that fits."""

BY_CODE: dict[str, type[StoreError]] = {"not_found": NotFound, "lease_lost": LeaseLost}


class Told(NamedTuple):
    """An error as it is told."""

    status: int
    problem: Problem


def is_fault(error: StoreError) -> bool:
    """Whether the database failed: the same may succeed later."""
    names = {kind.__name__ for kind in type(error.__cause__).__mro__}
    failed = bool(names & FAULTS) and not names & OF_INPUT
    return isinstance(error, StoreClosed) or (type(error) is StoreError and failed)


def tell(error: StoreError | ValidationError) -> Told:
    """Status and body of the answer."""
    if isinstance(error, ValidationError):
        return Told(422, Problem(code="invalid", message=_first(error)))
    if is_fault(error):
        return Told(503, Problem(code="unavailable", message=str(error)))
    if isinstance(error.__cause__, ValidationError):
        return Told(422, Problem(code="invalid", message=str(error)))
    status, code = next((status, code) for kind, status, code in KINDS if isinstance(error, kind))
    return Told(status, Problem(code=code, message=str(error)))


def error_of(problem: Problem) -> StoreError:
    """The error that a client raises."""
    return BY_CODE.get(problem.code, StoreError)(problem.message)


def _first(error: ValidationError) -> str:
    """The first thing that is wrong with a request, and where."""
    first, *others = error.errors(include_url=False, include_context=False, include_input=False)
    where = ".".join(str(part) for part in first["loc"]) or "the request"
    more = f", and {len(others)} more" if others else ""
    return f"{where}: {first['msg']}{more}"
