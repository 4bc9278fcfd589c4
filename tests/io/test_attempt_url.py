"""The base URL of an attempt, written without its ids."""

import pytest

from whet.io.attempt_url import build_attempt_url, shorten_attempt_urls
from whet.types import Attempt, AttemptId, Rollout

ATTEMPT = Attempt(id=AttemptId("r7.2"), rollout=Rollout(id="r7", task=1, group="g"), number=2)


@pytest.mark.parametrize("gateway", ["http://127.0.0.1:80", "https://gpu1:8000", "http://a/key/k"])
def test_the_base_url_of_an_attempt_is_written_without_its_ids(gateway: str) -> None:
    url = build_attempt_url(gateway, ATTEMPT)
    text = shorten_attempt_urls(f"404 for url '{url}/chat', {url.removesuffix('/v1')}/agent/a/v1/x")
    assert text == "404 for url 'llm.base_url/chat', llm.base_url/agent/a/x"


def test_other_urls_are_kept() -> None:
    text = "404 for url 'http://127.0.0.1:80/v1/chat', see https://example.com/rollout/1"
    assert shorten_attempt_urls(text) == text
