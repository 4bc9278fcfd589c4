"""Protocol of executors, each a way to execute an agent."""

from collections.abc import Mapping
from typing import Protocol

from pydantic import JsonValue

from whet.errors import WhetError
from whet.runners.context import AttemptContext


class Evicted(WhetError):
    """The attempt was stopped because another one blocked the event loop they shared."""


class Executor(Protocol):
    """Runs the agent on attempts: in this process, or in a pool of processes."""

    async def run(self, context: AttemptContext, resources: Mapping[str, JsonValue]) -> float:
        """Run the agent on an attempt within its time limit, and return the reward.

        Canceling this call stops the agent.

        Raises:
            AttemptError: the reason why there is no reward.
            Evicted: the attempt was stopped through no fault of its own.
        """
        ...

    async def close(self) -> None:
        """Stop running attempts and release the resources."""
        ...
