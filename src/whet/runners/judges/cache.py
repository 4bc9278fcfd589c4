"""Replies of judges by the content of the request, in a folder that processes may share."""

import hashlib
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path

from pydantic import JsonValue

from whet.io.chat_completion import Completion


class ReplyCache:
    """A file for each request. Whatever cannot be read or written is a miss, never an error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, request: JsonValue) -> Completion | None:
        """Return the reply to a request that was kept before."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            value = json.loads(self._find_file(request).read_text(encoding="utf-8"))
            text, counts = value["text"], (value["input_tokens"], value["output_tokens"])
            if isinstance(text, str) and all(type(count) is int for count in counts):
                return Completion(text, *counts)
        return None

    def put(self, request: JsonValue, reply: Completion) -> None:
        """Keep the reply to a request."""
        file = self._find_file(request)
        partial = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(reply._asdict()), encoding="utf-8")
            os.replace(partial, file)
        except OSError:
            with suppress(OSError):
                partial.unlink()

    def _find_file(self, request: JsonValue) -> Path:
        text = json.dumps(request, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return self._folder / digest[:2] / f"{digest[2:]}.json"
