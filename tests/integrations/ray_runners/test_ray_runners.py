"""Runners on a real Ray cluster of two local nodes, which are killed, scaled and restarted.

`make test-ray` runs these: they take minutes and several hundred MB.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from support.runs.processes import Command, start
from whet.io.process import find_free_port
from whet.protocols import Store
from whet.store.sqlite import SQLiteStore
from whet.types import Mode, Rollout, RolloutRecord, Status

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.environ.get("WHET_RAY"), reason="run `make test-ray`"),
    pytest.mark.filterwarnings("default"),  # Ray leaves files to the collector
]

PATIENCE_S = 300
"""A busy machine is slow, not stuck."""

AGENT = """
import os
from pathlib import Path

import anyio

HERE = Path(__file__).parent


async def wait_for_go() -> None:
    while not (HERE / "go").exists():
        await anyio.sleep(0.1)


async def count(task) -> float:
    await wait_for_go()
    return float(task)


async def ask(task, llm) -> float:
    from openai import AsyncOpenAI

    await wait_for_go()
    async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, max_retries=0) as client:
        reply = await client.chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": task}],
            max_tokens=8,
            temperature=1.5,
            extra_body={"return_token_ids": True},
        )
    return sum(reply.choices[0].token_ids) % 11 / 10
"""


class TwoNodes:
    """A cluster of two raylets on this machine."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self._cluster: Any = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 6, "object_store_memory": 100 * 2**20},
        )
        self.address: str = self._cluster.address
        self._other = self._add()

    def _add(self) -> Any:
        return self._cluster.add_node(num_cpus=2, object_store_memory=100 * 2**20)

    @property
    def head_raylet(self) -> int:
        return _raylet(self._cluster.head_node)

    @property
    def other_raylet(self) -> int:
        return _raylet(self._other)

    def kill_other(self) -> None:
        """Kill the second node as a power cut would: all of its processes at once."""
        for pid in [self.other_raylet, *descendants(self.other_raylet)]:
            os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(self._other, allow_graceful=False)

    def add_other(self) -> None:
        self._other = self._add()

    def close(self) -> None:
        self._cluster.shutdown()


def start_nodes() -> TwoNodes:
    """Start the cluster; Ray gives a node 30 s, which a busy machine may need to try again."""
    for _ in range(3):
        with contextlib.suppress(Exception):
            return TwoNodes()
    return TwoNodes()


def _raylet(node: Any) -> int:
    [raylet] = node.all_processes["raylet"]
    return raylet.process.pid


def descendants(pid: int) -> list[int]:
    """Processes below one, in any depth."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # gone meanwhile
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = parents.get(pid, [])
    return found + [each for child in found for each in descendants(child)]


def runners_below(raylet: int) -> dict[str, int]:
    """Runner processes of a node: their ids by worker name."""
    found: dict[str, int] = {}
    for pid in descendants(raylet):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        names = [part.removeprefix("--worker=") for part in line if part.startswith("--worker=")]
        if "runner" in line and names:
            found[names[0]] = pid
    return found


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that other processes do."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain: {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def cluster() -> Generator[TwoNodes]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    nodes = start_nodes()
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "agent.py").write_text(AGENT)
    return tmp_path


class Site:
    """A folder with a store that is served, and the flags by which commands find it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = find_free_port()
        self.place = ("--store", f"http://127.0.0.1:{self.port}", "--run", "r", "--dir", ".whet")

    def start_store(self) -> Command:
        store = Command(self.folder, "store", "--port", str(self.port), "--dir", ".whet")
        store.hears("store listens")
        return store

    def ask(self, question: Callable[[Store], Any]) -> Any:
        async def ask() -> Any:
            async with SQLiteStore(self.folder / ".whet" / "store.db", run="r") as store:
                return await question(store)

        return asyncio.run(ask())

    def workers(self) -> set[str]:
        """Names of the workers that are alive."""
        alive = self.ask(lambda store: store.workers())
        return {worker.name for worker in alive if worker.due > time.time()}

    def running(self) -> dict[str, int]:
        """Numbers of running attempts by worker."""
        return {w.name: len(w.running) for w in self.ask(lambda store: store.workers())}

    def rollouts(self) -> list[RolloutRecord]:
        return self.ask(lambda store: store.rollouts(limit=1000))

    def enqueue(self, number: int) -> None:
        rollouts = [
            Rollout(id=f"r{n}", group="g", task=n, mode=Mode.TRAIN, max_attempts=3)
            for n in range(number)
        ]
        self.ask(lambda store: store.enqueue(rollouts))


@pytest.fixture
def site(folder: Path) -> Generator[Site]:
    site = Site(folder)
    store = site.start_store()
    try:
        yield site
    finally:
        store.stop()


def test_a_run_completes_with_nothing_lost_when_a_node_of_the_cluster_is_killed(
    cluster: TwoNodes, site: Site
) -> None:
    steps, tasks, samples = 3, 2, 4
    (site.folder / "tasks.jsonl").write_text("".join(f'"task {n}"\n' for n in range(4)))
    flags = f"--steps={steps} --tasks-per-step={tasks} --group-size={samples}".split()
    pool = ("agent.py:ask", "--ray", cluster.address, "--num=4", "--concurrency=2", "--lease=10")
    with ExitStack() as stack:
        serve = ("serve", *site.place, "--gateway.port", str(find_free_port()))
        stack.enter_context(start(site.folder, *serve))
        runners = stack.enter_context(start(site.folder, "runner", *site.place, *pool))
        train = stack.enter_context(
            start(site.folder, "train", "--tasks", "tasks.jsonl", *site.place, *flags)
        )
        until(lambda: sum(site.running().values()) == tasks * samples, "all slots in use")
        victims = runners_below(cluster.other_raylet)
        assert victims, "no runner on the second node"
        assert runners_below(cluster.head_raylet), "no runner on the first node"
        assert all(site.running()[name] for name in victims), "the victims run something"

        cluster.kill_other()
        (site.folder / "go").touch()

        assert train.ends(PATIENCE_S) == 0, train.output
        until(
            lambda: set(victims) <= set(runners_below(cluster.head_raylet)), "restarted elsewhere"
        )
        runners.process.send_signal(signal.SIGINT)
        assert runners.ends(PATIENCE_S) == 0, runners.output

    records = [r for r in site.rollouts() if r.rollout.mode is Mode.TRAIN]
    assert len(records) == steps * tasks * samples
    assert {record.status for record in records} == {Status.SUCCEEDED}
    assert any(record.attempts > 1 for record in records), "nothing was running on the dead node"
    committed = site.ask(lambda store: store.steps())
    consumed = [rollout for step in committed for rollout in step.consumed]
    assert len(committed) == steps
    assert sorted(consumed) == sorted(record.rollout.id for record in records)
    cluster.add_other()


def test_runners_are_scaled_while_they_run(cluster: TwoNodes, site: Site) -> None:
    pool = ("agent.py:count", "--gateway=none", "--ray", cluster.address, "--num=1")
    few = ("--concurrency=2", "--cpus=0.5", "--worker=crew")
    with start(site.folder, "runner", *site.place, *pool, *few) as runners:
        until(lambda: site.workers() == {"crew-1"}, "one runner")
        site.enqueue(8)

        with start(site.folder, "runner", *site.place, "--scale=4", "--worker=crew") as scaling:
            assert scaling.ends() == 0, scaling.output
        until(lambda: sum(site.running().values()) == 8, "four runners of two slots each")
        assert site.workers() == {f"crew-{n}" for n in (1, 2, 3, 4)}

        with start(site.folder, "runner", *site.place, "--scale=1", "--worker=crew") as scaling:
            assert scaling.ends() == 0, scaling.output
        (site.folder / "go").touch()
        runners.hears("scaling from 4 to 1 runners")
        until(lambda: {r.status for r in site.rollouts()} == {Status.SUCCEEDED}, "all ended")
        below = lambda: runners_below(cluster.head_raylet) | runners_below(cluster.other_raylet)  # noqa: E731
        until(lambda: set(below()) == {"crew-1"}, "three have left")
        assert all(record.attempts == 1 for record in site.rollouts()), "none was interrupted"
        assert runners.stop() == 0, runners.output
    assert {record.reward for record in site.rollouts()} == {float(n) for n in range(8)}


def test_a_killed_runner_process_is_restarted_by_its_actor(cluster: TwoNodes, site: Site) -> None:
    pool = ("agent.py:count", "--gateway=none", "--ray", cluster.address, "--num=1")
    with start(site.folder, "runner", *site.place, *pool) as runners:
        site.enqueue(2)
        until(lambda: site.running().get("ray-1") == 2, "both run")
        below = runners_below(cluster.head_raylet) | runners_below(cluster.other_raylet)
        os.kill(below["ray-1"], signal.SIGKILL)
        runners.hears("runner died, exit code -9")
        (site.folder / "go").touch()
        until(lambda: {r.status for r in site.rollouts()} == {Status.SUCCEEDED}, "both ended")
        assert runners.stop() == 0, runners.output


def test_trainer_runs_its_agents_on_the_cluster(cluster: TwoNodes, folder: Path) -> None:
    (folder / "go").touch()
    (folder / "script.py").write_text(
        """
import json
import agent
import whet

if __name__ == "__main__":
    trainer = whet.Trainer(
        runner="ray", n_workers=4, steps=2, tasks_per_step=2, group_size=4, name="on-ray"
    )
    result = trainer.fit(agent.ask, ["one", "two"])
    print(json.dumps(result.as_json()))
"""
    )
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env={**os.environ, "RAY_ADDRESS": cluster.address},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "runner ray-2 joined" in done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 2

    async def workers() -> set[str]:
        async with SQLiteStore(folder / ".whet/runs/on-ray/store.db") as store:
            rollouts = await store.rollouts(limit=100)
            attempts = [await store.attempts(each.rollout.id) for each in rollouts]
        return {attempt.worker for each in attempts for attempt in each}

    assert asyncio.run(workers()) == {"ray-1", "ray-2"}


def test_an_agent_that_a_node_does_not_have_ends_the_command(cluster: TwoNodes, site: Site) -> None:
    (site.folder / "go").touch()
    # The hook exists here alone: nodes have no such variable, which the module checks.
    (site.folder / "hook.py").write_text(
        "import os, whet\nif os.environ.get('HERE') is None:\n    raise ImportError('not here')\n"
        "class Hook(whet.Hooks):\n    pass\n"
    )
    pool = ("agent.py:count", "--gateway=none", "--ray", cluster.address, "--hooks=hook:Hook")
    with start(site.folder, "runner", *site.place, *pool, HERE="1") as runners:
        assert runners.ends() == 2, runners.output
        assert "the runner ray-1 cannot run: exit code 2" in runners.lines[-1]
