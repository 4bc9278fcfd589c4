"""Decoded text of each token id, as the dashboard shows it."""

import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from whet.errors import ConfigError
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.detokenize import IncrementalDecoder
from whet.models.catalog import find_model


def split_text(
    ids: Sequence[int], decode: Callable[[Sequence[int]], str], byte_ids: Collection[int] = ()
) -> list[str]:
    """Return the text of each id; an id that only begins a character has an empty text."""
    decoder = IncrementalDecoder(decode, byte_ids)
    texts = [decoder.feed([id]) for id in ids]
    if texts:
        texts[-1] += decoder.finish()
    return texts


class Vocabularies:
    """Tokenizers of models that are on this machine, loaded when they are needed."""

    def __init__(self) -> None:
        self._templates: dict[Path, ChatTemplate | None] = {}
        self._lock = threading.Lock()

    def find(self, model: str) -> ChatTemplate | None:
        """Return the tokenizer of a model by its name in a config; None if it is not found here."""
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
