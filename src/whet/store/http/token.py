"""Bearer token of a store server: created once, in a file that only its owner may read."""

import os
import secrets
import tempfile
from pathlib import Path
from typing import NamedTuple

from whet.errors import ConfigError

VARIABLE = "WHET_STORE_TOKEN"
FILE = "store.token"
FOLDER = Path(".whet")
OPEN_TO_OTHERS = 0o077


class Token(NamedTuple):
    """A token, and whether it was just created."""

    value: str
    is_new: bool


def make_token(
    folder: Path = FOLDER, *, file: str = FILE, variable: str = VARIABLE, prefix: str = ""
) -> Token:
    """Return the token to serve with: from the environment, the folder's file, or a new one.

    Raises:
        ConfigError: the file cannot be created, or others may read it.
    """
    path, token = folder / file, prefix + secrets.token_urlsafe(32)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if value := _read_variable(variable):
            return Token(value, is_new=False)
        _write_new(path, token)
    except FileExistsError:
        return Token(_read(path), is_new=False)
    except OSError as error:
        raise ConfigError(f"cannot create the token {str(path)!r}: {error.strerror}") from error
    return Token(token, is_new=True)


def find_token(folder: Path = FOLDER) -> str:
    """Return the token of a store: from the environment, or the folder's file.

    Raises:
        ConfigError: there is no token.
    """
    value, file = _read_variable(VARIABLE), folder / FILE
    if value:
        return value
    if not file.is_file():
        raise ConfigError(
            f"a store over HTTP needs its token: set {VARIABLE}, or run where {str(file)!r} is"
        )
    return _read(file)


def _read_variable(name: str) -> str:
    """Read a variable without the line end that a secret made from a file has."""
    return os.environ.get(name, "").strip()


def _write_new(path: Path, token: str) -> None:
    """Make the file whole or not at all: a server killed meanwhile leaves no empty token."""
    if path.exists():
        raise FileExistsError(path)
    partial, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(partial, "w") as out:
            out.write(token)
        os.link(name, path)
    finally:
        os.unlink(name)


def _read(file: Path) -> str:
    try:
        mode, token = file.stat().st_mode, file.read_text().strip()
    except OSError as error:
        raise ConfigError(f"cannot read the token {str(file)!r}: {error.strerror}") from error
    if mode & OPEN_TO_OTHERS:
        raise ConfigError(f"others may read the token {str(file)!r}: chmod 600 {file}")
    if not token:
        raise ConfigError(
            f"the token {str(file)!r} is empty: remove it, and start the server again"
        )
    return token
