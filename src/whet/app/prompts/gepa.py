"""GEPA: reflective evolution of prompts over a Pareto frontier, by the package `gepa`."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import anyio
import anyio.from_thread
import anyio.to_thread

from whet.app.prompts.search import PromptSearch
from whet.app.prompts.study import Candidate, EvaluatedTask, Part, Study
from whet.errors import requires_extra
from whet.types import Endpoint


class GEPA(PromptSearch):
    """Mutates prompts by reflection on a few rollouts, and keeps those that are best at some task.

    See https://github.com/gepa-ai/gepa.
    """

    def __init__(
        self,
        *,
        budget: int = 200,
        minibatch: int = 3,
        reflection: Endpoint | None = None,
        seed: int = 0,
    ) -> None:
        """`budget`: rollouts of the search; `minibatch`: tasks that a reflection sees."""
        super().__init__(reflection=reflection)
        self._budget = budget
        self._minibatch = minibatch
        self._seed = seed

    async def optimize(self, study: Study) -> Sequence[Candidate]:
        with requires_extra("GEPA", "prompts"):
            api: Any = importlib.import_module("gepa.api")  # Any: its types are partly unknown
        adapter = _Adapter(study)

        def search() -> Any:
            return api.optimize(
                seed_candidate=dict(study.prompts),
                trainset=[_Item("train", n) for n in range(len(study.tasks))],
                valset=[_Item("held_out", n) for n in range(len(study.held_out))],
                adapter=adapter,
                reflection_lm=adapter.reflect,
                reflection_minibatch_size=min(self._minibatch, len(study.tasks)),
                max_metric_calls=self._budget,
                logger=_Silent(),
                seed=self._seed,
            )

        result = await anyio.to_thread.run_sync(search)
        return [
            Candidate(
                prompts=dict(prompts),
                parents=tuple(n for n in result.parents[index] if n is not None),
                scores=[result.val_subscores[index][n] for n in range(len(study.held_out))],
                rollouts=result.discovery_eval_counts[index],
            )
            for index, prompts in enumerate(result.candidates)
        ]


class _Item(NamedTuple):
    part: Part
    number: int


class _Silent:
    """Drops the log lines of the package."""

    def log(self, message: str) -> None:
        pass


class _Adapter:
    """The package's view of a study, called in a thread of its own."""

    propose_new_texts = None

    def __init__(self, study: Study) -> None:
        self._study = study

    def evaluate(
        self, batch: Sequence[_Item], candidate: dict[str, str], capture_traces: bool = False
    ) -> Any:
        from gepa.core.adapter import EvaluationBatch  # noqa: PLC0415 - needs the extra

        part = batch[0].part
        examples = anyio.from_thread.run(
            self._study.evaluate, candidate, [item.number for item in batch], part
        )
        return EvaluationBatch(
            outputs=[example.transcript for example in examples],
            scores=[example.reward for example in examples],
            trajectories=examples if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        examples: list[EvaluatedTask] = eval_batch.trajectories
        records = [
            {
                "Inputs": str(example.task),
                "Generated Outputs": example.transcript,
                "Feedback": example.feedback,
            }
            for example in examples
        ]
        return dict.fromkeys(components_to_update, records)

    def reflect(self, prompt: Any) -> str:
        return anyio.from_thread.run(self._study.reflect, str(prompt))
