"""Real vLLM servers, from the environment whose `vllm` program $WHET_VLLM names."""

import os
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from whet.config import EngineConfig, TrainerConfig
from whet.engines.launch import LaunchedVLLM, needed_flags
from whet.policies.catalogue import TINY

PROGRAM = os.environ.get("WHET_VLLM")
ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""One thread: more of them wait for each other where cores are shared."""

Launch = Callable[..., LaunchedVLLM]


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Generator[Launch]:
    """Starts a server for a model; all are stopped in the end."""
    if PROGRAM is None:
        pytest.skip("WHET_VLLM names no vLLM: make test-vllm")
    servers: list[LaunchedVLLM] = []
    folder = tmp_path_factory.mktemp("vllm")

    def start(model: Path, *flags: str) -> LaunchedVLLM:
        config = EngineConfig(
            kind="vllm", command=str(PROGRAM), flags=("--enforce-eager", "--seed", "0", *flags)
        )
        needs = needed_flags(TrainerConfig(), max_context=None, slots=2)
        log = folder / f"{len(servers)}.log"
        servers.append(LaunchedVLLM(model, config, needs, log=log))
        return servers[-1]

    before = dict(os.environ)
    os.environ.update(ON_A_CPU)
    try:
        yield start
    finally:
        os.environ.clear()
        os.environ.update(before)
        for server in servers:
            server.close()


@pytest.fixture(scope="session")
def replicas(launch: Launch) -> list[LaunchedVLLM]:
    """Two servers of the tiny model; they start while others are waited for."""
    return [launch(TINY), launch(TINY)]
