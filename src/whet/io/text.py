"""Text for people: words for numbers, and what a terminal or a log may have."""

import re
import unicodedata

BIDIRECTIONAL = re.compile("[\u202a-\u202e\u2066-\u2069]")


def format_count(number: int, noun: str) -> str:
    """Format a number of things: `1 task`, `2 tasks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def hide_passwords(text: str) -> str:
    """Return text with URLs, such as a message, without the users and passwords in them."""
    text = re.sub(r'://[^/\s"]*@', "://...@", text)
    return re.sub(r'(?<=[?&]password=)[^&\s"]*', "...", text)


def escape_control_characters(text: str) -> str:
    """Replace the characters of a text that control a terminal, by symbols or spaces."""
    text = BIDIRECTIONAL.sub("\ufffd", text)
    return "".join(
        "␛" if char == "\x1b" else " " if unicodedata.category(char) == "Cc" else char
        for char in text
    )


def escape_lines(text: str) -> str:
    """Escape a text of several lines, which keeps its line ends and tabs."""
    parts = re.split("([\n\t])", text)
    return "".join(each if each in "\n\t" else escape_control_characters(each) for each in parts)
