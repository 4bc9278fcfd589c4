"""Write the table of keys in docs/configuration.md from the config itself."""

from pathlib import Path

from whet.app.flags import config_leaves
from whet.config import RunConfig

PAGE = Path(__file__).parent.parent / "docs" / "configuration.md"
HEAD = "\n| key | default | meaning |\n|---|---|---|\n"


def keys() -> str:
    """A table for each section."""
    text, last = "", None
    for key, field in config_leaves():
        section = key.rpartition(".")[0]
        if section != last:
            kind = RunConfig.model_fields[section].annotation if section else None
            title = f"\n### `[{section}]`\n\n{kind.__doc__}\n" if kind else ""
            text += title + HEAD
            last = section
        default = "" if field.default is None else f"`{field.default}`"
        text += f"| `{key}` | {default} | {' '.join((field.description or '').split())} |\n"
    return text


if __name__ == "__main__":
    page = PAGE.read_text()
    above, rest = page.split("Absent where no default is shown.\n")
    below = rest[rest.index("\n## Commands") :]
    PAGE.write_text(f"{above}Absent where no default is shown.\n{keys()}{below}")
