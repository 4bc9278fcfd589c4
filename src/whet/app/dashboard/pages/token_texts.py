"""Decoded text of each token id, as the dashboard shows it."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from whet.errors import ConfigError
from whet.gateway.templates.chat_template import ChatTemplate
from whet.models.catalog import find_model

OVERLAP = 4
"""Ids decoded again: a character may span tokens, and some decoders drop the first space."""
WINDOW = 24
"""Most ids decoded at once, unless they end in half a character."""
BROKEN = "\ufffd"


def split_text(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return the text of each id; one that only begins a character has an empty text."""
    texts: list[str] = []
    first, done = 0, ""
    for index in range(len(ids)):
        text = decode(ids[first : index + 1])
        if text.endswith(BROKEN) and index + 1 < len(ids):
            texts.append("")
            continue
        texts.append(text[len(done) :])
        done = text
        if index + 1 - first > WINDOW:
            first = index + 1 - OVERLAP
            done = decode(ids[first : index + 1])
    return texts


class Vocabularies:
    """Tokenizers of models that are on this machine, loaded when they are needed."""

    def __init__(self) -> None:
        self._templates: dict[Path, ChatTemplate | None] = {}
        self._lock = threading.Lock()

    def find(self, model: str) -> ChatTemplate | None:
        """Return the tokenizer of a model by its name in a config; None if it is not here."""
        folder = find_model(model) if model else None
        if folder is None:
            return None
        with self._lock:
            if folder not in self._templates:
                try:
                    self._templates[folder] = ChatTemplate(folder)
                except ConfigError:
                    self._templates[folder] = None
            return self._templates[folder]
