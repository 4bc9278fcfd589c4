"""Valid agents, their parameters and the arguments they get."""

from typing import Any

import pytest
from pydantic import ValidationError

import whet
from support.agents.run_agents import get_failure, get_reward, run
from whet.errors import ConfigError
from whet.runners.agent import check_agent
from whet.store.sqlite import SQLiteStore
from whet.types import AttemptedRollout, Endpoint, Mode, PromptTemplate

pytestmark = pytest.mark.anyio

PARTNER: dict[str, Any] = {"base_url": "http://partner/v1", "api_key": "secret", "model": "frozen"}
PROMPT = {"template": "Answer {question} briefly, as {{json}}."}


async def test_an_agent_gets_its_parameters_in_any_order(store: SQLiteStore) -> None:
    seen: dict[str, object] = {}

    async def one(
        rollout: AttemptedRollout,
        llms: dict[str, Endpoint],
        prompt_template: PromptTemplate,
        *,
        resources: dict[str, object],
        llm: Endpoint,
        task: str,
        retries: int = 3,
    ) -> float:
        seen.update(locals())
        return 1.0

    await get_reward(one, store, resources={"judge": PARTNER, "prompt": PROMPT, "hint": [1]})
    assert (seen["task"], seen["retries"]) == ("t", 3)
    assert seen["llm"] == Endpoint(base_url="http://nowhere/r0.1", api_key="key-r0.1", model="p")
    assert seen["llms"] == {"policy": seen["llm"], "judge": Endpoint(**PARTNER)}
    assert seen["resources"] == {"judge": PARTNER, "prompt": PROMPT, "hint": [1]}
    prompt = seen["prompt_template"]
    assert isinstance(prompt, PromptTemplate)
    assert prompt.format(question="2+2", unused=0) == "Answer 2+2 briefly, as {json}."
    rollout = seen["rollout"]
    assert isinstance(rollout, AttemptedRollout)
    found = (rollout.id, rollout.group, rollout.mode, rollout.attempt, rollout.number)
    assert found == ("r0", "r0", Mode.TRAIN, "r0.1", 1)


async def test_the_first_two_parameters_are_task_and_llm_whatever_they_are_called(
    store: SQLiteStore,
) -> None:
    def one(question: str, endpoint: Endpoint, resources: dict[str, object]) -> float:
        return float(question == "t" and endpoint.model == "p" and resources == {})

    assert await get_reward(one, store) == 1.0


async def test_a_function_of_any_arguments_gets_task_and_llm(store: SQLiteStore) -> None:
    assert await get_reward(lambda *args: float(len(args)), store) == 2.0


async def test_an_agent_may_do_without_a_model(store: SQLiteStore) -> None:
    assert await get_reward(lambda task: len(task), store) == 1.0


@pytest.mark.parametrize(
    ("agent", "says"),
    [
        (
            lambda task, llm, judge: 1,
            "unknown parameter 'judge'; expected one of task, llm, llms, res",
        ),
        (lambda task, resource: 1, "unknown parameter 'resource', perhaps 'resources'"),
        (lambda task, *, promptt_template: 1, "perhaps 'prompt_template'"),
        (lambda llm: 1, "does not take the task"),
        (lambda: 1, "does not take the task"),
        (17, "an agent is a function .*; found 'int'"),
        (object, "found 'object'"),
    ],
)
def test_an_unknown_parameter_is_refused_before_anything_starts(agent: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        whet.rollout(agent)


class Solver:
    """An agent as a class."""

    def __init__(self) -> None:
        self.bonus = 0.5

    async def rollout(
        self, task: str, resources: dict[str, object], rollout: whet.Rollout
    ) -> float:
        return self.bonus

    def validation_rollout(self, task: str, llm: Endpoint) -> float:
        return 2.0


@pytest.mark.parametrize("agent", [Solver, Solver()], ids=["class", "object"])
@pytest.mark.parametrize(("mode", "reward"), [("train", 0.5), ("val", 2.0), ("test", 2.0)])
async def test_the_mode_of_a_rollout_chooses_the_method_of_a_class(
    store: SQLiteStore, agent: object, mode: str, reward: float
) -> None:
    assert await get_reward(agent, store, mode=Mode(mode)) == reward


def test_a_class_that_cannot_run_every_mode_is_refused() -> None:
    class OnlyTraining:
        def training_rollout(self, task: str) -> float:
            return 1.0

    with pytest.raises(ConfigError, match="only training_rollout: add a method `rollout` for mode"):
        check_agent(OnlyTraining)


async def test_a_class_that_cannot_be_made_is_refused_when_the_runner_starts(
    store: SQLiteStore,
) -> None:
    class Needy(Solver):
        def __init__(self, key: str) -> None:
            raise AssertionError

    with pytest.raises(ExceptionGroup) as raised:
        await run(Needy, ["t"], store)
    assert "cannot make the agent 'Needy' without arguments" in str(raised.value.exceptions[0])


async def test_a_missing_resource_is_the_reason_of_the_failure(store: SQLiteStore) -> None:
    async def one(task: str, prompt_template: PromptTemplate) -> float:
        return 1.0

    assert "its rollout has none: add a resource such as" in await get_failure(one, store)


async def test_several_templates_are_not_guessed_from(store: SQLiteStore) -> None:
    async def one(task: str, prompt_template: PromptTemplate) -> float:
        return 1.0

    reason = await get_failure(one, store, resources={"a": PROMPT, "b": PROMPT})
    assert "its rollout has a, b: use the parameter `resources`" in reason


async def test_the_key_of_a_partner_may_stay_in_the_environment(
    store: SQLiteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def one(task: str, llms: dict[str, Endpoint]) -> float:
        return float(llms["judge"].api_key == "from-here")

    keyed = {"base_url": "http://partner/v1", "model": "m", "key_variable": "JUDGE_KEY"}
    monkeypatch.setenv("JUDGE_KEY", "from-here")
    assert await get_reward(one, store, resources={"judge": keyed}) == 1.0
    monkeypatch.delenv("JUDGE_KEY")
    assert await run(one, ["t"], store, resources={"judge": keyed}, prefix="again") == [[]]
    reason = (await store.failures(["again0"]))["again0"]
    assert "has its key in JUDGE_KEY, which is not set where the agent runs" in reason


@pytest.mark.parametrize("bad", ["{task.__class__}", "{0}", "{}", "{a!r}", "{a:>9}", "{a[b]}", "{"])
def test_a_template_has_names_and_nothing_that_reaches_further(bad: str) -> None:
    with pytest.raises(ValidationError):
        PromptTemplate(template=bad)


def test_a_template_names_its_missing_values() -> None:
    with pytest.raises(KeyError, match="template: a; found b"):
        PromptTemplate(template="{a} {b}").format(b="{a}")
