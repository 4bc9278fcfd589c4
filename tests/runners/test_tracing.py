"""Messages, objects and operations from anywhere inside an agent."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import anyio
import pytest

import whet
from support.agents.run_agents import get_failure, get_reward, run
from whet.errors import ConfigError
from whet.runners.agent import Agent
from whet.store.sqlite import SQLiteStore
from whet.types import AttemptId, Endpoint, Span

pytestmark = pytest.mark.anyio


async def spans_of(agent: Agent, store: SQLiteStore) -> list[Span]:
    await run(agent, ["t"], store)
    return await store.spans(AttemptId("r0.1"))


@dataclass
class Plan:
    steps: list[str]


async def test_messages_and_objects_are_kept_with_their_attempt(store: SQLiteStore) -> None:
    async def one(task: str) -> float:
        whet.emit_message("looking it up", source="index")
        whet.emit_object(Plan(["search", "read"]), name="plan")
        return 1.0

    message, plan = await spans_of(one, store)
    assert (message.name, message.attributes) == (
        "message",
        {"whet.message": "looking it up", "source": "index"},
    )
    assert plan.name == "plan"
    assert plan.attributes == {
        "whet.object": {"steps": ["search", "read"]},
        "whet.object.type": "Plan",
    }
    assert message.trace_id == plan.trace_id
    assert message.scope == "whet"


async def test_operations_nest_and_what_is_emitted_in_one_is_below_it(store: SQLiteStore) -> None:
    @whet.operation
    async def search(query: str, top_k: int = 1) -> list[str]:
        whet.emit_message("found")
        return [query] * top_k

    @whet.operation("rank", stage=2)
    def rank(found: list[str]) -> str:
        return found[0]

    async def one(task: str) -> float:
        with whet.operation("answer") as block:
            found = await search(task, top_k=2)
            block.set(found=len(found))
            rank(found)
        return 1.0

    spans = {span.name.rpartition(".")[2]: span for span in await spans_of(one, store)}
    answer, inner, ranked, message = (spans[n] for n in ("answer", "search", "rank", "message"))
    assert (answer.parent_id, answer.attributes) == (None, {"found": 2})
    assert inner.parent_id == ranked.parent_id == answer.span_id
    assert message.parent_id == inner.span_id
    assert inner.attributes["whet.operation.input"] == {"0": "t", "top_k": 2}
    assert inner.attributes["whet.operation.output"] == ["t", "t"]
    assert str(inner.attributes["code.function.name"]).startswith("tests.runners.test_tracing.")
    assert ranked.attributes["stage"] == 2
    assert all(span.status == "ok" for span in (answer, inner, ranked))
    assert answer.start <= inner.start <= inner.end <= answer.end


async def test_an_operation_that_attempts_share_keeps_to_each(store: SQLiteStore) -> None:
    shared = whet.operation("think")
    both = anyio.Event()
    begun: list[str] = []

    async def one(task: str) -> float:
        with shared as block:
            block.set(task=task)
            begun.append(task)
            if len(begun) == 2:
                both.set()
            await both.wait()
        return 1.0

    assert all(await run(one, ["a", "b"], store))
    for number, task in enumerate("ab"):
        [span] = await store.spans(AttemptId(f"r{number}.1"))
        assert (span.name, span.attributes) == ("think", {"task": task})


async def test_an_operation_keeps_no_keys(store: SQLiteStore) -> None:
    @whet.operation
    def ask(llm: Endpoint, llms: dict[str, Endpoint], unknown: object) -> None:
        pass

    async def one(task: str, llm: Endpoint, llms: dict[str, Endpoint]) -> float:
        ask(llm, llms=llms, unknown=threading)
        return 1.0

    (span,) = await spans_of(one, store)
    assert "key-r0.1" not in span.model_dump_json()
    inputs = span.attributes["whet.operation.input"]
    assert isinstance(inputs, dict)
    hidden = {"api_key": "...", "reward_key": "..."}
    assert inputs["0"] == {
        "base_url": "http://nowhere/r0.1",
        "model": "p",
        "policies": [],
        **hidden,
    }
    assert str(inputs["unknown"]).startswith("<module 'threading'")


async def test_an_operation_that_raises_says_why_and_passes_it_on(store: SQLiteStore) -> None:
    async def one(task: str) -> float:
        try:
            with whet.operation("tool"):
                raise LookupError("no such page")
        except LookupError:
            return 0.25
        return 1.0

    (tool,) = await spans_of(one, store)
    assert (tool.status, tool.message) == ("error", "LookupError: no such page")
    assert tool.attributes["error.type"] == "LookupError"
    (event,) = tool.events
    assert event.name == "exception"
    assert event.attributes["exception.type"] == "LookupError"
    assert "raise LookupError" in str(event.attributes["exception.stacktrace"])


async def test_they_work_in_threads_that_copy_the_context(store: SQLiteStore) -> None:
    def tell(text: str) -> None:
        whet.emit_message(text)

    async def one(task: str) -> None:
        await asyncio.to_thread(tell, "to_thread")
        await anyio.to_thread.run_sync(tell, "anyio")
        with ThreadPoolExecutor(1) as executor:
            executor.submit(contextvars.copy_context().run, tell, "executor").result()
        await asyncio.create_task(asyncio.to_thread(whet.emit_reward, 0.5))

    spans = await spans_of(one, store)
    message = [span.attributes["whet.message"] for span in spans]
    assert message == ["to_thread", "anyio", "executor"]
    assert (await store.trajectories(["r0"]))[0].reward == 0.5


async def test_the_spans_of_a_failed_attempt_are_kept(store: SQLiteStore) -> None:
    async def one(task: str) -> float:
        whet.emit_message("before the end")
        raise OSError

    assert len(await spans_of(one, store)) == 1


async def test_an_object_may_have_text_that_no_encoding_has(store: SQLiteStore) -> None:
    async def one(task: str) -> float:
        whet.emit_object({"file": "a\udcff", "size": float("nan")})
        return 1.0

    [span] = await spans_of(one, store)
    assert span.attributes["whet.object"] == {"file": "a\udcff", "size": None}


@pytest.mark.parametrize(
    ("emit", "found"),
    [
        (lambda: whet.emit_object(threading.Lock()), "lock"),
        (lambda: whet.emit_object({"answer": 10**5000}), "dict"),
        (lambda: whet.operation("search", limit=10**5000).__enter__(), "int"),
    ],
)
async def test_a_value_that_cannot_be_recorded_fails_the_attempt(
    store: SQLiteStore, emit: Callable[[], object], found: str
) -> None:
    async def one(task: str) -> float:
        emit()
        return 1.0

    expected = f"expected a value that can be written as JSON, found {found}"
    assert expected in await get_failure(one, store)


def tell_reward() -> None:
    whet.emit_reward(1.0)


def tell_message() -> None:
    whet.emit_message("x")


def tell_object() -> None:
    whet.emit_object(1)


def operate() -> None:
    with whet.operation("x"):
        pass


@pytest.mark.parametrize("tell", [tell_reward, tell_message, tell_object, operate])
def test_outside_an_agent_there_is_one_clear_error(tell: Callable[[], None]) -> None:
    with pytest.raises(ConfigError, match="works inside an agent that whet is running"):
        tell()


def test_a_decorated_function_is_itself_outside_an_agent() -> None:
    @whet.operation("double")
    def double(x: int) -> int:
        """Twice."""
        return 2 * x

    assert double(2) == 4
    assert (double.__name__, double.__doc__) == ("double", "Twice.")


async def test_a_thread_that_outlives_its_attempt_gets_an_error(store: SQLiteStore) -> None:
    late: list[str] = []
    ended = threading.Event()

    def tell() -> None:
        ended.wait(10)
        try:
            whet.emit_reward(9.0)
        except ConfigError as error:
            late.append(str(error))

    async def one(task: str) -> float:
        thread = threading.Thread(target=contextvars.copy_context().run, args=(tell,))
        thread.start()
        threads.append(thread)
        return 1.0

    threads: list[threading.Thread] = []
    assert await get_reward(one, store) == 1.0
    ended.set()
    await anyio.to_thread.run_sync(threads[0].join)
    assert late == ["emit_reward came too late: the attempt 'r0.1' has ended"]
