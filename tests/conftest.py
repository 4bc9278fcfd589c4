"""Fixtures and settings of all tests."""

import gc
import sys
import warnings
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from support.clock import Clock

if TYPE_CHECKING:
    from support.servers.tinker_serving import Server

# A busy machine is slow, not wrong. Each run draws other examples, so few of them add up.
settings.register_profile("whet", deadline=None, max_examples=50)
settings.load_profile("whet")


@pytest.fixture(autouse=True, scope="session")
def few_cores() -> Generator[None]:
    """Agents run in the test's process unless a test chooses otherwise, on any machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whet.runners.attempt.FEW_CORES", 10_000)
        yield


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # a million objects of libraries, which every full collection would visit


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    # The tinker client leaves its connections to the collector, which may come in any later test.
    if "tinker" in sys.modules:
        for kind in ("ResourceWarning", "pytest.PytestUnraisableExceptionWarning"):
            item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    # Or to the end of the process.
    warnings.simplefilter("ignore", ResourceWarning)
    warnings.simplefilter("ignore", pytest.PytestUnraisableExceptionWarning)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder made once; nobody writes to it."""
    from support.models.tiny_llama import make_model

    return make_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def postgres_url() -> Generator[str]:
    """A PostgreSQL server for the whole session; each test has a schema of its own."""
    from support.servers.postgres_server import postgres_server

    with postgres_server() as url:
        yield url


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def tinker(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Generator["Server"]:
    """A server for the `tinker` client with the tiny llama, which here has a tokenizer too."""
    import os
    import shutil

    from support.servers.tinker_serving import KEY, Server
    from whet.models.catalog import TINY

    folder = tmp_path_factory.mktemp("tinker")
    model = folder / "model"
    shutil.copytree(tiny_folder, model)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TINY / file, model / file)
    os.environ["TINKER_API_KEY"] = KEY
    server = Server(folder / "dir", str(model))
    yield server
    server.stop()
    del os.environ["TINKER_API_KEY"]
