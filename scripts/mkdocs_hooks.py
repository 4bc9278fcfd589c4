"""Hooks of the documentation site: links to files outside `docs/` become plain text.

The pages link to sources and examples relative to the repository, which works where the repository
is browsed. The site has no sources, so such a link is replaced by its text. One that leads nowhere
is an error in both.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\.?/[^)#\s]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Called by mkdocs with the text of each page."""
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        target = (folder / match[2]).resolve()
        if target.is_relative_to(ROOT / "docs"):
            return match[0]
        if not target.exists():
            raise FileNotFoundError(f"{page.file.src_uri} has a dead link: {match[2]}")
        return match[1]

    return LINK.sub(replace, markdown)
