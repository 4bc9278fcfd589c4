"""How a model marks its thinking."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thinking comes first in a turn, between two marks."""

    name: str
    open: str = ""
    close: str = ""
    marks: Sequence[str] = ()
    """A template that contains all of these makes its model think this way."""

    def ends_open(self, prompt: str) -> bool:
        """Whether a prompt ends inside a block of thinking, so that the turn starts there."""
        return bool(self.open) and prompt.rstrip().endswith(self.open.rstrip())

    def ends_closed(self, prompt: str) -> bool:
        """Whether a prompt ends with a block of thinking that is closed, so that there is none."""
        return bool(self.open) and prompt.rstrip().endswith(self.close)


NONE = Reasoning("none")
"""The template knows of no thinking, so whatever the model writes is content."""

FORMATS = (
    Reasoning("gemma4", "<|channel>thought\n", "<channel|>", ("<|channel>", "<channel|>")),
    Reasoning("mistral", "[THINK]", "[/THINK]", ("[THINK]",)),
    Reasoning("think", "<think>", "</think>", ("</think>",)),
)


def choose_reasoning(source: str) -> Reasoning:
    """How the model of a chat template thinks; the first format whose marks are all there."""
    found = (format for format in FORMATS if all(mark in source for mark in format.marks))
    return next(found, NONE)
