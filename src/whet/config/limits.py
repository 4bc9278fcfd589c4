"""Config sections of budget and checkpoints."""

from typing import Annotated

from pydantic import Field

from whet.config.section import Section


class CheckpointsConfig(Section):
    """Checkpoints, which are written while the next step runs."""

    every: Annotated[int, Field(ge=1)] = 1
    """Steps between checkpoints; one is left out where writing would take more than a fifth of the
    time. A resumed run repeats the updates since the last one from their stored rollouts."""
    keep: Annotated[int, Field(ge=1)] = 1
    """Newest checkpoints to keep, besides that of the best evaluated step."""


class BudgetConfig(Section):
    """Limits of a run, checked before each step. A run that spent one can be resumed with more."""

    minutes: Annotated[float, Field(gt=0)] | None = None
    """Time of training steps, evaluations between them included; no limit if absent."""
    tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens sampled in training rollouts; no limit if absent."""
