"""What was found out about a chat template at start-up."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import JsonValue

Mode = Literal["merged", "per-call"]
DropsThinking = Literal["never", "before_last_user", "always"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How far conversations of a template can be continued from stored tokens."""

    mode: Mode
    """`merged`: a conversation trains as one row. `per-call`: every call is a row of its own."""
    causes: tuple[str, ...]
    """Why not merged; empty if it is."""
    passed: tuple[str, ...]
    """Probes in which stored tokens and a whole render agree, id for id."""
    failed: tuple[str, ...]
    """Probes in which they do not, so that nothing may be merged."""
    forks: Mapping[str, str]
    """Probes in which they do not, and why; such calls are recognised and start a new row."""
    skipped: Mapping[str, str]
    """Probes the template itself refuses, and why."""
    close: str
    """The token that ends an assistant turn."""
    drops_thinking: DropsThinking
    """Which earlier thinking the template leaves out."""
    tools: bool
    """Whether the template shows tools to the model."""
    parser: str
    """The format in which tool calls are looked for."""
    reasoning: str
    """The format in which thinking is looked for."""

    def to_json(self) -> dict[str, JsonValue]:
        """For `whet doctor`."""
        return {
            "mode": self.mode,
            "causes": list(self.causes),
            "probes": {
                "passed": list(self.passed),
                "failed": list(self.failed),
                "forks": dict(self.forks),
                "skipped": dict(self.skipped),
            },
            "close": self.close,
            "drops_thinking": self.drops_thinking,
            "tools": self.tools,
            "parser": self.parser,
            "reasoning": self.reasoning,
        }
