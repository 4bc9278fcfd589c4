"""The same programs on Agent Lightning itself and on whet.agl; `make test-agl` installs it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PYTHON = os.environ.get("WHET_AGL", "")
"""A Python with agentlightning 0.3.0."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="run by `make test-agl`, which installs Agent Lightning"),
]


def run(python: str, library: str) -> dict[str, Any]:
    program = Path(__file__).with_name("programs.py")
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    if library == "agentlightning":
        environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, str(program), library], env=environment, stdout=subprocess.PIPE, check=True
    )
    return json.loads(done.stdout)


def test_both_libraries_give_the_same_answers() -> None:
    theirs = run(PYTHON, "agentlightning")
    assert run(sys.executable, "whet.agl") == theirs
    recorded = Path(__file__).with_name("answers.json")
    assert json.loads(recorded.read_text()) == theirs


def test_every_public_name_is_supported_or_refused_by_name() -> None:
    import whet.agl as agl

    listing = (
        "import types, json, agentlightning as a;"
        "print(json.dumps([n for n in dir(a) if n[0] != '_'"
        " and not isinstance(getattr(a, n), types.ModuleType)]))"
    )
    done = subprocess.run([PYTHON, "-c", listing], stdout=subprocess.PIPE, check=True)
    names = set(json.loads(done.stdout.splitlines()[-1]))
    assert names <= {*agl.__all__, *agl.UNSUPPORTED}
