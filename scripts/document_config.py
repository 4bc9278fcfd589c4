"""Write the table of keys in docs/reference/configuration.md from the config itself."""

from pathlib import Path

from whet.app.cli.config_flags import list_config_fields
from whet.config import INTERNAL_KEYS, UNIONS, PolicyConfig, RunConfig

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "configuration.md"
HEAD = "\n| key | default | meaning |\n|---|---|---|\n"


def keys() -> str:
    """A table for each section."""
    text, last = "", None
    for key, field in list_config_fields():
        section = key.rpartition(".")[0]
        if section != last:
            text += (f"\n### `[{section}]`\n\n{describe(section)}\n" if section else "") + HEAD
            last = section
        default = "" if field.default is None else f"`{field.default}`"
        text += f"| `{key}` | {default} | {' '.join((field.description or '').split())} |\n"
    about = " ".join((PolicyConfig.__doc__ or "").split())
    text += f"\n### `[policies.NAME]`\n\n{about}\n{HEAD}"
    for key, field in PolicyConfig.model_fields.items():
        if key in INTERNAL_KEYS:
            continue
        default = "" if field.default is None else f"`{field.default}`"
        meaning = " ".join((field.description or "").split())
        text += f"| `policies.NAME.{key}` | {default} | {meaning} |\n"
    return text


def describe(section: str) -> str:
    """Describe a section, or its kinds."""
    if section in UNIONS:
        return "The keys depend on `kind`; one that its kind does not have is an error."
    kind = RunConfig.model_fields[section].annotation
    return " ".join((kind.__doc__ or "").split()) if kind else ""


if __name__ == "__main__":
    page = PAGE.read_text()
    above, rest = page.split("Keys without a default are absent unless set.\n")
    below = rest[rest.index("\n## Environment") :]
    PAGE.write_text(f"{above}Keys without a default are absent unless set.\n{keys()}{below}")
