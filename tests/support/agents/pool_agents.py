"""Agents that processes import by name."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import whet
from whet.types import Endpoint, PromptTemplate


def work(task: dict[str, str], llm: Endpoint) -> object:
    """Run the action that the task names."""
    return ACTIONS[task["do"]](task, llm)


def die_by_signal(task: dict[str, str], llm: Endpoint) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt(task: dict[str, str], llm: Endpoint) -> None:
    raise KeyboardInterrupt


def fail(task: dict[str, str], llm: Endpoint) -> None:
    raise LookupError("gone")


def hang(task: dict[str, str], llm: Endpoint) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(task["note"]).write_text(f"{os.getpid()} {child.pid}")
    child.wait()


def print_a_result(task: dict[str, str], llm: Endpoint) -> float:
    print('{"result": 99.0}', flush=True)  # noqa: T201 - that is the test
    assert sys.stdin.read() == ""
    return 1.0


def change_environment(task: dict[str, str], llm: Endpoint) -> bool:
    before = os.environ.get("WHET_TEST_POOL")
    os.environ["WHET_TEST_POOL"] = llm.base_url
    return before is None


ACTIONS: dict[str, Callable[[dict[str, str], Endpoint], object]] = {
    "pid": lambda task, llm: os.getpid(),
    "raise": fail,
    "exit": lambda task, llm: sys.exit(3),
    "interrupt": interrupt,
    "die": lambda task, llm: os._exit(7),
    "kill": die_by_signal,
    "hang": hang,
    "nan": lambda task, llm: float("nan"),
    "nothing": lambda task, llm: None,
    "print": print_a_result,
    "environment": change_environment,
}


async def clean_up(task: str, llm: Endpoint) -> float:
    """Wait to be canceled, then clean up until the folder `task` has the file `go`."""
    folder = Path(task)
    try:
        (folder / "begun").touch()
        await asyncio.Event().wait()
    finally:
        (folder / "canceled").touch()
        while not (folder / "go").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)
        (folder / "clean").touch()
    return 1.0


_loops: list[asyncio.AbstractEventLoop] = []
_all_started = asyncio.Event()


async def meet(task: int, llm: Endpoint) -> bool:
    """Wait for so many attempts in this process, and check that they share one event loop."""
    _loops.append(asyncio.get_running_loop())
    if len(_loops) == task:
        _all_started.set()
    await _all_started.wait()
    return len(set(_loops)) == 1


class Solver:
    """An agent as a class, with every parameter."""

    def training_rollout(self, task: str) -> float:
        raise AssertionError

    async def rollout(
        self,
        task: str,
        llms: dict[str, Endpoint],
        prompt_template: PromptTemplate,
        rollout: whet.Rollout,
    ) -> None:
        with whet.operation("think"):
            await asyncio.sleep(0)
            whet.emit_message(prompt_template.format(question=task))
        whet.emit_reward(0.5, key="steps")
        whet.emit_reward(float(llms["policy"].model == "p" and rollout.mode == "val"))


solver = Solver()
