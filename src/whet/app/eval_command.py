"""`whet.evaluate` and `whet eval`: models side by side on the same tasks."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue
from rich.console import Console

from whet.app.comparison import draw_comparison, print_comparison
from whet.app.display import ConsoleDisplay, stopped
from whet.app.evaluation import plan_trials
from whet.app.evaluator import Evaluation, remember_models, run_evaluation
from whet.app.folder import RunFolder
from whet.app.relay import check_endpoint
from whet.app.signals import run_async
from whet.app.sources import EndpointModel, Model, read_models
from whet.app.tasks import load_tasks
from whet.config import resolve
from whet.errors import ConfigError
from whet.runners.agent import Agent, check_agent

KIND = "eval"
KEY_VARIABLE = "OPENAI_API_KEY"


def evaluate(
    agent: Agent,
    tasks: str | Path | Sequence[JsonValue],
    models: Mapping[str, str] | Sequence[str] = (),
    *,
    endpoint: str | None = None,
    key_variable: str = KEY_VARIABLE,
    results: str | Path | None = None,
    resume: bool = False,
    quiet: bool = False,
    **settings: JsonValue,
) -> Evaluation:
    """Compare models on tasks; the first is what the others are compared with.

    A model is `tiny`, `smollm2`, a Hugging Face folder, a PEFT adapter, a run or one of its
    checkpoints; with an `endpoint`, what that OpenAI-compatible URL calls it. `settings` are keys
    of the config. `resume` continues the evaluation that `name` names, or the newest, and may add
    models to it.

    Raises:
        ConfigError: something the caller can mend.
    """
    check_agent(agent)
    found = load_tasks(tasks)
    specs = [f"{n}={s}" for n, s in models.items()] if isinstance(models, Mapping) else models
    console = Console(quiet=quiet)
    prepared = _prepare(found, specs, endpoint, key_variable, settings, console, resume=resume)
    return _work(agent, found, prepared, results, console)


def eval_command(
    agent: Agent,
    tasks: Sequence[JsonValue],
    values: dict[str, JsonValue],
    args: argparse.Namespace,
) -> int:
    """`whet eval`."""
    if args.resume:
        values = values | {"name": args.resume}
    console = Console(quiet=args.quiet, stderr=args.json)
    prepared = _prepare(
        tasks,
        args.model,
        args.endpoint,
        args.key_variable,
        values,
        console,
        resume=args.resume is not None,
    )
    try:
        evaluation = _work(agent, tasks, prepared, args.results, console)
    except KeyboardInterrupt:
        given = f" --results {args.results}" if args.results else ""
        return stopped(
            f"whet eval {args.agent or '...'} --tasks {args.tasks}{given}", prepared.folder
        )
    if args.json:
        sys.stdout.write(json.dumps(evaluation.as_json()) + "\n")
    return 0


class _Prepared(NamedTuple):
    folder: RunFolder
    models: list[Model]
    key: str
    """Of the endpoint."""


def _prepare(
    tasks: Sequence[JsonValue],
    specs: Sequence[str],
    endpoint: str | None,
    key_variable: str,
    values: dict[str, JsonValue],
    console: Console,
    *,
    resume: bool,
) -> _Prepared:
    """Find everything an evaluation needs before it leaves anything behind."""

    def progress(text: str) -> None:
        console.print(text, highlight=False)

    config = resolve(values)
    plan_trials("eval", tasks, config)
    if not specs and not resume:
        raise ConfigError("there is no model to evaluate: give --model tiny, or several")
    given = read_models(specs, endpoint, progress)
    key = os.environ.get(key_variable, "")
    if endpoint is not None:
        check_endpoint(endpoint, key, key_variable)
    if not resume:
        folder = RunFolder.create(config, KIND)
    elif config.name is None:
        folder = RunFolder.latest(config.dir, KIND)
    else:
        folder = RunFolder(config.dir / "runs" / config.name)
    if resume:
        folder.resume(values)
    folder.keep_tasks(tasks, [])
    models = remember_models(folder, given, progress)
    for url in {model.url for model in models if isinstance(model, EndpointModel)}:
        progress(f"{url} is text only: its tokens are not recorded, and it is never trained")
    return _Prepared(folder, models, key)


def _work(
    agent: Agent,
    tasks: Sequence[JsonValue],
    prepared: _Prepared,
    results: str | Path | None,
    console: Console,
) -> Evaluation:
    """Do what is left of an evaluation, and say what it came to."""
    folder = prepared.folder
    with ConsoleDisplay(console) as display:
        evaluation = run_async(
            partial(
                run_evaluation,
                agent,
                tasks,
                prepared.models,
                folder,
                results=Path(results) if results else folder.path / "results.jsonl",
                key=prepared.key,
                display=display,
            )
        )
    draw_comparison(evaluation.comparison, evaluation.picture)
    print_comparison(console, evaluation.comparison, f"whet eval: {folder.path.name}")
    for line in (
        f"took {evaluation.seconds:.0f} s; every result: {evaluation.results}",
        f"picture: {evaluation.picture}",
    ):
        console.print(line, soft_wrap=True, highlight=False)
    return evaluation
