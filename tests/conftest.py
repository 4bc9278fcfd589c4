from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder made once; nobody writes to it."""
    from tiny_llama import make_model

    return make_model(tmp_path_factory.mktemp("models") / "tiny-llama")
