"""Evaluation during training, early stop, and a run that is given more steps."""

import hashlib
import json
import shutil
from pathlib import Path

import httpx
import pytest
from safetensors import numpy as safetensors

import whet
from whet.app.run_folder import RunFolder
from whet.errors import ConfigError

TASKS = ["say one", "say two"]


async def agent(task: str, llm: whet.Endpoint) -> float:
    body = {"model": llm.model, "max_tokens": 3, "messages": [{"role": "user", "content": task}]}
    async with httpx.AsyncClient(base_url=llm.base_url + "/", verify=False) as client:
        headers = {"authorization": f"Bearer {llm.api_key}"}
        await client.post("chat/completions", headers=headers, json=body)
    digest = hashlib.blake2b(llm.api_key.encode()).digest()  # differs between rollouts
    return int.from_bytes(digest[:6]) / 2**48


def run(tmp_path: Path, model: Path, **settings: object) -> whet.Result:
    return whet.train(
        agent,
        TASKS,
        held_out=["say three"],
        quiet=True,
        dir=str(tmp_path),
        name="mine",
        model=str(model),
        tasks_per_step=1,
        group_size=2,
        **settings,  # pyright: ignore[reportArgumentType]
    )


@pytest.mark.slow
def test_a_run_evaluates_stops_early_keeps_its_best_model_and_takes_more_steps(
    tmp_path: Path, model: Path
) -> None:
    settings = {"evaluation": {"every": 1, "patience": 2, "samples": 0}, "steps": 2}
    result = run(tmp_path, model, **settings)
    assert all(step.metrics.keys() >= {"eval/greedy", "step_seconds"} for step in result.steps)
    more = run(tmp_path, model, resume=True, steps=5)
    folder = RunFolder(more.run)
    assert folder.read_config().steps == 5
    assert more.steps[:2] == result.steps
    rewards = [step.metrics["eval/greedy"] for step in more.steps]
    best = rewards.index(max(rewards))
    # Rewards do not depend on the weights: the best evaluation is soon followed by two others.
    stops = len(more.steps) < 5
    assert stops == (more.stopped is not None)
    assert len(more.steps) == min(5, best + 3) or best > 2
    assert more.model_step == best + 1
    assert more.comparison
    trained = more.comparison.measures["greedy"]["trained"]
    assert trained
    assert trained.mean == rewards[best]
    kept = {path.name for path in folder.checkpoints.iterdir()}
    assert kept == {f"step-{best:06d}", f"step-{len(more.steps) - 1:06d}"}
    report = json.loads(folder.report.read_text())
    assert report["model_step"] == best + 1
    with pytest.raises(ConfigError, match="steps already, found steps 1: leave it out, or give at"):
        run(tmp_path, model, resume=True, steps=1)
    assert folder.read_config().steps == 5, "what is refused changes nothing"


@pytest.mark.slow
def test_a_run_with_a_curriculum_trains_and_repeats_a_step_without_its_checkpoint(
    tmp_path: Path, model: Path
) -> None:
    settings = {"evaluation": {"samples": 0}, "curriculum": {"solved_weight": 0.5}}
    result = run(tmp_path, model, steps=2, **settings)
    shutil.rmtree(RunFolder(result.run).checkpoints / result.steps[-1].checkpoint)
    more = run(tmp_path, model, resume=True, steps=3)
    assert more.steps[:2] == result.steps
    assert len(more.steps) == 3


def test_evaluations_during_training_need_held_out_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.every needs held-out tasks"):
        whet.train(agent, TASKS, dir=str(tmp_path), evaluation={"every": 1})
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="patience counts the evaluations of `every`"):
        whet.train(agent, TASKS, dir=str(tmp_path), evaluation={"patience": 1})


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["lora", "full"])
def test_a_run_starts_from_another_by_name_folder_checkpoint_or_model(
    tmp_path: Path, model: Path, weights: str
) -> None:
    settings: dict[str, object] = {
        "trainer": {"weights": weights, "lora_rank": 4}
        if weights == "lora"
        else {"weights": "full"},
        "adam": {"lr": 0.01},
        "evaluation": {"samples": 0},
        "steps": 1,
    }
    first = RunFolder(run(tmp_path, model, **settings).run)
    [checkpoint] = first.checkpoints.iterdir()
    sources = {"name": "mine", "run": first.path, "checkpoint": checkpoint, "model": first.model}
    for what, source in sources.items():
        started = whet.train(
            agent,
            TASKS,
            quiet=True,
            dir=str(tmp_path),
            name=f"from-{what}",
            model=str(source),
            steps=0,
            trainer={"weights": weights},
            loss={"kl": 0.1},
        )
        second = RunFolder(started.run)
        for file in first.model.glob("*.safetensors"):
            before = safetensors.load_file(file)
            after = safetensors.load_file(second.model / file.name)
            assert before.keys() == after.keys()
            assert all((before[name] == after[name]).all() for name in before)
        config = second.read_config()
        if weights == "lora":
            assert config.model == str(model)
            assert config.initial_weights == (checkpoint if what == "checkpoint" else first.model)
            assert getattr(config.trainer, "lora_rank", None) == 4
        elif what != "checkpoint":
            assert (config.model, config.initial_weights) == (str(first.model), None)
    if weights == "lora":
        for source in sources.values():
            with pytest.raises(ConfigError, match=r"lora_rank 4, found 8: leave it out"):
                run(tmp_path, source, trainer={"lora_rank": 8})  # pyright: ignore


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["lora", "full"])
def test_the_kl_penalty_holds_to_what_a_run_starts_from(
    tmp_path: Path, model: Path, weights: str
) -> None:
    settings: dict[str, object] = {
        "trainer": {"weights": weights},
        "adam": {"lr": 0.01},
        "loss": {"kl": 0.1},
        "steps": 2,
    }
    first = RunFolder(run(tmp_path, model, **settings).run)
    [checkpoint] = first.checkpoints.iterdir()
    started = whet.train(
        agent,
        TASKS,
        quiet=True,
        dir=str(tmp_path),
        name="second",
        model=str(checkpoint),
        tasks_per_step=1,
        group_size=4,
        **settings,  # pyright: ignore[reportArgumentType]
    )
    before, after = (step.metrics["reference_kl"] for step in started.steps)
    assert before == pytest.approx(0.0, abs=1e-6)  # nothing is updated yet
    assert after > 1e-5
