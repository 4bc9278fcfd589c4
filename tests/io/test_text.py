"""Text for people and logs."""

import pytest

from whet.io.text import escape_lines, hide_passwords


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


def test_text_of_several_lines_cannot_control_the_terminal_but_keeps_its_layout() -> None:
    assert escape_lines("if x:\n\t\x1b[2Jy\r\x07\n") == "if x:\n\t␛[2Jy  \n"
