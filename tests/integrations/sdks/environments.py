"""An environment for each SDK, as its pins say, made once and kept in `.sdks/`."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from integrations.sdks.recipes import ROOT

PINS = Path(__file__).parent / "pins"
CACHE = ROOT / ".sdks"


def python_of(pins: str) -> Path:
    """The interpreter of an environment with exactly the packages of a list."""
    listed = PINS / f"{pins}.txt"
    digest = hashlib.sha256(listed.read_bytes() + sys.version.encode()).hexdigest()[:12]
    folder = CACHE / f"{pins}-{digest}"
    python = folder / "bin" / "python"
    if not (folder / "whole").exists():
        _uv("venv", "--clear", "--python", sys.executable, str(folder))
        _uv("pip", "install", "--no-deps", "--python", str(python), "-r", str(listed))
        (folder / "whole").touch()
    return python


def _uv(*arguments: str) -> None:
    command = [sys.executable, "-m", "uv", *arguments, "--quiet"]
    done = subprocess.run(
        command, env=_as_pip_does(), capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"


def _as_pip_does() -> dict[str, str]:
    """The environment for uv, which reads no settings of pip, with those of pip's that matter."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    settings = {
        key.rpartition(".")[2]: value.strip("'")
        for key, _, value in (line.partition("=") for line in listed.splitlines())
    }
    known = {
        "UV_DEFAULT_INDEX": settings.get("index-url"),
        "UV_INDEX": settings.get("extra-index-url"),
        "UV_INDEX_STRATEGY": "unsafe-best-match",  # pip takes the best of all its indexes
        "UV_FIND_LINKS": settings.get("find-links", "").replace(" ", ","),
        "SSL_CERT_FILE": settings.get("cert"),
    }
    return {key: value for key, value in known.items() if value} | dict(os.environ)
