"""Drivers: the parameters that a user's function may have, and the values it gets."""

from pathlib import Path
from typing import Any

import pytest

import whet
from whet.app.composition.driver import Driver
from whet.errors import ConfigError
from whet.types import Endpoint


def test_an_unknown_parameter_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'mine' has an unknown parameter 'dataset'; expected one of store",
    ):

        @whet.algorithm
        def mine(store: object, dataset: object) -> None:
            pass


def test_a_driver_can_still_be_called_as_a_function() -> None:
    @whet.algorithm
    def double(tasks: list[int], factor: int = 2) -> list[int]:
        """Twice as much."""
        return [factor * task for task in tasks]

    assert isinstance(double, Driver)
    assert double([1, 2]) == [2, 4]
    assert double.__doc__ == "Twice as much."
    assert double.names == {"tasks"}


def test_without_a_store_it_needs_an_agent() -> None:
    @whet.algorithm
    def nothing(store: object) -> None:
        pass

    with pytest.raises(ConfigError, match="needs an agent to run, or a store"):
        nothing.run()


def test_a_scorer_needs_weights_in_this_process() -> None:
    @whet.algorithm
    def scores(scorer: object) -> None:
        pass

    with pytest.raises(ConfigError, match="parameter 'scorer' needs the weights in this process"):
        scores.run(repeat, trainer={"kind": "tinker"})


async def repeat(task: str, llm: Endpoint, resources: dict[str, Any]) -> float:
    assert llm.base_url.startswith("http://")
    return float(resources["prompt"] == f"Say {task}")


def test_it_gets_its_parameters_and_agents_get_the_resources_of_their_rollout(
    model: Path, tmp_path: Path
) -> None:
    @whet.algorithm
    async def prompts(
        store: Any,
        tasks: list[str],
        held_out: list[str],
        resources: dict[str, Any],
        gateway: Endpoint,
        trainer: Any,
        scorer: Any,
        config: whet.RunConfig,
    ) -> list[float]:
        assert held_out == ["c"]
        assert gateway.base_url.endswith("/v1")
        assert await trainer.publish() == 0
        assert [len(scores) for scores in await scorer.logprobs([[1, 5, 6]])] == [2]
        assert config.model == str(model)
        assert resources == {"prompt": 1}
        await store.publish("prompt", "Say b")
        wanted: list[dict[str, Any]] = [resources, {"prompt": "latest"}]
        pairs = zip(tasks, wanted, strict=True)
        await store.enqueue(
            [whet.Rollout(id=t, group=t, task=t, resources=some) for t, some in pairs]
        )
        await store.wait(tasks)
        return [found.reward for found in await store.trajectories(tasks)]

    arguments: dict[str, Any] = {
        "held_out": ["c"],
        "resources": {"prompt": "Say a"},
        "quiet": True,
        "dir": str(tmp_path),
        "model": str(model),
    }
    assert prompts.run(repeat, ["a", "b"], **arguments) == [1.0, 1.0]
