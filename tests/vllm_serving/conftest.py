"""Real vLLM servers, from the environment whose `vllm` program $WHET_VLLM names."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest
from real_vllm import ON_A_CPU, PROGRAM, TOOLS, Launch

from whet.config import EngineConfig, TrainerConfig
from whet.engines.launch import LaunchedVLLM, needed_flags
from whet.policies.catalogue import TINY


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Generator[Launch]:
    """Starts a server for a model; all are stopped in the end."""
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
    return [launch(TINY, *TOOLS), launch(TINY, *TOOLS)]
