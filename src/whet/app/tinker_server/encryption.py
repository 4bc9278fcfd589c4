"""Encryption of exported weights with age, for clients that request it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyrage  # pyright: ignore[reportMissingTypeStubs]  # an extension module without types

from whet.errors import RequestError

SUFFIX = ".age"
"""Suffix of encrypted files, by which clients know them."""

_age: Any = pyrage


def parse_recipients(texts: Sequence[str]) -> list[object]:
    """Parse public keys of age or SSH. Raises RequestError."""
    return [_parse_recipient(text) for text in texts]


def _parse_recipient(text: str) -> object:
    kind = _age.ssh if text.startswith("ssh-") else _age.x25519
    try:
        return kind.Recipient.from_str(text)
    except _age.RecipientError as error:
        raise RequestError(
            f"invalid age recipient {text!r:.80}: {error}; expected age1... or ssh-..."
        ) from error


def encrypt_files(folder: Path, recipients: Sequence[object]) -> None:
    """Replace every file of a folder by its encrypted form, `NAME.age`."""
    for file in [file for file in sorted(folder.rglob("*")) if file.is_file()]:
        _age.encrypt_file(str(file), f"{file}{SUFFIX}", list(recipients))
        file.unlink()
