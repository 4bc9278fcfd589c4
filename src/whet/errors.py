"""Every error we raise, and the one way foreign failures are named.

    WhetError
    ├── ConfigError            the user can fix it; the command line prints it in one line
    │   └── MissingExtra       an optional dependency is not installed
    ├── StoreError
    │   ├── NotFound
    │   ├── StoreClosed        it was closed, here or where it is served
    │   └── LeaseLost          the attempt has ended or another worker owns it; reported too late
    ├── RequestError           the agent's request cannot be served; never retried
    │   └── PromptTooLong      the prompt leaves no room to sample
    ├── EngineError            sampling failed; another attempt may succeed
    │   └── EngineBusy         too many requests wait already
    ├── TrainerError
    └── AttemptError           data, not a crash: stored on the attempt, the run goes on
        ├── AgentFailed        the user's code raised
        ├── AttemptTimeout
        └── BadReward          the agent gave no finite number

An error takes only its message, so that it survives pickling.
"""

from types import TracebackType


class WhetError(Exception):
    """Anything whet raises on purpose."""


class ConfigError(WhetError):
    """Something the user can fix; the message says how."""


class MissingExtra(ConfigError):
    """An optional dependency is not installed."""

    @classmethod
    def of(cls, what: str, extra: str) -> "MissingExtra":
        return cls(f"{what} needs an extra that is not installed: pip install 'whet[{extra}]'")


class StoreError(WhetError):
    """The store cannot do what was asked."""


class NotFound(StoreError):
    """There is no such thing in the store."""


class StoreClosed(StoreError):
    """The store was closed, or is about to be."""


class LeaseLost(StoreError):
    """The attempt has ended, or another worker owns its rollout now."""


class RequestError(WhetError):
    """A model request that cannot be served as asked; never retried."""


class PromptTooLong(RequestError):
    """The prompt leaves no room to sample."""


class EngineError(WhetError):
    """Sampling failed; another attempt may succeed."""


class EngineBusy(EngineError):
    """Too many requests wait for the engine already."""


class TrainerError(WhetError):
    """A training step cannot be done."""


class AttemptError(WhetError):
    """An attempt failed: recorded with its reason, and the run goes on."""


class AgentFailed(AttemptError):
    """The user's code raised."""


class AttemptTimeout(AttemptError):
    """The attempt outlived its limit."""


class BadReward(AttemptError):
    """The agent gave no finite number as its reward."""


class boundary:
    """Name whatever escapes foreign code after the boundary it crossed, in one line.

    An error of ours passes through: it crossed a narrower boundary first.
    """

    # It stands around every call and every commit: a generator takes three times as long.
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
            said = " ".join(str(cause).split())
            raise self._error(f"{self._what}: {type(cause).__name__}: {said}") from cause
