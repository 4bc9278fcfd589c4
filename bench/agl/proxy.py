"""Agent Lightning's store and LLM proxy over an upstream, for `bench/gateway.py` to compare with.

Runs in an environment of its own, where `agentlightning` 0.3 is installed, so it imports nothing of
whet. Prints the proxy's address; then, for each number read, makes that many rollouts.
"""

import asyncio
import json
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import agentlightning as agl  # pyright: ignore[reportMissingImports]  # beside .venv


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


async def until_up(url: str) -> None:
    for _ in range(600):
        try:
            await asyncio.to_thread(urllib.request.urlopen, url, timeout=5)
        except OSError:
            await asyncio.sleep(0.2)
        else:
            return
    raise SystemExit(f"{url} does not answer")


def start_store(port: int) -> "subprocess.Popen[bytes]":
    command = Path(sys.executable).with_name("agl")
    where = ["--host", "127.0.0.1", "--port", str(port), "--log-level", "WARNING"]
    return subprocess.Popen([command, "store", *where], stdout=sys.stderr)


async def main(upstream: str, model: str) -> None:
    agl.setup_logging("WARNING")
    store_port, port = free_port(), free_port()
    store = start_store(store_port)
    try:
        await until_up(f"http://127.0.0.1:{store_port}/v1/agl/health")
        client = agl.LightningStoreClient(f"http://127.0.0.1:{store_port}")
        served = {"model": f"hosted_vllm/{model}", "api_base": upstream, "api_key": "none"}
        proxy = agl.LLMProxy(
            port=port,
            host="127.0.0.1",
            num_workers=1,
            store=client,
            model_list=[{"model_name": model, "litellm_params": served}],
        )
        await proxy.start()
        print(f"bench: http://127.0.0.1:{port}", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            rollouts = [await client.start_rollout(input={}) for _ in range(int(line))]
            places = [
                f"/rollout/{r.rollout_id}/attempt/{r.attempt.attempt_id}/v1/chat/completions"
                for r in rollouts
            ]
            print("bench: " + json.dumps([(place, "none") for place in places]), flush=True)
        await proxy.stop()
        await client.close()
    finally:
        store.terminate()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
