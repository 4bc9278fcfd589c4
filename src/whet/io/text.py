"""Words for numbers."""


def format_count(number: int, noun: str) -> str:
    """Format a number of things: `1 task`, `2 tasks`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
