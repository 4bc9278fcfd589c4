from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

from clock import Clock

settings.register_profile("whet", deadline=None)  # a busy machine is slow, not wrong
settings.load_profile("whet")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder made once; nobody writes to it."""
    from tiny_llama import make_model

    return make_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def postgres_url() -> Generator[str]:
    """A PostgreSQL server for the whole session; each test has a schema of its own."""
    from postgres_server import postgres_server

    with postgres_server() as url:
        yield url


@pytest.fixture
def clock() -> Clock:
    return Clock()
