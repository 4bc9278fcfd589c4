"""Every error we raise, and `boundary`, which wraps errors of foreign code.

    WhetError
    ├── ConfigError            the user can fix it; the command line prints it in one line
    │   └── MissingExtra       an optional dependency is not installed
    ├── StoreError
    │   ├── NotFound
    │   ├── StoreClosed        closed in this process or by its server
    │   └── LeaseLost          the attempt has ended, or another worker or trainer owns the work
    ├── RequestError           the agent's request cannot be served; never retried
    │   └── PromptTooLong      the prompt leaves no room to sample
    ├── EngineError            sampling failed; another attempt may succeed
    │   └── EngineBusy         the request queue is full
    ├── TrainerError
    │   └── NonFiniteUpdate    the loss or its gradient is not finite; nothing was changed
    ├── RunFailed              a run ended without training: all rollouts failed, or no signal
    │   └── DriverFailed       the user's @whet.algorithm function raised
    └── AttemptError           data, not a crash: stored on the attempt, the run goes on
        ├── AgentFailed        the user's code raised
        ├── AttemptTimeout
        └── BadReward          the agent returned no finite number
            └── JudgeFailed    its judge gave no valid verdict

An error takes only its message, so that it can be pickled.
"""

import json
from collections.abc import Generator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self


class WhetError(Exception):
    """Anything whet raises on purpose."""

    command_text = ""
    """The message with flags and commands where its own has parameters; empty if they are equal."""

    @classmethod
    def phrase(cls, *, python: str, command: str) -> Self:
        """Build an error with one message for Python, and one for the command line."""
        error = cls(python)
        error.command_text = command
        return error


class ConfigError(WhetError):
    """Invalid input that the user can fix; the message says how."""


class MissingExtra(ConfigError):
    """An optional dependency is not installed."""

    @classmethod
    def build(cls, what: str, extra: str) -> "MissingExtra":
        """Build the error for a feature and the extra it needs."""
        clone = _find_clone()
        where = "" if clone else "in a clone of whet: "  # PyPI has no whet yet
        return cls(
            f"{what} needs an extra that is not installed: {where}pip install -e "
            f"'{clone or '.'}[{extra}]'"
        )


def _find_clone() -> str:
    """The folder that whet is installed from with `pip install -e`; empty for a package."""
    # Imported here: `import whet` has no use for them.
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415
    from urllib.parse import unquote, urlsplit  # noqa: PLC0415

    try:
        origin: dict[str, Any] = json.loads(
            distribution("whet").read_text("direct_url.json") or "{}"
        )
    except PackageNotFoundError:
        return ""
    url = str(origin.get("url", ""))
    editable = origin.get("dir_info", {}).get("editable", False)
    return unquote(urlsplit(url).path) if editable else ""


@contextmanager
def requires_extra(what: str, extra: str) -> Generator[None]:
    """Raise MissingExtra if an import in the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise MissingExtra.build(f"{what} ({error})", extra) from error


class StoreError(WhetError):
    """The store cannot perform an operation."""


class NotFound(StoreError):
    """The store has no such record."""


class StoreClosed(StoreError):
    """The store was closed, or is about to be."""


class LeaseLost(StoreError):
    """The attempt has ended, or another worker or trainer owns the work now."""


class RequestError(WhetError):
    """A model request that cannot be served; never retried."""


class PromptTooLong(RequestError):
    """The prompt leaves no room to sample."""


class EngineError(WhetError):
    """Sampling failed; another attempt may succeed."""


class EngineBusy(EngineError):
    """The engine's request queue is full."""


class TrainerError(WhetError):
    """A training step failed."""


class NonFiniteUpdate(TrainerError):
    """An update that would not leave finite weights; it was dropped and nothing was changed."""


class RunFailed(WhetError):
    """A run ended without training: every rollout of a step failed, or nothing had a signal."""


class DriverFailed(RunFailed):
    """The user's @whet.algorithm function raised; its error is the cause."""

    traceback = ""
    """Traceback of the function's exception, without our own frames."""


class AttemptError(WhetError):
    """An attempt failed: recorded with its reason, and the run goes on."""

    traceback = ""
    """Traceback of the agent's exception, if it raised one."""


class AgentFailed(AttemptError):
    """The user's code raised."""


class AttemptTimeout(AttemptError):
    """The attempt exceeded its time limit."""


class BadReward(AttemptError):
    """The agent returned no finite number as its reward."""


class JudgeFailed(BadReward):
    """A judge gave no valid verdict."""


class boundary:
    """Context manager that wraps exceptions of foreign code in one of our errors, in one line.

    An error of ours passes through: it was wrapped by a narrower boundary.
    """

    # Entered for every call and commit; a generator-based manager takes three times as long.
    __slots__ = ("_error", "_what")

    def __init__(self, error: type[WhetError], what: str) -> None:
        self._error = error
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        cause: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(cause, Exception) and not isinstance(cause, WhetError):
            message = " ".join(str(cause).split())
            raise self._error(f"{self._what}: {type(cause).__name__}: {message}") from cause
