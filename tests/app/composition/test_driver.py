"""Drivers: the parameters that a user's function may have, and the values it gets."""

import json
import re
import traceback
from pathlib import Path
from typing import Any

import pytest

import whet
from whet.app.cli.main import main
from whet.app.composition.driver import Driver
from whet.app.run_folder import RunFolder
from whet.config import RunConfig
from whet.errors import ConfigError, DriverFailed
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


def test_a_run_of_another_kind_is_not_continued(model: Path, tmp_path: Path) -> None:
    @whet.algorithm
    async def nothing(store: Any) -> None: ...

    folder = RunFolder.create(RunConfig(model=str(model), dir=tmp_path, name="mine"), "train")
    settings: dict[str, Any] = {"dir": str(tmp_path), "model": str(model), "name": "mine"}
    with pytest.raises(ConfigError, match="'mine' is of the kind 'train', expected 'algorithm'"):
        nothing.run(repeat, quiet=True, **settings)
    assert not folder.store.exists()


def test_an_error_of_the_function_is_raised_once_with_its_line_and_cause(
    model: Path, tmp_path: Path
) -> None:
    @whet.algorithm
    def divides(tasks: list[str]) -> float:
        return len(tasks) / 0

    with pytest.raises(DriverFailed) as caught:
        divides.run(repeat, ["a"], quiet=True, dir=str(tmp_path), model=str(model))
    reason = r"ZeroDivisionError: division by zero \(.*test_driver.py:\d+\)"
    assert re.fullmatch(f"the algorithm 'divides' raised: {reason}", str(caught.value))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.traceback.count("return len(tasks) / 0") == 1
    shown = "".join(traceback.format_exception(caught.value))
    assert shown.count("return len(tasks) / 0") == 1
    assert "ExceptionGroup" not in shown


COLLECT = Path(__file__).parents[3] / "examples" / "custom_driver" / "collect.py"


@pytest.mark.parametrize(
    ("algorithm", "expected", "traces"),
    [
        (f"{COLLECT}:collect", "all 2 rollouts failed, such as: agent: the agent raised: Key", 0),
        (
            "mine.py:mean",
            "the algorithm 'mean' raised: StatisticsError: fmean requires",
            1,
        ),
    ],
)
def test_on_the_command_line_an_algorithm_that_fails_is_one_line_and_one_traceback_at_most(
    algorithm: str,
    expected: str,
    traces: int,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text('{"question": "1 + 1?"}\n{"question": "1 + 2?"}\n')
    Path("mine.py").write_text(
        "from statistics import fmean\nimport whet\n\n@whet.algorithm\ndef mean(tasks):\n"
        "    return fmean(task['answer'] for task in tasks if 'answer' in task)\n"
    )
    agent = (f"{COLLECT}:solve", "--tasks=tasks.jsonl", f"--model={model}", f"--dir={tmp_path}")
    assert main(["train", *agent, "--algorithm", algorithm]) == 2
    *above, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"whet: {expected}")
    assert sum("Traceback" in line for line in above) == traces
    assert traces == 0 or last.endswith("(mine.py:6)")


def test_on_the_command_line_an_algorithm_runs_any_agent_with_prompts(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text('"a"\n')
    Path("start.txt").write_text("Say {word}")
    Path("mine.py").write_text(
        "import whet\n\n@whet.algorithm\nasync def rewards(store, tasks, resources):\n"
        "    await store.enqueue([whet.Rollout(id=t, group=t, task=t) for t in tasks])\n"
        "    await store.wait(tasks)\n"
        "    found = await store.trajectories(tasks)\n"
        "    return [[each.reward for each in found], resources]\n"
    )
    flags = ["train", "--tasks=tasks.jsonl", "--algorithm=mine.py:rewards", f"--model={model}"]
    command = ["--", "echo", "0.5"]
    assert main([*flags, "--prompt=start.txt", "--json", *command]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == [[0.5], {"prompt": 1}]
    for flag in ("--resume", "--judge=mine.py:judge"):
        assert main([*flags, flag, *command]) == 2
        assert "--algorithm takes no --judge and no --resume" in capsys.readouterr().err
