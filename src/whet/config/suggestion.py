"""Suggestions for unknown config keys and flags."""

import difflib
from collections.abc import Iterable, Mapping

OTHER_NAMES = {
    "batch_size": "tasks_per_step",
    "kl_coef": "loss.kl",
    "learning_rate": "adam.lr",
    "max_model_len": "engine.max_context",
    "max_seq_length": "engine.max_context",
    "max_steps": "steps",
    "n": "group_size",
    "num_generations": "group_size",
    "output_dir": "dir",
}
"""Keys by the names that they have in other libraries."""

REQUEST_FIELDS = {
    "max_completion_tokens": "max_tokens",
    "max_new_tokens": "max_tokens",
    "max_tokens": "max_tokens",
    "stop": "stop",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""Fields of model requests, by these and other names: the agent sets them, no key does."""


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the key that was probably meant: its name in another library, its last part, or a
    similar spelling; empty if there is none."""
    keys = [*known]
    last = name.split(".")[-1]
    if OTHER_NAMES.get(last) in keys:
        return OTHER_NAMES[last]
    ending = [key for key in keys if key.split(".")[-1] == last]
    if not ending and last in REQUEST_FIELDS:
        return ""
    close = ending or difflib.get_close_matches(name, keys, n=1)
    return close[0] if close else ""


def explain_unknown(name: str, known: Mapping[str, str]) -> str:
    """Return what to write instead of an unknown name; `known` has the keys as they are written.

    Empty if nothing is known of it.
    """
    if meant := known.get(suggest(name, known)):
        return f"did you mean {meant}?"
    if field := REQUEST_FIELDS.get(name.split(".")[-1]):
        return f"the agent sends {field} in its own requests"
    return ""
