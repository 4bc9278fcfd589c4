"""Fixtures of the dashboard's tests: a recorded run, its dashboard, and a client."""

from collections.abc import Generator
from pathlib import Path
from shutil import copytree

import anyio
import httpx
import pytest

from support.runs.recorded_run import make_folder, record_run
from whet.app.dashboard.run_catalog import FolderCatalog
from whet.app.dashboard.serving import Dashboard
from whet.app.run_folder import RunFolder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of two steps, which tests only read."""
    made = make_folder(tmp_path_factory.mktemp("runs"))
    anyio.run(record_run, made)
    return made


@pytest.fixture
def fresh(folder: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of the run that a test may change."""
    return RunFolder(copytree(folder.path, tmp_path / "runs" / "mine"))


@pytest.fixture(scope="module")
def dashboard(folder: RunFolder) -> Generator[Dashboard]:
    served = Dashboard(FolderCatalog(folder.path.parent.parent))
    try:
        yield served
    finally:
        served.close()


@pytest.fixture
def client(dashboard: Dashboard) -> Generator[httpx.Client]:
    """A browser's requests, signed in."""
    with httpx.Client(base_url=dashboard.url, timeout=60) as signed_in:
        code = dashboard.create_link().split("code=")[1]
        assert signed_in.post("/api/session", json={"code": code}).status_code == 200
        yield signed_in
