"""Users' own code around attempts."""

import pytest

import whet
from support.agents.run_agents import get_failure, run
from whet.errors import ConfigError
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, AttemptId, Outcome

pytestmark = pytest.mark.anyio


async def agent(task: int) -> float:
    if task == 13:
        raise LookupError("unlucky")
    return float(task)


class Notes(whet.Hooks):
    """Records its calls, sync and async."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name, self._notes = name, notes

    async def on_start(self, runner: str) -> None:
        self._notes.append(f"{self._name} start")

    def before(self, attempt: Attempt) -> None:
        whet.emit_message(f"{self._name} is there")
        self._notes.append(f"{self._name} before {attempt.rollout.task}")

    async def after(self, attempt: Attempt, outcome: Outcome) -> None:
        self._notes.append(f"{self._name} after {outcome.status.value}")

    def on_end(self, runner: str) -> None:
        self._notes.append(f"{self._name} end")


async def test_hooks_are_called_in_order_around_every_attempt(store: SQLiteStore) -> None:
    notes: list[str] = []
    await run(agent, [13], store, hooks=[Notes("a", notes), Notes("b", notes)])
    assert notes == [
        "a start",
        "b start",
        "a before 13",
        "b before 13",
        "b after failed",
        "a after failed",
        "b end",
        "a end",
    ]
    spans = await store.spans(AttemptId("r0.1"))
    assert [s.attributes["whet.message"] for s in spans] == ["a is there", "b is there"]


async def test_a_hook_that_raises_before_an_attempt_fails_that_one_only(store: SQLiteStore) -> None:
    class Picky(whet.Hooks):
        def before(self, attempt: Attempt) -> None:
            if attempt.rollout.task == 1:
                raise OSError("no sandbox left")

    groups = await run(agent, [0, 1, 2], store, hooks=[Picky()])
    assert [len(group) for group in groups] == [1, 0, 1]
    reason = (await store.failures(["r1"]))["r1"]
    assert reason.startswith("agent: the hook Picky.before raised:")
    assert "OSError: no sandbox left" in reason


async def test_a_hook_that_raises_after_an_attempt_is_reported_and_changes_nothing(
    store: SQLiteStore, caplog: pytest.LogCaptureFixture
) -> None:
    class Clumsy(whet.Hooks):
        async def after(self, attempt: Attempt, outcome: Outcome) -> None:
            raise SystemExit(5)

        def on_end(self, runner: str) -> None:
            raise OSError("late")

    groups = await run(agent, [1, 2], store, hooks=[Clumsy()])
    assert [group[0].reward for group in groups] == [1.0, 2.0]
    lines = [record.getMessage() for record in caplog.records]
    assert any("the hook Clumsy.after raised: SystemExit: 5" in line for line in lines)
    assert any("the hook Clumsy.on_end raised: OSError: late" in line for line in lines)


async def test_a_hook_that_raises_at_the_start_keeps_the_runner_from_starting(
    store: SQLiteStore,
) -> None:
    class Refusing(whet.Hooks):
        def on_start(self, runner: str) -> None:
            raise OSError("no license")

    with pytest.raises(ExceptionGroup) as raised:
        await run(agent, [1], store, hooks=[Refusing()])
    assert "the hook Refusing.on_start raised: OSError: no license" in str(
        raised.value.exceptions[0]
    )


async def test_an_object_that_is_not_a_hook_is_refused(store: SQLiteStore) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await get_failure(agent, store, hooks=[object()])
    assert isinstance(raised.value.exceptions[0], ConfigError)
    assert "a hook is an object of a subclass of whet.Hooks; found <object" in str(
        raised.value.exceptions[0]
    )
