"""Interactive use: running event loops, notebooks, names, clients that are never closed."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

import whet
from whet.app.cli.main import main
from whet.app.run_folder import RunFolder

SMALL: Any = {"steps": 1, "tasks_per_step": 1, "group_size": 2}

UNCLOSED = """
import gc, sys, whet
from openai import AsyncOpenAI

kept = []

async def agent(task, llm):
    client = AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key)
    kept.append(client)
    messages = [{"role": "user", "content": task}]
    await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=2)
    if task == "second":
        kept.clear()  # clients of the first run are collected in the loop of the second
        gc.collect()
    return 1.0

trainer = whet.Trainer(model=sys.argv[1], dir=sys.argv[2])
trainer.dev(agent, ["first"])
trainer.dev(agent, ["second"])
"""


def agent(task: float, llm: whet.Endpoint) -> float:
    import httpx

    body = {"model": llm.model, "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    key = {"authorization": f"Bearer {llm.api_key}"}
    url = f"{llm.base_url}/chat/completions"
    httpx.post(url, json=body, headers=key, timeout=60).raise_for_status()
    return float(hash(llm.base_url) % 1009)


def test_train_works_inside_a_running_event_loop(model: Path, tmp_path: Path) -> None:
    async def cell() -> whet.Result:
        return whet.train(agent, [1.0], model=str(model), dir=str(tmp_path), **SMALL)

    result = anyio.run(cell)
    assert result.total("failed_rollouts") == 0
    assert len(result.steps) == 1


def test_a_canceled_training_ends_cleanly_and_is_resumed(model: Path, tmp_path: Path) -> None:
    settings: Any = SMALL | {"model": str(model), "dir": str(tmp_path), "name": "it", "steps": 40}
    folder = RunFolder(tmp_path / "runs" / "it")
    running = threading.Event()

    def watched(task: float, llm: whet.Endpoint) -> float:
        if folder.read_rewards():
            running.set()
        return agent(task, llm)

    async def cancel() -> None:
        training = asyncio.create_task(whet.train_async(watched, [1.0], quiet=True, **settings))
        await anyio.to_thread.run_sync(running.wait, 120)
        training.cancel()
        with pytest.raises(asyncio.CancelledError):
            await training
        assert not folder.is_in_use()

    asyncio.run(cancel())
    done = len(folder.read_rewards())
    assert 0 < done < 40

    async def resume() -> whet.Result:
        settings["steps"] = done + 2
        return await whet.train_async(agent, [1.0], quiet=True, resume=True, **settings)

    assert len(asyncio.run(resume()).steps) == done + 2


def test_a_training_that_is_canceled_before_its_start_runs_nothing(
    model: Path, tmp_path: Path
) -> None:
    def never(task: float, llm: whet.Endpoint) -> float:
        raise AssertionError("it ran")

    async def cancel_at_once() -> None:
        with anyio.move_on_after(0) as scope:
            await whet.train_async(never, [1.0], model=str(model), dir=str(tmp_path), **SMALL)
        assert scope.cancelled_caught

    anyio.run(cancel_at_once)
    assert not list(tmp_path.glob("runs/*/report.json"))


def test_an_error_of_an_awaited_training_is_raised(tmp_path: Path) -> None:
    async def cell() -> None:
        await whet.train_async(agent, [1.0], model="nowhere", dir=str(tmp_path))

    with pytest.raises(whet.ConfigError, match="there is no model 'nowhere'"):
        anyio.run(cell)


@pytest.mark.slow
def test_rollouts_are_shown_and_a_model_is_served_inside_a_running_event_loop(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def cells() -> float:
        settings = SMALL | {"algorithm": {"name": "positive"}, "trainer": {"weights": "full"}}
        result = whet.train(
            agent, [1.0], model=str(model), dir=str(tmp_path), name="it", **settings
        )
        assert "<th>" not in result._repr_html_()  # no held-out tasks
        capsys.readouterr()
        whet.show("it", dir=tmp_path)
        whet.show(result.run, worst=True, limit=1)
        with pytest.raises(whet.ConfigError, match="exclude each other"):
            whet.show(result.run, worst=True, failed=True)
        with whet.serve("it", dir=str(tmp_path), quiet=True) as llm:
            assert llm.model == "it"
            return await anyio.to_thread.run_sync(agent, 1.0, llm)

    assert anyio.run(cells) >= 0
    shown = capsys.readouterr().out
    assert "\ntrain-000000-001 " in shown
    assert "call 1  chat, policy" in shown


def test_serving_refuses_what_it_would_not_read_and_what_does_not_exist() -> None:
    with (
        pytest.raises(whet.ConfigError, match="serving does not read 'steps'"),
        whet.serve("tiny", steps=3),
    ):
        pass
    unknown = pytest.raises(whet.ConfigError, match="there is no model 'nowhere'")
    with unknown, whet.serve("nowhere"):
        pass


def test_a_dev_run_takes_no_name(model: Path, tmp_path: Path) -> None:
    trainer = whet.Trainer(name="it", model=str(model), dir=str(tmp_path), quiet=True, **SMALL)
    trainer.dev(agent, [1.0])
    assert trainer.fit(agent, [1.0]).run.name == "it"


@pytest.mark.slow
def test_a_start_that_fails_leaves_its_name_free(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in model.iterdir():
        content = b"{}" if file.name == "model.safetensors" else file.read_bytes()
        (broken / file.name).write_bytes(content)
    (tmp_path / "tasks.jsonl").write_text("1.0\n")
    where = (f"--tasks={tmp_path}/tasks.jsonl", f"--dir={tmp_path}", "--name=it", "--steps=1")
    sizes = ("--tasks-per-step=1", "--group-size=2", "--quiet")
    assert main(["train", f"{__file__}:agent", *where, *sizes, f"--model={broken}"]) == 2
    assert "cannot load the model" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "it").exists()
    assert main(["train", f"{__file__}:agent", *where, *sizes, f"--model={model}"]) == 0


@pytest.mark.slow
def test_clients_that_nobody_closes_make_no_noise(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNCLOSED, str(model), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.count("reward 1") == 2


def test_a_run_prints_what_it_trains_where_it_is_and_what_comes_next(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whet.train(agent, [1.0], model=str(model), dir=str(tmp_path), name="it", **SMALL)
    first, *_, folder, checkpoints, following = capsys.readouterr().out.strip().split("\n")
    run = tmp_path / "runs" / "it"
    assert first == f"run {run}: trains {model} on 1 task, 1 step of 1 x 2 rollouts"
    assert folder == f"run folder: {run}   picture: {run / 'curve.png'}   model: {run / 'model'}"
    assert checkpoints == f"checkpoints in {run / 'checkpoints'}: step-000000 (after step 1)"
    assert f"`whet show {run}`" in following
