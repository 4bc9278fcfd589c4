"""Where the model is, in a file for services that ask before they are asked."""

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from whet.errors import ConfigError

VARIABLE = "LLM_SERVER_NOTIFY_FILE"


@contextmanager
def notified(url: str) -> Generator[None]:
    """While a gateway listens, its address is in the file that the environment names, if any.

    Raises:
        ConfigError: the file cannot be written.
    """
    if not (name := os.environ.get(VARIABLE)):
        yield
        return
    file, address = Path(name), urlsplit(url).netloc
    part = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        part.write_text(address)
        part.replace(file)
    except OSError as error:
        raise ConfigError(f"{VARIABLE}={name!r} cannot be written: {error}") from error
    try:
        yield
    finally:
        with suppress(OSError):
            if file.read_text() == address:  # not that of a gateway that came after
                file.unlink()
