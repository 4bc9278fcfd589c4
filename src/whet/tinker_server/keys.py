"""Who may ask: the server's one key, and signed addresses for files."""

import hashlib
import hmac
import re
import time

from starlette.requests import Request

from whet.errors import RequestError

TIME = re.compile("[0-9]{1,12}")


class Signer:
    """Addresses that open one checkpoint for a while, without the key."""

    lifetime_s = 3600

    def __init__(self, key: str) -> None:
        self._secret = hashlib.blake2b(key.encode(), digest_size=32).digest()

    def sign(self, path: str) -> str:
        until = int(time.time()) + self.lifetime_s
        return f"{until}-{self._digest(path, until)}"

    def check(self, token: str, path: str) -> None:
        """Raises RequestError for a token that is not of this path, or no longer."""
        until, _, digest = token.partition("-")
        good = TIME.fullmatch(until) and hmac.compare_digest(
            digest.encode(), self._digest(path, int(until)).encode()
        )
        if not good or int(until) < time.time():
            raise RequestError("the address is not valid any more: ask for another")

    def _digest(self, path: str, until: int) -> str:
        said = f"{until} {path}".encode()
        return hmac.new(self._secret, said, "sha256").hexdigest()[:32]


def allowed(request: Request, key: str) -> bool:
    """Whether the request carries the key, as the client sends it or as a bearer token."""
    given = request.headers.get("x-api-key")
    if given is None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode(), key.encode())
