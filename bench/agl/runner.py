"""Agent Lightning's runner on the agent of `bench/runners.py`, in an environment of its own.

    python bench/agl/runner.py shm|cs ROLLOUTS

`cs` is its default, processes around a store over HTTP; `shm` threads around one in memory.
Imports nothing of whet. Prints one JSON object.
"""

import asyncio
import json
import logging
import os
import socket
import sys
import time

try:
    import agentlightning as agl  # pyright: ignore[reportMissingImports]  # beside .venv
except ImportError:
    sys.exit(0)  # not by itself: bench/runners.py runs it where Agent Lightning is installed

SETTLE_S = 12.0
"""Until its runner has come up and polls."""

result: dict[str, object] = {}


@agl.rollout
async def agent(task: object, llm: agl.LLM) -> float:
    return 1.0


class Enqueue(agl.Algorithm):
    """Enqueues, and waits until all have ended."""

    def __init__(self, rollouts: int) -> None:
        super().__init__()
        self._rollouts = rollouts

    async def run(self, train_dataset: object = None, val_dataset: object = None) -> None:
        store = self.get_store()
        await store.add_resources({"llm": agl.LLM(endpoint="http://127.0.0.1:1/v1", model="m")})
        await asyncio.sleep(SETTLE_S)
        cpu = time.process_time()
        ids = [
            (await store.enqueue_rollout(input={"n": n}, mode="train")).rollout_id
            for n in range(self._rollouts)
        ]
        left, done = set(ids), []
        deadline = time.monotonic() + 240
        while left and time.monotonic() < deadline:
            for rollout in await store.wait_for_rollouts(rollout_ids=list(left), timeout=0):
                left.discard(rollout.rollout_id)
                done.append(rollout)
            await asyncio.sleep(0.05)
        cpu = time.process_time() - cpu
        attempts = [a for id in ids for a in await store.query_attempts(id)]
        # From the first pick-up on: that it polls every five seconds is not held against it.
        began = min(attempt.start_time for attempt in attempts)
        ended = max(rollout.end_time for rollout in done)
        result["rollouts_per_s"] = len(done) / (ended - began)
        if sys.argv[1] == "shm":  # else the work is done in other processes
            result["cpu_ms"] = cpu / len(done) * 1e3
        result["failed"] = sum(rollout.status != "succeeded" for rollout in done) + len(left)


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit("run by bench/runners.py, with AGL_PYTHON")
    logging.disable(logging.WARNING)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    strategy = (
        agl.SharedMemoryExecutionStrategy(n_runners=1, main_thread="algorithm")
        if sys.argv[1] == "shm"
        else agl.ClientServerExecutionStrategy(
            n_runners=1, server_host="127.0.0.1", server_port=port
        )
    )
    trainer = agl.Trainer(algorithm=Enqueue(int(sys.argv[2])), n_runners=1, strategy=strategy)
    try:
        trainer.fit(agent, train_dataset=[1])
    finally:
        result["load"] = os.getloadavg()[0]
        print(json.dumps(result), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
