"""Certificates of authorities: read by the first TLS connection of a client, and not before."""

import ssl
from collections.abc import Callable
from pathlib import Path

import certifi
import pytest
from openai import AsyncOpenAI

from whet.runners.executors.certificates import defer_certificates


def wrap_bio(context: ssl.SSLContext) -> None:
    context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname="example.com")


def list_authorities(context: ssl.SSLContext) -> None:
    assert len(context.get_ca_certs()) > 100


@pytest.mark.parametrize("use", [wrap_bio, list_authorities])
def test_a_context_reads_its_certificates_when_it_is_used(
    use: Callable[[ssl.SSLContext], object],
) -> None:
    defer_certificates()
    context = ssl.create_default_context(cafile=certifi.where())
    # The method of the class below is not replaced, and sees what has been read.
    held = super(ssl.SSLContext, context).cert_store_stats
    assert held()["x509"] == 0
    use(context)
    assert held()["x509"] > 100
    assert context.cert_store_stats() == held()


def test_a_client_is_built_in_a_few_milliseconds_and_knows_the_authorities() -> None:
    defer_certificates()
    client = AsyncOpenAI(base_url="https://example.com", api_key="none")
    pool = client._client._transport._pool  # pyright: ignore
    context: ssl.SSLContext = pool._ssl_context
    assert super(ssl.SSLContext, context).cert_store_stats()["x509"] == 0
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.cert_store_stats()["x509"] > 100


def test_a_file_that_is_missing_or_wrong_is_an_error(tmp_path: Path) -> None:
    defer_certificates()
    with pytest.raises(FileNotFoundError):
        ssl.create_default_context(cafile=str(tmp_path / "missing"))
    (tmp_path / "wrong").write_text("no certificate")
    context = ssl.create_default_context(cafile=str(tmp_path / "wrong"))
    with pytest.raises(ssl.SSLError):
        wrap_bio(context)
