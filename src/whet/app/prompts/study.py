"""A study of prompts: evaluates candidates by rollouts of a run, and asks a model to reflect.

Both are functions of their inputs by the run's records: rollouts have ids made of candidate and
task, and replies of the reflection model are kept in a file. A search that is started again with
the same seed therefore repeats its steps without running or asking anything twice, and continues.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import JsonValue, ValidationError

from whet.config import RunConfig
from whet.io.files import JsonLines
from whet.protocols import Store
from whet.types import Mode, PromptTemplate, Rollout, Trajectory

Prompts = Mapping[str, str]
"""The texts of a candidate by the name of their resource."""
Part = Literal["train", "held_out"]

MAX_CHARS = 2000
"""Characters of a transcript that the reflection model gets."""


@dataclass(frozen=True, slots=True)
class EvaluatedTask:
    """A task that a candidate was tried on."""

    task: JsonValue
    reward: float
    """0 if it failed."""
    transcript: str
    """What the model got and answered."""
    feedback: str
    """The reward in words, or why it failed."""


@dataclass(slots=True)
class Candidate:
    """Prompts that were evaluated on all held-out tasks."""

    prompts: Prompts
    parents: tuple[int, ...]
    """Indexes of the candidates it was made from."""
    scores: Sequence[float]
    """Reward of each held-out task."""
    rollouts: int
    """Rollouts of the search when it was found."""

    @property
    def mean(self) -> float:
        return sum(self.scores) / len(self.scores)


@dataclass(kw_only=True)
class Study:
    """A run's tasks and prompts, for a search."""

    store: Store
    folder: Path
    config: RunConfig
    tasks: Sequence[JsonValue]
    held_out: Sequence[JsonValue]
    """Tasks whose rewards decide between candidates; the training tasks if there are no others."""
    prompts: Prompts
    """The prompts to start from."""
    ask: Callable[[str], Awaitable[str]]
    """Asks the reflection model."""
    rollouts: int = 0
    """Rollouts that were needed so far, those of an earlier start included."""
    _versions: dict[tuple[str, str], int] = field(default_factory=dict[tuple[str, str], int])
    _known: set[str] = field(default_factory=set[str])
    _requests: Counter[str] = field(default_factory=Counter[str])

    async def evaluate(
        self, prompts: Prompts, indexes: Sequence[int], part: Part = "train"
    ) -> list[EvaluatedTask]:
        """Run tasks of a part with a candidate; each task once, however often it is evaluated."""
        tasks = self.held_out if part == "held_out" else self.tasks
        problem = self.check(prompts)
        if problem:
            return [EvaluatedTask(tasks[n], 0.0, "", problem) for n in indexes]
        versions = {name: await self._publish(name, text) for name, text in prompts.items()}
        digest = hashlib.blake2b(
            json.dumps(dict(prompts), sort_keys=True).encode(), digest_size=8
        ).hexdigest()
        rollouts = [self._plan_rollout(digest, versions, tasks[n], n, part) for n in indexes]
        new = {rollout.id for rollout in rollouts} - self._known
        self._known |= new
        self.rollouts += len(new)
        await self.store.enqueue(rollouts)
        ids = [rollout.id for rollout in rollouts]
        await self.store.wait(ids)
        found = {t.attempt.rollout.id: t for t in await self.store.trajectories(ids, failed=True)}
        failures = await self.store.failures(ids)
        return [
            _read_task(tasks[n], found.get(id), failures.get(id))
            for n, id in zip(indexes, ids, strict=True)
        ]

    def check(self, prompts: Prompts) -> str:
        """Return why a candidate cannot be used; empty if it can."""
        for name, text in prompts.items():
            try:
                found = PromptTemplate(template=text).names
            except ValidationError as error:
                return error.errors()[0]["msg"].removeprefix("Value error, ")
            missing = set(PromptTemplate(template=self.prompts[name]).names) - set(found)
            if missing:
                return f"the prompt must keep the placeholders {{{'}, {'.join(sorted(missing))}}}"
        return ""

    async def reflect(self, text: str) -> str:
        """Ask the reflection model, or return what it replied before the run was stopped."""
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        key = f"{digest}-{self._requests[digest]}"
        self._requests[digest] += 1
        lines = JsonLines(self.folder / "reflections.jsonl")
        for line in lines.read():
            if line["key"] == key:
                return line["reply"]
        reply = await self.ask(text)
        lines.append({"key": key, "prompt": text, "reply": reply})
        return reply

    async def _publish(self, name: str, text: str) -> int:
        """Return the version of a resource that has the text; there is one of each text."""
        if not any(known == name for known, _ in self._versions):
            latest = await self.store.latest(name)
            for version in range(1, latest.version + 1):
                match (await self.store.get(name, version)).value:
                    case {"template": str(template)}:
                        self._versions.setdefault((name, template), version)
                    case _:
                        pass
        if (name, text) not in self._versions:
            version = await self.store.publish(name, {"template": text})
            self._versions[name, text] = version
        return self._versions[name, text]

    def _plan_rollout(
        self, digest: str, versions: dict[str, int], task: JsonValue, index: int, part: Part
    ) -> Rollout:
        group = f"prompt-{digest}-{part.replace('_', '-')}"
        return Rollout(
            id=f"{group}-{index:05d}",
            group=group,
            task=task,
            mode=Mode.VAL if part == "held_out" else Mode.TRAIN,
            timeout_s=self.config.runner.timeout_s,
            max_attempts=self.config.runner.max_attempts,
            resources={**versions},
        )


def _read_task(
    task: JsonValue, trajectory: Trajectory | None, failure: str | None
) -> EvaluatedTask:
    transcript = _read_transcript(trajectory) if trajectory else ""
    if failure is not None or trajectory is None:
        reason = f"the attempt failed: {failure or 'no result'}"
        return EvaluatedTask(task, 0.0, transcript, reason)
    return EvaluatedTask(task, trajectory.reward, transcript, f"reward {trajectory.reward:g}")


def _read_transcript(trajectory: Trajectory) -> str:
    lines: list[str] = []
    for call in trajectory.calls:
        messages = [*call.messages, *(g.message for g in call.generations)]
        lines += [f"{m.get('role', '')}: {m.get('content', '')}" for m in messages]
    return "\n".join(lines)[-MAX_CHARS:]
