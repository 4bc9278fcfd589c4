"""What a server counts, in Prometheus' text format."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from itertools import accumulate

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)

COUNTERS = {
    "claims": "Attempts that were given to workers.",
    "outcomes": "Attempts that were reported to have ended, by how.",
    "late_outcomes": "Reports that came too late and were refused.",
    "heartbeats": "Leases that were kept.",
    "calls": "Calls that were recorded.",
    "sampled_tokens": "Tokens that were sampled in them.",
    "rewards": "Rewards that were recorded.",
    "spans": "Spans that were recorded.",
    "rejected_spans": "Spans that came over OTLP and belong to no attempt.",
}

Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Counters since the server started."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[Labels]] = {name: Counter() for name in COUNTERS}
        self.requests = Counter[Labels]()
        """By endpoint and status."""
        self._took = defaultdict[str, list[int]](lambda: [0] * (len(BUCKETS_S) + 1))
        self._took_s = defaultdict[str, float](float)

    def count(self, name: str, by: int = 1, **labels: str) -> None:
        """Add to a counter."""
        self._counts[name][tuple(labels.items())] += by

    def request(self, endpoint: str, status: int, took_s: float) -> None:
        """Count a request that was answered."""
        self.requests[("endpoint", endpoint), ("status", str(status))] += 1
        self._took[endpoint][bisect_left(BUCKETS_S, took_s)] += 1
        self._took_s[endpoint] += took_s

    def text(
        self,
        *,
        rollouts: Mapping[Labels, float],
        workers: Mapping[Labels, float],
        held: int,
        expired_leases: int,
    ) -> str:
        """All counters, and what was looked up."""
        lines = [
            *_family("rollouts", "gauge", "Rollouts by run and status.", rollouts),
            *_family("workers", "gauge", "Workers that are alive, by run.", workers),
            *_family("held_requests", "gauge", "Requests that wait for something.", {(): held}),
            *_family(
                "expired_leases_total",
                "counter",
                "Leases that ran out and cost a worker its attempt.",
                {(): expired_leases},
            ),
            *self._counters(),
        ]
        return "".join(f"{line}\n" for line in lines)

    def _counters(self) -> Iterator[str]:
        for name, says in COUNTERS.items():
            yield from _family(f"{name}_total", "counter", says, self._counts[name] or {(): 0})
        yield from _family("requests_total", "counter", "Requests by status.", self.requests)
        yield from _head("request_seconds", "histogram", "How long requests took.")
        for endpoint, counts in self._took.items():
            mine = ("endpoint", endpoint)
            for bound, count in zip((*BUCKETS_S, "+Inf"), accumulate(counts), strict=True):
                yield _sample("request_seconds_bucket", (mine, ("le", str(bound))), count)
            yield _sample("request_seconds_sum", (mine,), self._took_s[endpoint])
            yield _sample("request_seconds_count", (mine,), sum(counts))


def _family(name: str, kind: str, says: str, samples: Mapping[Labels, float]) -> Iterator[str]:
    yield from _head(name, kind, says)
    for labels, value in samples.items():
        yield _sample(name, labels, value)


def _head(name: str, kind: str, says: str) -> Iterator[str]:
    yield f"# HELP whet_store_{name} {says}"
    yield f"# TYPE whet_store_{name} {kind}"


def _sample(name: str, labels: Labels, value: float) -> str:
    # No label of ours has a character that would have to be escaped: names and closed sets.
    inside = ",".join(f'{label}="{text}"' for label, text in labels)
    return f"whet_store_{name}{{{inside}}} {value}" if labels else f"whet_store_{name} {value}"
