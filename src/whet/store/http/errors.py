"""Errors over HTTP: status and body of a response, and the error that a client raises for it."""

from typing import NamedTuple

from pydantic import ValidationError

from whet.errors import LeaseLost, NotFound, StoreClosed, StoreError
from whet.types import Value

FAULTS = {"OSError", "DatabaseError", "InterfaceError"}
INPUT_FAULTS = {"DataError", "IntegrityError"}
"""By name, as PEP 249 has them for the driver of every database."""


CODES = {
    400: "malformed",
    401: "unauthorized",
    404: "no_such_path",
    405: "wrong_method",
    408: "too_slow",
    413: "too_large",
    415: "wrong_encoding",
}
"""Codes of requests that are refused before they reach the store, by status."""


class ErrorDetail(Value):
    """Code and message of an error."""

    code: str
    """`not_found`, `lease_lost`, `refused`, `invalid`, `unavailable`, or one of `CODES`."""
    message: str


class ErrorBody(Value):
    """The body of every response that is not a success."""

    error: ErrorDetail


class HttpError(NamedTuple):
    """An error as a response."""

    status: int
    detail: ErrorDetail


class RefusedRequest(StoreError):
    """A request that the server refuses before it reaches the store."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def is_fault(error: StoreError) -> bool:
    """Whether the database failed, so that the same may succeed later."""
    names = {kind.__name__ for kind in type(error.__cause__).__mro__}
    failed = bool(names & FAULTS) and not names & INPUT_FAULTS
    return isinstance(error, StoreClosed) or (type(error) is StoreError and failed)


def to_http(error: StoreError | ValidationError) -> HttpError:
    """Return the status and body for an error."""
    match error:
        case ValidationError():
            return HttpError(422, ErrorDetail(code="invalid", message=_describe_first(error)))
        case RefusedRequest():
            status, code = error.status, CODES[error.status]
        case _ if is_fault(error):
            status, code = 503, "unavailable"
        case StoreError(__cause__=ValidationError()):
            status, code = 422, "invalid"
        case NotFound():
            status, code = 404, "not_found"
        case LeaseLost():
            status, code = 409, "lease_lost"
        case _:
            status, code = 409, "refused"
    return HttpError(status, ErrorDetail(code=code, message=str(error)))


def from_http(detail: ErrorDetail) -> StoreError:
    """Return the error that a client raises."""
    kinds = {"not_found": NotFound, "lease_lost": LeaseLost}
    return kinds.get(detail.code, StoreError)(detail.message)


def _describe_first(error: ValidationError) -> str:
    """Name the first wrong field of a request, and what is wrong with it."""
    first, *others = error.errors(include_url=False, include_context=False, include_input=False)
    where = ".".join(str(part) for part in first["loc"]) or "the request"
    more = f", and {len(others)} more" if others else ""
    return f"{where}: {first['msg']}{more}"
