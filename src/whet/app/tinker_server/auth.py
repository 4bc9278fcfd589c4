"""Authorization: the server's API key, and signed URLs for files."""

import hashlib
import hmac
import re
import time

from starlette.requests import Request

from whet.errors import RequestError

TIME = re.compile("[0-9]{1,12}")


class Signer:
    """Signs URLs that give access to one checkpoint for a limited time, without the key."""

    lifetime_s = 3600

    def __init__(self, key: str) -> None:
        self._secret = hashlib.blake2b(key.encode(), digest_size=32).digest()

    def sign(self, path: str) -> str:
        until = int(time.time()) + self.lifetime_s
        return f"{until}-{self._digest(path, until)}"

    def check(self, token: str, path: str) -> None:
        """Raise RequestError if the token is invalid for the path or expired."""
        until, _, digest = token.partition("-")
        good = TIME.fullmatch(until) and hmac.compare_digest(
            digest.encode(), self._digest(path, int(until)).encode()
        )
        if not good or int(until) < time.time():
            raise RequestError("invalid or expired URL: request another")

    def _digest(self, path: str, until: int) -> str:
        message = f"{until} {path}".encode()
        return hmac.new(self._secret, message, "sha256").hexdigest()[:32]


def is_authorized(request: Request, key: str) -> bool:
    """Return whether the request carries the key, as `x-api-key` or bearer token."""
    token = request.headers.get("x-api-key")
    if token is None:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(token.encode(), key.encode())
