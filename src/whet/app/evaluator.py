"""A whole evaluation: several models on the same tasks, each through store, gateway and runner."""

import hashlib
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from whet.app.comparison import Comparison, compare
from whet.app.evaluation import Trial, ended_rollouts, evaluate, plan_trials, read_scores
from whet.app.folder import RunFolder
from whet.app.relay import Relay
from whet.app.scores import Scores
from whet.app.sources import EndpointModel, LocalModel, Model, read_models
from whet.app.training import Display
from whet.app.working import Gateway, agents_at_work
from whet.config import RunConfig
from whet.errors import ConfigError, MissingExtra
from whet.jsonlines import JsonLines
from whet.runners.agent import Agent
from whet.runners.collect import QueueCollector
from whet.serving import AppServer
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, Outcome, RolloutRecord


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation came to."""

    run: Path
    models: Mapping[str, str]
    """What each name stands for; the first is what the others are compared with."""
    comparison: Comparison
    results: Path
    """JSON lines: one for each task, model and sample."""
    picture: Path
    seconds: float

    def as_json(self) -> dict[str, object]:
        """The numbers of the evaluation."""
        return {
            "seconds": round(self.seconds, 1),
            "tasks": self.comparison.tasks,
            "sources": dict(self.models),
            "models": self.comparison.as_json(),
            "results": str(self.results),
            "picture": str(self.picture),
            "run": str(self.run),
        }


async def run_evaluation(
    agent: Agent,
    tasks: Sequence[JsonValue],
    models: Sequence[Model],
    folder: RunFolder,
    *,
    results: Path,
    key: str,
    display: Display,
) -> Evaluation:
    """Do what is left of an evaluation. Whatever its store has already is not done again."""
    began = time.monotonic()
    config = folder.config()
    scores: dict[str, Scores] = {}
    with folder.owned():
        lines = _Results(results, folder.path.name)
        for model in models:
            scores[model.name] = await _evaluate_model(
                agent, tasks, model, folder, lines=lines, key=key, display=display
            )
    evaluation = Evaluation(
        run=folder.path,
        models={model.name: model.source for model in models},
        comparison=compare(scores, config.evaluation),
        results=results,
        picture=folder.path / "comparison.png",
        seconds=time.monotonic() - began,
    )
    folder.write_report(evaluation.as_json())
    return evaluation


async def _evaluate_model(
    agent: Agent,
    tasks: Sequence[JsonValue],
    model: Model,
    folder: RunFolder,
    *,
    lines: "_Results",
    key: str,
    display: Display,
) -> Scores:
    config = folder.config()
    trials = plan_trials("eval", tasks, config)
    planned = {trial.rollout.id: trial for trial in trials}

    def on_outcome(attempt: Attempt, outcome: Outcome) -> None:
        display.ended(1)
        # A failed attempt may be tried again, so it is told when all have ended.
        if outcome.reward is not None:
            lines.add(model, planned[attempt.rollout.id], outcome)

    # A run of the store for each model: none runs what is queued for another.
    async with SQLiteStore(folder.store, run=model.name) as store:
        await store.release_workers()
        ended = await ended_rollouts(store)
        left = sum(id not in ended for id in planned)
        if left:
            display.phase(f"evaluate {model.name}", left)
            async with (
                _serving(model, config, store, folder, key) as gateway,
                agents_at_work(agent, config.runner, store, gateway.endpoint, on_outcome),
            ):
                collector = QueueCollector(queue=store, log=store)
                ended = await evaluate(trials, collector=collector, directory=store)
        for trial in trials:
            lines.add(model, trial, _outcome(ended[trial.rollout.id]))
        return read_scores(trials, ended)


@asynccontextmanager
async def _serving(
    model: Model, config: RunConfig, store: SQLiteStore, folder: RunFolder, key: str
) -> AsyncGenerator[Gateway]:
    secret = folder.secret()
    if isinstance(model, LocalModel):
        place = folder.path / "serve" / model.name
        try:
            from whet.app.local_models import serve_model  # noqa: PLC0415 - torch, only if needed
        except ModuleNotFoundError as error:
            raise MissingExtra.of(f"a model of this machine ({error})", "local") from error
        async with serve_model(model, config, store, secret, place) as gateway:
            yield gateway
        return
    relay = Relay(model.url, model.source, key, log=store, secret=secret, config=config.gateway)
    server = AppServer(
        relay.app,
        host=config.gateway.host,
        port=config.gateway.port,
        name="relay",
        port_flag="--gateway.port",
    )
    try:
        yield Gateway(server.url, secret, model.source)
    finally:
        relay.close()
        server.close()


def remember_models(
    folder: RunFolder, given: Sequence[Model], progress: Callable[[str], None]
) -> list[Model]:
    """All models of an evaluation: those it had before, then those that are new to it.

    Raises:
        ConfigError: a name stood for other weights before, or what it stood for is gone.
    """
    lines = JsonLines(folder.path / "models.jsonl")
    kept = {line["name"]: line for line in lines.read()}
    models = {model.name: model for model in given}
    for name, line in kept.items():
        if name not in models:
            [models[name]] = read_models([f"{name}={line['source']}"], line["url"], progress)
    for name, model in models.items():
        weights = model.fingerprint()
        if name not in kept:
            url = model.url if isinstance(model, EndpointModel) else None
            told = {"name": name, "source": model.source, "url": url, "weights": weights}
            lines.append(told)
        elif kept[name]["weights"] != weights:
            raise ConfigError(
                f"{name!r} stood for other weights ({kept[name]['source']!r}) when this "
                "evaluation began: give these another name, or start a new evaluation"
            )
    return [models[name] for name in dict.fromkeys((*kept, *models))]


class _Results:
    """The lines of an evaluation, each written once however often it is killed and resumed."""

    def __init__(self, path: Path, run: str) -> None:
        self._run = run
        self._lines = JsonLines(path)
        self._known = {
            (line["model"], line["rollout"])
            for line in self._lines.read()
            if line.get("run") == run
        }

    def add(self, model: Model, trial: Trial, outcome: Outcome) -> None:
        rollout = trial.rollout
        if (model.name, rollout.id) in self._known:
            return
        self._known.add((model.name, rollout.id))
        task = json.dumps(rollout.task, sort_keys=True).encode()
        self._lines.append(
            {
                "run": self._run,
                "model": model.name,
                "source": model.source,
                "task": trial.task,
                "task_digest": hashlib.blake2b(task, digest_size=8).hexdigest(),
                "way": trial.way,
                "sample": trial.sample,
                "temperature": rollout.sampling.temperature,
                "reward": outcome.reward,
                "failure": outcome.failure.model_dump(mode="json") if outcome.failure else None,
                "rollout": rollout.id,
            }
        )


def _outcome(record: RolloutRecord) -> Outcome:
    return Outcome(reward=record.reward, failure=record.failure)
