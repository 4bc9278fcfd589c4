"""`whet.evaluate`: several models on the same tasks, each through store, gateway and runner."""

import hashlib
import json
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue
from rich.console import Console

from whet.app.cli.display import Display, open_console
from whet.app.composition.gateway_server import PORT_FLAG, Gateway, build_judge, run_agents
from whet.app.evaluation.by_policy import (
    PolicyResult,
    PolicyUse,
    compare_by_policy,
    print_by_policy,
    read_uses,
)
from whet.app.evaluation.comparison import (
    Comparison,
    compare,
    draw_comparison,
    print_comparison,
)
from whet.app.evaluation.model_sources import EndpointModel, Model, PolicySet, read_models
from whet.app.evaluation.statistics import Scores
from whet.app.evaluation.trials import (
    Trial,
    plan_trials,
    read_ended_rollouts,
    read_scores,
    run_trials,
)
from whet.app.inputs import (
    ResourceValues,
    Tasks,
    check_one_policy,
    load_tasks,
    parse_resources,
    publish_resources,
)
from whet.app.inspection.run_list import EVALUATION_KIND
from whet.app.prompts.saved import ALL_MODELS
from whet.app.run_folder import RunFolder
from whet.config import PolicyConfig, RunConfig, resolve
from whet.errors import ConfigError, requires_extra
from whet.gateway.upstream import UpstreamProxy, UpstreamRouter, check_endpoint
from whet.io.files import JsonLines
from whet.io.server import AppServer
from whet.io.threads import run_async
from whet.runners.agent import Agent, check_agent
from whet.runners.collector import QueueCollector
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, Endpoint, Outcome

KEY_VARIABLE = "OPENAI_API_KEY"

ModelPrompts = Mapping[str, Mapping[str, JsonValue]]
"""Resources of the agent by the name of a model; those of all models under an empty name."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of an evaluation."""

    run: Path
    models: Mapping[str, str]
    """The source of each model by name; the first model is the baseline."""
    comparison: Comparison
    results: Path
    """JSON lines: one for each task, model and sample."""
    picture: Path
    seconds: float
    policies: Mapping[str, PolicyResult]
    """Each policy, if there are several: the same on the tasks in which it acted."""

    def as_json(self) -> dict[str, object]:
        """The numbers of the evaluation."""
        by_policy = {name: result.as_json() for name, result in self.policies.items()}
        return {
            "seconds": round(self.seconds, 1),
            "tasks": self.comparison.tasks,
            "sources": dict(self.models),
            "models": self.comparison.as_json(),
            **({"policies": by_policy} if by_policy else {}),
            "results": str(self.results),
            "picture": str(self.picture),
            "run": str(self.run),
        }


def evaluate(
    agent: Agent,
    tasks: Tasks,
    models: Mapping[str, str] | Sequence[str] = (),
    *,
    endpoint: str | None = None,
    key_variable: str = KEY_VARIABLE,
    results: str | Path | None = None,
    prompts: Mapping[str, ResourceValues] | None = None,
    resume: bool = False,
    quiet: bool = False,
    **settings: JsonValue,
) -> Evaluation:
    """Compare models on tasks; the first model is the baseline.

    A model is `tiny`, `smollm2`, a Hugging Face folder, a GGUF file, a PEFT adapter, a run or one
    of its checkpoints, with all its policies; with an `endpoint`, a model name of that
    OpenAI-compatible URL. `prompts` are the resources of the agent by model, those of all under an
    empty name. `settings` are config keys.
    `resume` continues the evaluation called `name`, or the newest, and may add models to it.

    Raises:
        ConfigError: invalid arguments; nothing was started.
    """
    check_agent(agent)
    loaded = load_tasks(tasks)
    specs = [f"{n}={s}" for n, s in models.items()] if isinstance(models, Mapping) else models
    console = open_console(quiet=quiet)
    resources = {name: parse_resources(values) for name, values in (prompts or {}).items()}
    prepared = prepare_evaluation(
        loaded, specs, endpoint, key_variable, settings, console, resume=resume, prompts=resources
    )
    return run_evaluation(agent, loaded, prepared, results, console)


class PreparedEvaluation(NamedTuple):
    """An evaluation that can start."""

    folder: RunFolder
    models: list[Model]
    key: str
    """API key of the endpoint."""
    prompts: Mapping[str, Mapping[str, JsonValue]]
    """Resources of the agent, by model."""
    policies: Mapping[str, PolicyConfig]
    """Policies of a model that has several; every other model answers under each of their names."""


def prepare_evaluation(
    tasks: Sequence[JsonValue],
    specs: Sequence[str],
    endpoint: str | None,
    key_variable: str,
    values: dict[str, JsonValue],
    console: Console,
    *,
    resume: bool,
    prompts: ModelPrompts | None = None,
) -> PreparedEvaluation:
    """Check models and endpoint, then open the run folder: a refused evaluation writes nothing."""
    progress = partial(console.print, highlight=False)
    config = resolve(values)
    check_one_policy(config, "an evaluation of models")
    if config.gateway.judge == "base":
        raise ConfigError("gateway.judge 'base' could be any of several models: name one")
    plan_trials("eval", tasks, config)
    if not specs and not resume:
        found = "no model to evaluate: give at least one, such as"
        raise ConfigError.phrase(python=f"{found} models=['tiny']", command=f"{found} --model tiny")
    models = read_models(specs, endpoint, progress, directory=config.dir)
    prompts = prompts or {}
    if prompts and not models:
        raise ConfigError(
            "prompts are for the models they are given with: name one, or leave them out"
        )
    unknown = set(prompts) - {ALL_MODELS, *(model.name for model in models)}
    if unknown:
        raise ConfigError(
            f"found prompts of {min(unknown)!r}, which is not among the models: "
            f"{', '.join(model.name for model in models)}"
        )
    key = os.environ.get(key_variable, "")
    if endpoint is not None:
        run_async(check_endpoint, endpoint, key, key_variable)
    if resume:
        folder = RunFolder.to_resume(config, EVALUATION_KIND)
    else:
        folder = RunFolder.create(config, EVALUATION_KIND)
    with ExitStack() as stack:
        stack.callback(folder.discard_if_new)
        folder.keep_tasks(tasks, [])
        if resume:
            folder.resume(values)
        models, prompts = _remember_models(folder, models, prompts, progress)
        policies = _find_policies(models)
        stack.pop_all()
    for url in {model.url for model in models if isinstance(model, EndpointModel)}:
        progress(f"{url} returns text only: its tokens are not recorded, and it is never trained")
    return PreparedEvaluation(folder, models, key, prompts, policies)


def _find_policies(models: Sequence[Model]) -> Mapping[str, PolicyConfig]:
    """The policies by whose names agents call. Raises ConfigError if models differ in them."""
    first, *others = [model for model in models if isinstance(model, PolicySet)] or [None]
    for other in others:
        if first and other and set(other.policies) != set(first.policies):
            raise ConfigError(
                f"{first.name!r} has the policies {', '.join(first.policies)}, and {other.name!r} "
                f"{', '.join(other.policies)}: expected models with the same policies"
            )
    return first.policies if first else {}


def run_evaluation(
    agent: Agent,
    tasks: Sequence[JsonValue],
    prepared: PreparedEvaluation,
    results: str | Path | None,
    console: Console,
) -> Evaluation:
    """Run the rollouts that are left, and report."""
    folder = prepared.folder
    file = Path(results) if results else folder.path / "results.jsonl"
    with Display(console) as display:
        evaluation = run_async(_evaluate_models, agent, tasks, prepared, file, display)
    draw_comparison(evaluation.comparison, evaluation.picture)
    print_comparison(console, evaluation.comparison, f"whet eval: {folder.path.name}")
    if evaluation.policies:
        print_by_policy(console, evaluation.policies)
    for line in (
        f"took {evaluation.seconds:.0f} s; every result: {evaluation.results}",
        f"picture: {evaluation.picture}",
    ):
        console.print(line, soft_wrap=True, highlight=False)
    return evaluation


async def _evaluate_models(
    agent: Agent,
    tasks: Sequence[JsonValue],
    prepared: PreparedEvaluation,
    results: Path,
    display: Display,
) -> Evaluation:
    began = time.monotonic()
    folder, models, policies = prepared.folder, prepared.models, prepared.policies
    config = folder.read_config().model_copy(update={"policies": policies})
    scores: dict[str, Scores] = {}
    uses: dict[str, Mapping[str, PolicyUse]] = {}
    with folder.lock(), ExitStack() as stack:
        stack.callback(folder.discard_if_new)
        lines = _Results(results, folder.path.name)
        async with _serve_judge(folder.read_config(), display) as judge:
            evaluator = _ModelEvaluator(agent, tasks, prepared, config, lines, display, judge)
            for model in models:
                scores[model.name], uses[model.name] = await evaluator.evaluate(model)
    evaluation = Evaluation(
        run=folder.path,
        models={model.name: model.source for model in models},
        comparison=compare(scores, config.evaluation),
        policies=compare_by_policy(scores, uses, list(policies), config.evaluation),
        results=results,
        picture=folder.path / "comparison.png",
        seconds=time.monotonic() - began,
    )
    folder.write_report(evaluation.as_json())
    return evaluation


@dataclass(frozen=True, slots=True)
class _ModelEvaluator:
    """Runs the rollouts of one model after the other, each through a gateway of its own."""

    agent: Agent
    tasks: Sequence[JsonValue]
    prepared: PreparedEvaluation
    config: RunConfig
    lines: "_Results"
    display: Display
    judge: Endpoint | None

    async def evaluate(self, model: Model) -> tuple[Scores, dict[str, PolicyUse]]:
        """Run the rollouts that have not ended; returns the scores of all."""
        trials = plan_trials("eval", self.tasks, self.config)
        planned = {trial.rollout.id: trial for trial in trials}

        def on_outcome(attempt: Attempt, outcome: Outcome) -> None:
            self.display.count_ended(1)
            # A failed attempt may be retried: failures are written when all rollouts have ended.
            if outcome.reward is not None:
                self.lines.add(model, planned[attempt.rollout.id], outcome)

        # Each model has its own run in the store, so that none claims the rollouts of another.
        async with self.prepared.folder.open_store(model.name) as store:
            ended = await read_ended_rollouts(store)
            left = sum(id not in ended for id in planned)
            if left:
                self.display.show_phase(f"evaluate {model.name}", left)
                async with (
                    self._serve(model, store) as gateway,
                    run_agents(self.agent, self.config.runner, store, gateway, on_outcome),
                ):
                    self.prepared.folder.keep()
                    resources = self.prepared.prompts.get(model.name, {})
                    versions = await publish_resources(store, resources)
                    collector = QueueCollector(queue=store, log=store, resources=versions)
                    ended = await run_trials(trials, collector=collector, listings=store)
            for trial in trials:
                record = ended[trial.rollout.id]
                outcome = Outcome(reward=record.reward, failure=record.failure)
                self.lines.add(model, trial, outcome)
            uses = await read_uses(store, trials) if self.config.policies else {}
            return read_scores(trials, ended), uses

    @asynccontextmanager
    async def _serve(self, model: Model, store: SQLiteStore) -> AsyncGenerator[Gateway]:
        config, judge, folder = self.config, self.judge, self.prepared.folder
        secret = folder.read_secret()
        if not isinstance(model, EndpointModel):
            serve_folder = folder.path / "serve" / model.name
            with requires_extra("a model on this machine", "local"):
                from whet.app.composition.standalone import serve_model  # noqa: PLC0415 - imports torch
            async with serve_model(model, config, store, secret, serve_folder, judge) as gateway:
                yield gateway
            return
        key = self.prepared.key
        proxy = UpstreamProxy(
            model.url, model.source, key, log=store, secret=secret, config=config.gateway
        )
        upstreams = build_judge(judge, config, store, secret) if judge else {}
        router = UpstreamRouter(proxy.app, upstreams, secret, config.gateway)
        server = AppServer(
            router,
            host=config.gateway.host,
            port=config.gateway.port,
            name="proxy",
            port_flag=PORT_FLAG,
        )
        try:
            yield Gateway(server.url, secret, model.source, tuple(config.policies))
        finally:
            await proxy.close()
            await router.close()
            server.close()


@asynccontextmanager
async def _serve_judge(config: RunConfig, display: Display) -> AsyncGenerator[Endpoint | None]:
    if config.gateway.judge is None:
        yield None
        return
    with requires_extra("a model on this machine", "local"):
        from whet.app.composition.standalone import serve_judge  # noqa: PLC0415 - imports torch
    async with serve_judge(config, display.note) as judge:
        yield judge


def _remember_models(
    folder: RunFolder,
    models: Sequence[Model],
    prompts: ModelPrompts,
    progress: Callable[[str], None],
) -> tuple[list[Model], ModelPrompts]:
    """Record the new models of an evaluation; returns all its models, earlier ones first.

    With them it returns the prompts of each model.

    Raises:
        ConfigError: a name had other weights before, or its weights are missing now.
    """
    lines = JsonLines(folder.models)
    known = {line["name"]: line for line in lines.read()}
    by_name = {model.name: model for model in models}
    common = prompts.get(ALL_MODELS, {})
    chosen = {name: {**common, **prompts.get(name, {})} for name in by_name}
    for name, line in known.items():
        if name not in by_name:
            [by_name[name]] = read_models([f"{name}={line['source']}"], line["url"], progress)
            chosen[name] = line.get("prompts", {})
    for name, model in by_name.items():
        weights = model.fingerprint()
        if name not in known:
            url = model.url if isinstance(model, EndpointModel) else None
            line = {"name": name, "source": model.source, "url": url, "weights": weights}
            lines.append({**line, "prompts": chosen[name]} if chosen[name] else line)
        elif known[name]["weights"] != weights:
            raise ConfigError(
                f"model {name!r} had other weights ({known[name]['source']!r}) when this "
                "evaluation began: use another name, or start a new evaluation"
            )
        elif known[name].get("prompts", {}) != chosen[name]:
            raise ConfigError(
                f"model {name!r} had other prompts when this evaluation began: use another name, "
                "or start a new evaluation"
            )
    return [by_name[name] for name in dict.fromkeys((*known, *by_name))], chosen


class _Results:
    """The file of results: each rollout is one line, also after a kill and a resume."""

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
