"""Text for people and logs."""

import pytest

from whet.io.text import hide_passwords


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://ann:s@cret@host/db", "postgresql://...@host/db"),
        (
            "postgresql://host/db?user=ann&password=secret&a=b",
            "postgresql://host/db?user=ann&password=...&a=b",
        ),
        (
            '{"a": "http://u:p@h", "b": "x@y", "c": "http://h"}',
            '{"a": "http://...@h", "b": "x@y", "c": "http://h"}',
        ),
        ("no route to http://host:1; ask ann@host", "no route to http://host:1; ask ann@host"),
    ],
)
def test_passwords_are_hidden_wherever_a_url_stands(text: str, shown: str) -> None:
    assert hide_passwords(text) == shown
