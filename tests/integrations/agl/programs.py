"""Programs that call every method of the store, for Agent Lightning and for whet.agl alike.

    python tests/integrations/agl/programs.py agentlightning|whet.agl   # prints the answers as JSON

Ids are numbered in the order they appear, and times are `set` or absent, so that the answers of
two libraries can be compared. Imports nothing of either library but the one that is named.
"""

import asyncio
import importlib
import json
import re
import sys
from collections.abc import Awaitable, Callable
from typing import Any

ID = re.compile(r"\b(?:ro|at|rs)-[0-9a-f]{8,12}\b")
TIMES = re.compile(r"time$|^timestamp$")
DROPPED = {"uptime", "name_of_store", "context", "parent", "resource", "trace_id"}


class Answers:
    """The answers of a program, each as plain data."""

    def __init__(self) -> None:
        self.lines: list[Any] = []
        self._ids: dict[str, str] = {}

    def add(self, what: str, value: Any) -> None:
        self.lines.append([what, self._plain(value)])

    async def call(self, what: str, awaitable: Awaitable[Any]) -> Any:
        """Await a call and note its answer, or the kind of its error."""
        try:
            value = await awaitable
        except Exception as error:  # noqa: BLE001 - the kind is the answer
            kind = "ValueError" if isinstance(error, ValueError) else type(error).__name__
            self.lines.append([what, {"error": kind}])
            return None
        self.add(what, value)
        return value

    def _plain(self, value: Any, key: str = "") -> Any:
        if TIMES.search(key) and isinstance(value, (int, float)):
            return "set"
        if hasattr(value, "items") and hasattr(value, "total"):  # a page is one of items
            page = {
                "items": list(value),
                **{k: getattr(value, k) for k in ("limit", "offset", "total")},
            }
            return self._plain(page)
        if hasattr(value, "model_dump"):
            value = value.model_dump()
        if isinstance(value, dict):
            kept = {k: v for k, v in value.items() if k not in DROPPED}
            return {k: self._plain(v, k) for k, v in sorted(kept.items())}
        if isinstance(value, (list, tuple)):
            return [self._plain(each) for each in value]
        if isinstance(value, str):
            return ID.sub(lambda found: self._number(found[0]), value)
        return value

    def _number(self, id: str) -> str:
        kind = id[:2]
        known = sum(each.startswith(kind) for each in self._ids.values())
        return self._ids.setdefault(id, f"{kind}-{known + 1}")


def make_span(agl: Any, rollout: Any, number: int, **attributes: Any) -> Any:
    return agl.Span.from_attributes(
        rollout_id=rollout.rollout_id,
        attempt_id=rollout.attempt.attempt_id,
        sequence_id=number,
        span_id=f"{number:016x}",
        trace_id="0" * 32,
        name=attributes.pop("name", "step"),
        attributes=attributes,
        start_time=1.0,
        end_time=2.0,
    )


async def run_queue(agl: Any, store: Any, out: Answers) -> None:
    """Enqueue, dequeue in order, finish, and read back."""
    await out.call("empty", store.dequeue_rollout())
    first = await out.call("enqueue", store.enqueue_rollout({"q": 1}, mode="train"))
    request = agl.EnqueueRolloutRequest
    await out.call(
        "many",
        store.enqueue_many_rollouts(
            [
                request(input="b", mode="val", metadata={"k": 1}),
                request(input=[3], config=agl.RolloutConfig(max_attempts=3)),
            ]
        ),
    )
    await out.call("query", store.query_rollouts())
    one = await out.call("dequeue", store.dequeue_rollout(worker_id="w1"))
    rest = await out.call("dequeue many", store.dequeue_many_rollouts(limit=5, worker_id="w2"))
    await out.call("empty again", store.dequeue_rollout(worker_id="w1"))
    await out.call(
        "succeed",
        store.update_attempt(one.rollout_id, one.attempt.attempt_id, status="succeeded"),
    )
    await out.call("by id", store.get_rollout_by_id(first.rollout_id))
    await out.call("latest attempt", store.get_latest_attempt(rest[0].rollout_id))
    await out.call("succeeded", store.query_rollouts(status_in=["succeeded"]))
    await out.call(
        "either",
        store.query_rollouts(
            status_in=["succeeded"], rollout_id_in=[rest[0].rollout_id], filter_logic="or"
        ),
    )
    await out.call(
        "both", store.query_rollouts(status_in=["succeeded"], rollout_id_in=[rest[0].rollout_id])
    )
    await out.call("page", store.query_rollouts(limit=1, offset=1))
    await out.call("sorted", store.query_rollouts(sort_by="mode", sort_order="desc", limit=1))
    await out.call("unknown", store.get_rollout_by_id("ro-x"))
    await out.call("started", store.start_rollout({"q": 9}, mode="test", worker_id="w3"))


async def run_updates(agl: Any, store: Any, out: Answers) -> None:
    """Set fields of rollouts and attempts, also to values that are refused."""
    rollout = await store.enqueue_rollout({"q": 1})
    id = rollout.rollout_id
    await out.call("no attempt", store.update_attempt(id, "latest", status="running"))
    await out.call("input", store.update_rollout(id, input={"q": 2}, metadata={"a": 1}))
    await out.call("mode", store.update_rollout(id, mode="val"))
    await out.call("mode none", store.update_rollout(id, mode=None))
    await out.call("config", store.update_rollout(id, config=agl.RolloutConfig(max_attempts=2)))
    await out.call("cancel", store.update_rollout(id, status="cancelled"))
    await out.call("not dequeued", store.dequeue_rollout())
    await out.call("queue again", store.update_rollout(id, status="queuing"))
    taken = await out.call("dequeued", store.dequeue_rollout())
    await out.call("unknown rollout", store.update_attempt("ro-x", "latest", status="failed"))
    await out.call("unknown attempt", store.update_attempt(id, "at-x", status="failed"))
    await out.call("fields", store.update_attempt(id, "latest", worker_id="w", metadata={"gpu": 1}))
    await out.call("late", store.update_attempt(id, taken.attempt.attempt_id, status="failed"))
    await out.call("revived", store.update_attempt(id, "latest", status="succeeded"))
    await out.call("end", store.get_rollout_by_id(id))
    await out.call("bad mode", store.enqueue_rollout(1, mode="other"))
    await out.call("bad status", store.update_attempt(id, "latest", status="gone"))


async def run_spans(agl: Any, store: Any, out: Answers) -> None:
    """Add spans, query them by every filter, and number them."""
    await store.enqueue_rollout({"q": 1})
    rollout = await store.dequeue_rollout(worker_id="w")
    id = rollout.rollout_id
    await out.call("none", store.query_spans(id))
    await out.call("latest of none", store.query_spans("ro-x", "latest"))
    await out.call("add", store.add_span(make_span(agl, rollout, 1, a=1)))
    await out.call("running", store.get_rollout_by_id(id))
    await out.call("duplicate", store.add_span(make_span(agl, rollout, 1, a=1)))
    await out.call("next", store.get_next_span_sequence_id(id, rollout.attempt.attempt_id))
    await out.call(
        "next many", store.get_many_span_sequence_ids([(id, "x"), (id, "y"), ("z", "x")])
    )
    spans = [make_span(agl, rollout, 9, name="llm", ids=[1, 2]), make_span(agl, rollout, 8)]
    await out.call("many", store.add_many_spans(spans))
    await out.call("sorted", store.query_spans(id, "latest"))
    await out.call("by name", store.query_spans(id, name="llm"))
    await out.call("contains", store.query_spans(id, name_contains="l", sort_order="desc"))
    await out.call(
        "or",
        store.query_spans(
            id, name="llm", span_id_contains="8", filter_logic="or", limit=1, offset=1
        ),
    )
    await out.call("other attempt", store.query_spans(id, "at-x"))
    await out.call("after", store.get_next_span_sequence_id(id, rollout.attempt.attempt_id))
    stray = make_span(agl, rollout, 3)
    stray.attempt_id = "at-x"
    await out.call("unknown attempt", store.add_span(stray))


async def run_rewards(agl: Any, store: Any, out: Answers) -> None:
    """Emit rewards without a tracer, store them, and find the final one."""
    await store.enqueue_rollout({"q": 1})
    rollout = await store.dequeue_rollout()
    emitted = [
        agl.emit_reward(0.5, propagate=False),
        agl.emit_reward({"a": 1, "b": 0.25}, primary_key="b", propagate=False),
        agl.emit_reward(True, attributes={"note": "x"}, propagate=False),
        agl.emit_annotation({"tags": ["x", "y"], "deep": {"n": 1}}, propagate=False),
        agl.emit_object({"k": [1, 2]}, propagate=False),
        agl.emit_object("text", propagate=False),
    ]
    for number, core in enumerate(emitted):
        out.add(f"emit {number}", core)
        span = agl.Span.from_core_fields(
            core,
            rollout_id=rollout.rollout_id,
            attempt_id=rollout.attempt.attempt_id,
            sequence_id=number + 1,
        )
        await store.add_span(span)
    spans = list(await store.query_spans(rollout.rollout_id))
    out.add("values", [agl.get_reward_value(span) for span in spans])
    out.add("rewards", [agl.get_rewards_from_span(span) for span in spans])
    out.add("final", agl.find_final_reward(spans))
    out.add("found", len(agl.find_reward_spans(spans)))
    out.add("objects", [agl.get_object_value(span) for span in spans[-2:]])
    for bad in ({"a": "x"}, {"a": 1.0}, "x"):
        try:
            agl.emit_reward(bad, propagate=False)
        except (TypeError, ValueError) as error:
            out.add(f"bad {bad}", type(error).__name__)
    try:
        agl.emit_reward(1.0)
    except RuntimeError as error:
        out.add("no tracer", type(error).__name__)


async def run_resources(agl: Any, store: Any, out: Answers) -> None:
    """Add resources, replace them, and see which a rollout gets."""
    await out.call("none", store.get_latest_resources())
    await out.call("without", store.enqueue_rollout(1))
    llm = agl.LLM(endpoint="http://h/v1", model="m", sampling_parameters={"temperature": 0.5})
    template = agl.PromptTemplate(template="Say {x}", engine="f-string")
    first = await out.call("add", store.add_resources({"llm": llm, "prompt": template}))
    await out.call("with", store.enqueue_rollout(2))
    proxy = agl.ProxyLLM(endpoint="http://h/v1", model="m", api_key="k")
    await out.call("own id", store.update_resources("mine", {"llm": proxy}))
    await out.call("latest", store.get_latest_resources())
    await out.call("again", store.update_resources(first.resources_id, {"llm": llm}))
    await out.call("latest again", store.get_latest_resources())
    await out.call("by id", store.get_resources_by_id("mine"))
    await out.call("unknown", store.get_resources_by_id("other"))
    await out.call("all", store.query_resources())
    await out.call("contains", store.query_resources(resources_id_contains="in"))
    await out.call("explicit", store.enqueue_rollout(3, resources_id="mine"))
    out.add("format", template.format(x="hi"))
    out.add("url", proxy.get_base_url("ro", "at"))
    out.add("root", proxy.get_base_url(None, None))


async def run_workers(agl: Any, store: Any, out: Answers) -> None:
    """Follow workers from idle to busy and back."""
    await out.call("heartbeat", store.update_worker("w1", {"cpu": 1}))
    await out.call("idle", store.dequeue_rollout(worker_id="w1"))
    await out.call("worker", store.get_worker_by_id("w1"))
    await store.enqueue_rollout(1)
    rollout = await store.dequeue_rollout(worker_id="w1")
    await out.call("busy", store.get_worker_by_id("w1"))
    await store.update_attempt(rollout.rollout_id, "latest", status="succeeded")
    await out.call("done", store.get_worker_by_id("w1"))
    await store.start_attempt(rollout.rollout_id, worker_id="w2")
    await out.call("second", store.get_worker_by_id("w2"))
    await out.call("busy ones", store.query_workers(status_in=["busy"]))
    await out.call("named", store.query_workers(worker_id_contains="1"))
    await out.call("unknown", store.get_worker_by_id("w9"))
    statistics = await store.statistics()
    out.add(
        "counts",
        {k: v for k, v in statistics.items() if k.startswith("total_") and "bytes" not in k},
    )


async def run_retries(agl: Any, store: Any, out: Answers) -> None:
    """Retry failed attempts up to the limit, at the end of the queue, and by hand."""
    config = agl.RolloutConfig(max_attempts=2, retry_condition=["failed"])
    rollout = await store.enqueue_rollout("retried", config=config)
    await store.enqueue_rollout("other")
    id = rollout.rollout_id
    for number in range(2):
        taken = await out.call(f"dequeue {number}", store.dequeue_rollout())
        if taken.rollout_id != id:
            taken = await out.call("then", store.dequeue_rollout())
        await store.update_attempt(id, taken.attempt.attempt_id, status="failed")
        await out.call(f"failed {number}", store.get_rollout_by_id(id))
    await out.call("attempts", store.query_attempts(id))
    await out.call("reversed", store.query_attempts(id, sort_order="desc", limit=1))
    await out.call("by hand", store.start_attempt(id))
    await out.call("unknown", store.start_attempt("ro-x"))
    await out.call("end", store.get_rollout_by_id(id))


async def run_timeouts(agl: Any, store: Any, out: Answers) -> None:
    """Let attempts exceed their time, or send nothing, and revive one with a span."""
    config = agl.RolloutConfig
    cases = {
        "timeout": config(timeout_seconds=0.05),
        "retried": config(timeout_seconds=0.05, max_attempts=2, retry_condition=["timeout"]),
        "unresponsive": config(unresponsive_seconds=0.05),
    }
    rollouts = {}
    for name, each in cases.items():
        await store.enqueue_rollout(name, config=each)
        rollouts[name] = await store.dequeue_rollout(worker_id=name)
    await asyncio.sleep(0.1)
    for name, rollout in rollouts.items():
        await out.call(name, store.get_rollout_by_id(rollout.rollout_id))
        await out.call(f"worker {name}", store.get_worker_by_id(name))
    silent = rollouts["unresponsive"]
    await out.call("span", store.add_span(make_span(agl, silent, 1)))
    await out.call("attempt", store.get_latest_attempt(silent.rollout_id))
    await out.call("again", store.dequeue_rollout())


async def run_waits(agl: Any, store: Any, out: Answers) -> None:
    """Wait for rollouts that have ended, will end, never end, or do not exist."""
    ids = [(await store.enqueue_rollout(n)).rollout_id for n in range(3)]
    for _ in ids:
        await store.dequeue_rollout()
    await store.update_attempt(ids[0], "latest", status="succeeded")
    await out.call("one", store.wait_for_rollouts(rollout_ids=ids[:1], timeout=0.05))
    await out.call("some", store.wait_for_rollouts(rollout_ids=ids, timeout=0.05))
    await out.call("zero", store.wait_for_rollouts(rollout_ids=ids, timeout=0))
    await out.call("unknown", store.wait_for_rollouts(rollout_ids=["ro-x"], timeout=0.05))
    await store.update_attempt(ids[1], "latest", status="failed")
    await store.update_rollout(ids[2], status="cancelled")
    await out.call("all", store.wait_for_rollouts(rollout_ids=ids, timeout=0.05))
    await out.call("order", store.wait_for_rollouts(rollout_ids=ids[::-1], timeout=0.05))


Program = Callable[[Any, Any, Answers], Awaitable[None]]

PROGRAMS: dict[str, Program] = {
    "queue": run_queue,
    "updates": run_updates,
    "spans": run_spans,
    "rewards": run_rewards,
    "resources": run_resources,
    "workers": run_workers,
    "retries": run_retries,
    "timeouts": run_timeouts,
    "waits": run_waits,
}


async def run_program(agl: Any, store: Any, name: str) -> list[Any]:
    out = Answers()
    await PROGRAMS[name](agl, store, out)
    return json.loads(json.dumps(out.lines))


async def run_all(agl: Any) -> dict[str, Any]:
    return {
        name: await run_program(agl, agl.InMemoryLightningStore(scan_debounce_seconds=0), name)
        for name in PROGRAMS
    }


if __name__ == "__main__":
    answers = asyncio.run(run_all(importlib.import_module(sys.argv[1])))
    sys.stdout.write(json.dumps(answers, indent=1) + "\n")
