"""Prometheus metrics of a store server."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from whet.errors import LeaseLost
from whet.store.queries.listing import Overview
from whet.types import Status

CONTENT_TYPE = CONTENT_TYPE_LATEST

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)

COUNTERS = {
    "claims": "Attempts claimed by workers.",
    "late_outcomes": "Outcomes refused because the attempt had ended.",
    "heartbeats": "Leases renewed.",
    "calls": "Calls recorded.",
    "sampled_tokens": "Tokens sampled in recorded calls.",
    "rewards": "Rewards recorded.",
    "spans": "Spans recorded.",
    "rejected_spans": "Spans received over OTLP that belong to no attempt.",
}


class ServerMetrics:
    """Counters since the server started, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._counters = {name: self._build_counter(name, text) for name, text in COUNTERS.items()}
        self._outcomes = self._build_counter("outcomes", "Attempts ended, by status.", "status")
        self._requests = self._build_counter(
            "requests", "Requests by status.", "endpoint", "status"
        )
        self._seconds = Histogram(
            "whet_store_request_seconds",
            "Duration of requests.",
            ["endpoint"],
            buckets=BUCKETS_S,
            registry=self.registry,
        )

    def count(self, name: str, by: int = 1) -> None:
        """Add to a counter."""
        self._counters[name].inc(by)

    def count_request(self, endpoint: str, status: int, seconds: float) -> None:
        """Count a request that was answered."""
        self._requests.labels(endpoint, str(status)).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def count_call(
        self, name: str, arguments: Mapping[str, Any], result: object
    ) -> None:  # Any: validated
        """Count the effect of a method; `result` is its error if it failed."""
        if isinstance(result, Exception):
            if name == "finish" and isinstance(result, LeaseLost):
                self.count("late_outcomes")
            return
        match name:
            case "claim" if result is not None:
                self.count("claims")
            case "finish":
                failure = arguments["outcome"].failure
                self._outcomes.labels(failure.kind if failure else "succeeded").inc()
            case "heartbeat":
                self.count("heartbeats")
            case "append":
                self.count("calls")
                generations = arguments["call"].generations
                self.count("sampled_tokens", sum(len(each.tokens) for each in generations))
            case "emit":
                self.count("rewards")
            case "record":
                self.count("spans", len(arguments["spans"]))
            case _:
                pass

    def text(self, overview: Overview, held: int, expired_leases: int) -> bytes:
        """Return all counters and the state of the store in Prometheus' text format."""
        state = _State(overview, held, expired_leases)
        return generate_latest(self.registry) + generate_latest(state)

    def _build_counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"whet_store_{name}", text, labels, registry=self.registry)


@dataclass
class _State(Collector):
    """State of the store when metrics are read; a run that was dropped has none."""

    overview: Overview
    held: int
    expired_leases: int

    def collect(self) -> Iterator[Metric]:
        rollouts = GaugeMetricFamily(
            "whet_store_rollouts", "Rollouts by run and status.", labels=["run", "status"]
        )
        workers = GaugeMetricFamily("whet_store_workers", "Live workers by run.", labels=["run"])
        for run, count in self.overview.workers.items():
            workers.add_metric([run], count)
            for status in Status:
                rollouts.add_metric([run, status], self.overview.rollouts.get((run, status), 0))
        yield rollouts
        yield workers
        yield GaugeMetricFamily("whet_store_held_requests", "Long polls in progress.", self.held)
        yield CounterMetricFamily(
            "whet_store_expired_leases",
            "Leases that expired, ending an attempt.",
            self.expired_leases,
        )
