"""Programs written for Agent Lightning run to their end with `import whet.agl as agl`."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import whet.agl as agl
from integrations.agl import seeds
from whet.io.server import AppServer


@contextmanager
def serve_reply(text: str) -> Generator[str]:
    """An OpenAI-compatible endpoint with one answer."""

    async def complete(request: Request) -> JSONResponse:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        base = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
        return JSONResponse({**base, "choices": [choice]})

    routes = [Route("/v1/chat/completions", complete, methods=["POST"])]
    server = AppServer(Starlette(routes=routes))
    yield f"{server.url}/v1"
    server.close()


def test_a_driver_collects_rewards_through_store_and_runner() -> None:
    seeds.collected.clear()
    with serve_reply("4") as url:
        trainer = agl.Trainer(
            algorithm=seeds.collect_algorithm,
            n_runners=2,
            initial_resources={"llm": agl.LLM(endpoint=url, model="m")},
        )
        trainer.fit(seeds.collect_rollout)
    assert seeds.collected["statuses"] == ["succeeded"] * 3
    # Each rollout emits its reward, and returns it.
    assert seeds.collected["rewards"] == [1.0] * 6


@pytest.mark.slow
def test_store_runner_and_driver_are_processes_of_their_own(tmp_path: Path) -> None:
    environment = {**os.environ, "WHET_STORE_TOKEN": "of-the-tests"}

    def start(*command: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )

    store = start("-m", "whet.agl", "store", "--port", "0")
    processes = [store]
    try:
        assert store.stdout is not None
        address = store.stdout.readline().removeprefix("store at ").partition(";")[0]
        with serve_reply("4") as url:
            processes += [start(seeds.__file__, role, address, url) for role in ("algo", "runner")]
            output, _ = processes[1].communicate(timeout=300)
        collected = json.loads(output)
        assert collected["statuses"] == ["succeeded"] * 3
        assert collected["rewards"] == [1.0] * 6
        assert processes[2].wait(timeout=60) == 0
    finally:
        for process in processes:
            process.terminate()
            process.communicate(timeout=60)


@pytest.mark.slow
def test_verl_trains_the_math_agent_with_a_key_of_its_own(tmp_path: Path) -> None:
    tasks: list[Any] = [{"question": f"What is {n} + 1?"} for n in range(2)]
    result = seeds.train_math_agent(str(tmp_path), tasks, tasks[:1])
    assert len(result.steps) == 1
    assert result.comparison is not None


@pytest.mark.slow
def test_verl_trains_an_agent_class_that_is_not_async(tmp_path: Path) -> None:
    result = seeds.train_guess_number(str(tmp_path), [{"answer": 5}])
    assert len(result.steps) == 1
