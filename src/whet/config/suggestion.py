"""Suggestions for unknown config keys and flags."""

import difflib
from collections.abc import Iterable

OTHER_NAMES = {
    "batch_size": "tasks_per_step",
    "learning_rate": "adam.lr",
    "max_steps": "steps",
    "n": "group_size",
    "num_generations": "group_size",
}
"""Keys by the names that they have in other libraries."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the key that was probably meant: known by this name elsewhere, ending with it, or
    spelled alike; empty if there is none."""
    keys = [*known]
    last = name.split(".")[-1]
    if OTHER_NAMES.get(last) in keys:
        return OTHER_NAMES[last]
    ending = [key for key in keys if key.split(".")[-1] == last]
    close = ending or difflib.get_close_matches(name, keys, n=1)
    return close[0] if close else ""
