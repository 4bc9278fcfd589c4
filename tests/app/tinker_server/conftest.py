"""Fixtures of the Tinker server's tests: a server and clients of it."""

import urllib.request
from collections.abc import Generator
from pathlib import Path

import pytest
import tinker

from support.servers import conformance
from support.servers.tinker_serving import Server
from whet.models.catalog import resolve_model


@pytest.fixture(scope="session")
def watched() -> set[str]:
    called: set[str] = set()
    conformance.watch(called)
    return called


@pytest.fixture(autouse=True)
def called(request: pytest.FixtureRequest, watched: set[str]) -> Generator[set[str]]:
    """The methods of the client that a test calls, with its own fixtures: those that it shows."""
    watched.clear()
    yield watched
    assert conformance.shown_by(request.function) <= watched


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Generator[Server]:
    server = Server(tmp_path_factory.mktemp("tinker") / "dir")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def model() -> Path:
    return resolve_model("tiny")


@pytest.fixture(scope="session")
def service(server: Server) -> tinker.ServiceClient:
    return server.client()


@pytest.fixture
def training(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(base_model="tiny", rank=8, seed=3)


@pytest.fixture(scope="session")
def rest(server: Server) -> tinker.RestClient:
    return server.rest()


@pytest.fixture
def adapter(training: tinker.TrainingClient, rest: tinker.RestClient, tmp_path: Path) -> Path:
    """The adapters of `training` as they are at the start, as a PEFT folder."""
    path = training.save_weights_external("start").result().path
    urls = rest.get_external_weights_urls(path).result().urls
    for name, url in urls.items():
        with urllib.request.urlopen(url) as reply:
            (tmp_path / name).write_bytes(reply.read())
    return tmp_path
