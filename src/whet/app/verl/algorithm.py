"""`whet.VERL`: verl's trainers as an algorithm, with verl's own config. Light to import."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import JsonValue

from whet.trainers.verl.settings import check_contradictions, flatten, parse_overrides


@dataclass(frozen=True, slots=True)
class VERL:
    """Train with verl: `whet.Trainer(algorithm=whet.VERL({...})).fit(agent, tasks)`.

    `config` has keys of verl's own config, nested; `preset` the sizes to start from. `python` is
    the Python of an environment that has verl, where it is not this one.
    """

    config: Mapping[str, object] = field(default_factory=dict[str, object])
    preset: Literal["tiny", "one-gpu", "node"] = "one-gpu"
    python: str | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError if a key contradicts what whet decides, or is not JSON."""
        check_contradictions(parse_overrides(list(flatten(self.config))))

    @property
    def settings(self) -> dict[str, JsonValue]:
        """The section `trainer` of a run's config."""
        return {
            "kind": "verl",
            "preset": self.preset,
            "overrides": list(flatten(self.config)),
            **({"python": self.python} if self.python else {}),
        }
