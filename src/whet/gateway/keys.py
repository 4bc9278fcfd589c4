"""API keys that name the attempt they were made for, and cannot be made by anyone else."""

import hashlib
import hmac
from functools import lru_cache

from whet.types import AttemptId

PREFIX = "whet-"
MAC_LENGTH = 32

ANY = AttemptId("*")
"""What the gateway's own key names: the attempt is then told by URL, header or baggage."""


def secret_of(token: str, run: str) -> bytes:
    """What a run's keys are minted with where its processes share no more than a store's token.

    Nobody who has a key can find the token.
    """
    key = hashlib.sha256(token.encode()).digest()
    return hashlib.blake2b(run.encode(), key=key, person=b"whet gateway").digest()


def mint(attempt: AttemptId, secret: bytes) -> str:
    """The API key of an attempt, or of the gateway itself."""
    return f"{PREFIX}{attempt}-{_mac(attempt, secret)}"


@lru_cache(4096)
def read(key: str, secret: bytes) -> AttemptId | None:
    """The attempt a key was minted for, or None if it was not minted with this secret."""
    body, _, mac = key.removeprefix(PREFIX).rpartition("-")
    genuine = key.startswith(PREFIX) and hmac.compare_digest(
        mac.encode(), _mac(body, secret).encode()
    )
    return AttemptId(body) if genuine else None


def _mac(attempt: str, secret: bytes) -> str:
    return hmac.new(secret, attempt.encode(), hashlib.sha256).hexdigest()[:MAC_LENGTH]
