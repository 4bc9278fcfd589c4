"""Real vLLM servers, from the environment whose `vllm` program $WHET_VLLM names."""

import os
from collections.abc import Generator
from pathlib import Path

import pytest

from support.servers.real_vllm import ON_A_CPU, PROGRAM, TOOLS, Launch
from whet.config import LocalTrainerConfig, VLLMConfig
from whet.engines.remote.launch import VLLMProcess, build_required_flags
from whet.models.catalog import TINY


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Generator[Launch]:
    """Starts a server for a model; all are stopped in the end."""
    servers: list[VLLMProcess] = []
    folder = tmp_path_factory.mktemp("vllm")

    def start(model: Path, *flags: str) -> VLLMProcess:
        config = VLLMConfig(command=str(PROGRAM), flags=("--enforce-eager", "--seed", "0", *flags))
        needs = build_required_flags(LocalTrainerConfig(), max_context=None, max_versions=2)
        log = folder / f"{len(servers)}.log"
        servers.append(VLLMProcess(model, config, needs, log=log))
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
def replicas(launch: Launch) -> list[VLLMProcess]:
    """Two servers of the tiny model; they start while others are waited for."""
    return [launch(TINY, *TOOLS), launch(TINY, *TOOLS)]
