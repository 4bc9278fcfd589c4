"""The collector of a run: rollouts through the queue, and groups that a judge ranks."""

from collections.abc import Callable, Mapping
from typing import Literal

from whet.config import RunConfig
from whet.errors import ConfigError
from whet.protocols import Collector, Store
from whet.runners.collector import QueueCollector
from whet.runners.judges.group_ranking import JudgedCollector
from whet.runners.judges.judge import Judge
from whet.types import Endpoint


def open_collector(
    config: RunConfig,
    store: Store,
    versions: Mapping[str, int | Literal["latest"]],
    judge: Judge | None,
    endpoint: Endpoint | None,
    on_ended: Callable[[int], None] | None,
) -> Collector:
    """The collector of a run; a judge ranks its groups. Raises ConfigError if that has no model."""
    collector = QueueCollector(
        queue=store,
        log=store,
        resources=versions,
        failure_reward=config.failure_reward,
        on_ended=on_ended,
    )
    if judge is None:
        return collector
    if judge.needs_gateway() and endpoint is None:
        raise ConfigError(
            "the judge that ranks groups has no base_url: give it one, or set gateway.judge in "
            "a run of one process"
        )
    return JudgedCollector(collector=collector, judge=judge, spans=store, endpoint=endpoint)
