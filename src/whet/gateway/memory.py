"""Prompts that were rendered not long ago."""

from collections import OrderedDict

from whet.gateway.messages import Message

TOKENS_KEPT = 1_000_000

Key = tuple[str, tuple[Message, ...]]
"""The root of a conversation, and all its messages."""


class PromptMemory:
    """Whole prompts by what they say: the rollouts of a group all begin with the same one."""

    def __init__(self) -> None:
        self._prompts: OrderedDict[Key, tuple[int, ...]] = OrderedDict()
        self._held = 0

    def get(self, key: Key) -> tuple[int, ...] | None:
        """The ids of a prompt, if it is still known."""
        if key in self._prompts:
            self._prompts.move_to_end(key)
        return self._prompts.get(key)

    def put(self, key: Key, ids: tuple[int, ...]) -> None:
        """Keep a prompt; those that were asked for least lately make room."""
        self._held += len(ids) - len(self._prompts.pop(key, ()))
        self._prompts[key] = ids
        while self._held > TOKENS_KEPT:
            self._held -= len(self._prompts.popitem(last=False)[1])
