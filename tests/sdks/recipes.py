"""Which SDKs the suite runs, and what is known of each beforehand."""

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
EXAMPLES = ROOT / "examples" / "agents"
CHANGED = re.compile(r" *# whet: begin\n(.*?) *# whet: end\n", re.DOTALL)


@dataclass(frozen=True)
class Recipe:
    """One row of the table."""

    name: str
    """As its users write it."""
    pins: str
    """The list of packages in `pins/`: its environment."""
    example: str
    """Its file in `examples/agents/`."""
    package: str
    """Whose version is told."""
    note: str = ""
    """What its users have to know."""
    function: str = "solve"
    dialect: str = "chat"
    streams: Literal["always", "both", "never"] = "both"
    fork: str | None = None
    """Why no turn continues the one before, where that is so."""
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def version(self) -> str:
        """Of the package, as pinned."""
        pinned = (HERE / "pins" / f"{self.pins}.txt").read_text()
        [found] = re.findall(rf"^{self.package}==(.+)$", pinned, re.MULTILINE)
        return found

    @property
    def changed(self) -> str:
        """The lines of its example that a user changes."""
        program = (EXAMPLES / f"{self.example}.py").read_text()
        _, _, function = program.partition(f"def {self.function}(")
        found = CHANGED.search(function)
        assert found, f"{self.example}.py marks no lines in {self.function}"
        return textwrap.dedent(found[1])


RECIPES = [
    Recipe("openai", "openai", "openai_client", "openai"),
    Recipe("Strands Agents", "strands", "strands_agent", "strands-agents", streams="always"),
]
