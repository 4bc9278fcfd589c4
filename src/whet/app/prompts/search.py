"""`PromptSearch`: a search for better prompts as an algorithm of a run, and its result."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from whet.app.cli.display import open_console
from whet.app.composition.driver import Driver
from whet.app.inputs import ResourceValues, Tasks, parse_resources
from whet.app.prompts.candidates import draw_candidates, print_candidates
from whet.app.prompts.saved import BEST_FILE, find_prompts
from whet.app.prompts.study import Candidate, Prompts, Study
from whet.app.run_folder import RunFolder
from whet.config import RunConfig, merge
from whet.errors import ConfigError, EngineError
from whet.io.chat_completion import complete
from whet.io.files import atomic_file
from whet.io.http_client import HttpClient, TransportError
from whet.protocols import Store
from whet.runners.agent import Agent
from whet.types import Endpoint

REFLECTION_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Result of a search for prompts."""

    run: Path
    candidates: Sequence[Candidate]
    """In the order they were found; the first has the prompts to start from."""
    best: int
    rollouts: int

    @property
    def prompts(self) -> dict[str, JsonValue]:
        """The best prompts as resources: for `whet.train` and `whet.evaluate`."""
        return {name: {"template": text} for name, text in self.best_prompts.items()}

    @property
    def best_prompts(self) -> Prompts:
        """The texts of the best prompts, by name."""
        return self.candidates[self.best].prompts

    @property
    def frontier(self) -> dict[int, int]:
        """The number of held-out tasks on which a candidate is as good as any, if there is one."""
        counts: dict[int, int] = {}
        for scores in zip(*(candidate.scores for candidate in self.candidates), strict=True):
            for index, score in enumerate(scores):
                if score == max(scores):
                    counts[index] = counts.get(index, 0) + 1
        return dict(sorted(counts.items()))

    def as_json(self) -> dict[str, object]:
        """The numbers of the search."""
        return {
            "run": str(self.run),
            "rollouts": self.rollouts,
            "best": self.best,
            "prompts": dict(self.best_prompts),
            "frontier": self.frontier,
            "candidates": [
                {
                    "prompts": dict(candidate.prompts),
                    "parents": list(candidate.parents),
                    "mean": candidate.mean,
                    "rollouts": candidate.rollouts,
                }
                for candidate in self.candidates
            ],
        }


class PromptSearch(Driver):
    """Searches for better prompts; override `optimize`.

    `run(agent, tasks, resources={"prompt": PromptTemplate(...)})` or `whet.Trainer(algorithm=...)`
    drive it. After a kill the same call with the same `name` continues the search.
    """

    def __init__(self, *, reflection: Endpoint | None = None) -> None:
        """`reflection`: the model that reflects; the policy itself if absent."""
        super().__init__(self._search)
        self._reflection = reflection

    async def optimize(self, study: Study) -> Sequence[Candidate]:
        """Search, and return the candidates, that of the study's own prompts first."""
        raise NotImplementedError

    def run(
        self,
        agent: Agent | None = None,
        tasks: Tasks = (),
        *,
        held_out: Tasks = (),
        resources: ResourceValues | None = None,
        store: str | None = None,
        quiet: bool = False,
        **settings: JsonValue,
    ) -> Any:
        self._quiet = quiet
        if self._reflection is None:
            settings = merge(settings, {"gateway": {"allow_unattributed": True}})
        plain = parse_resources(resources)
        find_prompts(plain)
        return super().run(
            agent,
            tasks,
            held_out=held_out,
            resources=plain,
            store=store,
            quiet=quiet,
            **settings,
        )

    async def _search(
        self,
        store: Store,
        tasks: list[JsonValue],
        held_out: list[JsonValue],
        resources: dict[str, int],
        gateway: Endpoint,
        config: RunConfig,
        folder: Path,
    ) -> PromptResult:
        RunFolder(folder).keep_tasks(tasks, held_out)  # rollouts are known by their number
        initial = {name: (await store.get(name, v)).value for name, v in resources.items()}
        endpoint = self._reflection or gateway
        async with HttpClient(token=endpoint.api_key) as http:
            study = Study(
                store=store,
                folder=folder,
                config=config,
                tasks=tasks,
                held_out=held_out or tasks,
                prompts=find_prompts(initial),
                ask=lambda text: ask_model(http, endpoint, text),
            )
            candidates = await self.optimize(study)
        best = max(range(len(candidates)), key=lambda n: (candidates[n].mean, -n))
        result = PromptResult(folder, candidates, best, study.rollouts)
        for file, value in ((BEST_FILE, result.prompts), ("candidates.json", result.as_json())):
            with atomic_file(folder / file) as partial:
                partial.write_text(json.dumps(value, indent=2) + "\n")
        draw_candidates(result, folder / "candidates.png")
        print_candidates(open_console(quiet=self._quiet), result)
        return result


async def ask_model(http: HttpClient, endpoint: Endpoint, text: str) -> str:
    """Return a chat model's reply to one message. Raises EngineError if there is none."""
    body: dict[str, JsonValue] = {
        "model": endpoint.model,
        "messages": [{"role": "user", "content": text}],
    }
    try:
        reply = await complete(http, endpoint.base_url, body, timeout_s=REFLECTION_TIMEOUT_S)
    except TransportError as error:
        raise EngineError(
            f"no reply of the reflection model at {endpoint.base_url}: {error}"
        ) from error
    return reply.text


def read_reflection(url: str | None, model: str | None, variable: str) -> Endpoint | None:
    """Return the endpoint of flags; None is the policy. Raises ConfigError if one is missing."""
    if url is None and model is None:
        return None
    if url is None or model is None:
        raise ConfigError("give both --reflection-endpoint and --reflection-model, or neither")
    return Endpoint(base_url=url, api_key=os.environ.get(variable, ""), model=model)
