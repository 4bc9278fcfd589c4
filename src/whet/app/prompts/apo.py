"""APO: beam search over prompts with textual gradients, as in "Automatic Prompt Optimization"."""

import random
import re
from collections.abc import Sequence

from whet.app.prompts.search import PromptSearch
from whet.app.prompts.study import Candidate, EvaluatedTask, Prompts, Study
from whet.types import Endpoint

CRITIQUE = """A prompt for a language model is to be improved. The prompt:

```
{prompt}
```

What the model did with it, and the reward of each attempt (higher is better):

{examples}

Explain in a few sentences what about the prompt made the attempts with a low reward fail."""

EDIT = """A prompt for a language model is to be improved. The prompt:

```
{prompt}
```

A critique of it:

{critique}

Write a better prompt that follows the critique. Keep these placeholders in braces: {placeholders}.
Reply with the new prompt alone, between two lines of three backticks."""

FENCED = re.compile(r"```[a-z]*\n(.*?)\n?```", re.DOTALL)


class APO(PromptSearch):
    """Keeps a beam of prompts; each is criticized on a few rollouts and edited by the critique."""

    def __init__(
        self,
        *,
        rounds: int = 3,
        beam: int = 4,
        branches: int = 4,
        minibatch: int = 4,
        budget: int | None = None,
        reflection: Endpoint | None = None,
        seed: int = 0,
    ) -> None:
        """`branches`: edits of each prompt of the beam in a round; `budget`: rollouts at most."""
        super().__init__(reflection=reflection)
        self._rounds = rounds
        self._beam = beam
        self._branches = branches
        self._minibatch = minibatch
        self._budget = budget
        self._seed = seed

    async def optimize(self, study: Study) -> Sequence[Candidate]:
        chance = random.Random(self._seed)
        found = [await self._score(study, study.prompts, ())]
        beam = [0]
        for _ in range(self._rounds):
            for parent in list(beam):
                for _ in range(self._branches):
                    if self._budget is not None and study.rollouts >= self._budget:
                        return found
                    prompts = await self._edit(study, found[parent].prompts, chance)
                    if prompts not in [candidate.prompts for candidate in found]:
                        found.append(await self._score(study, prompts, (parent,)))
            order = sorted(range(len(found)), key=lambda n: (-found[n].mean, n))
            beam = order[: self._beam]
        return found

    async def _score(self, study: Study, prompts: Prompts, parents: tuple[int, ...]) -> Candidate:
        examples = await study.evaluate(prompts, range(len(study.held_out)), "held_out")
        scores = [example.reward for example in examples]
        return Candidate(dict(prompts), parents, scores, study.rollouts)

    async def _edit(self, study: Study, prompts: Prompts, chance: random.Random) -> Prompts:
        """Return prompts of which one was edited by a critique."""
        name = chance.choice(sorted(prompts))
        size = min(self._minibatch, len(study.tasks))
        indexes = chance.sample(range(len(study.tasks)), size)
        examples = await study.evaluate(prompts, indexes)
        text = prompts[name]
        critique = await study.reflect(
            CRITIQUE.format(prompt=text, examples=_format_examples(examples))
        )
        placeholders = ", ".join(re.findall(r"\{\w+\}", study.prompts[name])) or "none"
        reply = await study.reflect(
            EDIT.format(prompt=text, critique=critique, placeholders=placeholders)
        )
        fenced = FENCED.search(reply)
        return {**prompts, name: (fenced[1] if fenced else reply).strip()}


def _format_examples(examples: Sequence[EvaluatedTask]) -> str:
    return "\n\n".join(
        f"task: {example.task}\n{example.transcript}\n{example.feedback}" for example in examples
    )
