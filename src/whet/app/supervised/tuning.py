"""`whet.sft` and `whet.dpo`: load examples, train on them, export the model."""

import json
import random
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import JsonValue
from rich.console import Console
from rich.progress import Progress

from whet.app.cli.display import open_console
from whet.app.composition.samplers import build_renderer
from whet.app.composition.trainers import open_trainer, read_vocabulary
from whet.app.experiment import open_trackers
from whet.app.run_folder import RunFolder
from whet.app.supervised.best_rollouts import read_best, read_pairs
from whet.app.supervised.cli import KEYS
from whet.app.supervised.dialogues import Dialogues, imitate, load_dialogues, load_pairs, prefer
from whet.config import RunConfig, list_leaves, resolve
from whet.engines.scorer import LocalScorer
from whet.errors import ConfigError
from whet.gateway.templates.renderer import Renderer
from whet.io.files import atomic_file
from whet.io.threads import run_async
from whet.models.catalog import read_model_context, resolve_model
from whet.models.huggingface import LocalPolicy
from whet.protocols import Scorer
from whet.training.supervised import (
    Imitation,
    Objective,
    Preference,
    Reference,
    SupervisedExample,
    count_updates,
    fit,
    score_pairs,
)
from whet.training.tracking import Tracking, check_trackers
from whet.types import Metrics, StepRecord, digest_tokens

TuningKind = Literal["sft", "dpo"]

REFERENCE = "reference.json"
"""File of a run with the log-probabilities of its pairs before training."""


@dataclass(frozen=True, slots=True)
class Source:
    """Source of examples: data, or the training rollouts of a run."""

    data: Dialogues | None = None
    held_out: Dialogues | None = None
    from_run: str | Path | None = None
    min_reward: float | None = None
    best: int | None = None
    min_margin: float = 0.0

    def check(self) -> None:
        """Raise ConfigError unless there is one source, and what is chosen of it can be."""
        if (self.data is None) == (self.from_run is None):
            raise ConfigError.phrase(
                python="give dialogues or from_run, and not both",
                command="give a file of dialogues or --from RUN, and not both",
            )
        chooses = self.min_reward is not None or self.best is not None or self.min_margin
        if self.from_run is None and chooses:
            raise ConfigError.phrase(
                python="min_reward, best and min_margin are for from_run: leave them out",
                command="--min-reward, --best and --min-margin are for --from: leave them out",
            )
        if self.best is not None and self.best < 1:
            raise ConfigError(f"expected the best 1 or more of a group, found {self.best}")

    def describe(self) -> str:
        """Return the origin of the examples."""
        if self.from_run is not None:
            return f"of the run {self.from_run}"
        return f"of {self.data}" if isinstance(self.data, (str, Path)) else "in Python"


@dataclass(frozen=True, slots=True)
class FineTuning:
    """Result of `whet.sft` and `whet.dpo`."""

    run: Path
    model: Path
    """The trained model, or the adapter: a start for `whet.train(model=...)`."""
    steps: tuple[StepRecord, ...]
    """One for each checkpoint; `metrics` are over the optimizer steps since the one before."""
    seconds: float
    trained_on: str = ""
    """Number of examples, and where they are from."""

    @property
    def before(self) -> dict[str, float]:
        """Held-out metrics before training; empty without held-out data."""
        return self._evaluate_held_out(0, "base_held_out_")

    @property
    def after(self) -> dict[str, float]:
        """Held-out metrics after training; empty without held-out data."""
        return self._evaluate_held_out(-1, "held_out_")

    def as_json(self) -> dict[str, object]:
        """The numbers of the run."""
        return {
            "seconds": round(self.seconds, 1),
            "steps": self.steps[-1].version if self.steps else 0,
            "before": self.before,
            "after": self.after,
            "losses": [round(step.metrics["loss"], 4) for step in self.steps],
            "trained_on": self.trained_on,
            "trained_tokens": round(sum(s.metrics["trained_tokens"] for s in self.steps)),
            "run": str(self.run),
            "model": str(self.model),
        }

    def _evaluate_held_out(self, index: int, prefix: str) -> dict[str, float]:
        metrics = self.steps[index].metrics if self.steps else {}
        return {n.removeprefix(prefix): v for n, v in metrics.items() if n.startswith(prefix)}


def sft(
    data: Dialogues | None = None,
    *,
    held_out: Dialogues | None = None,
    from_run: str | Path | None = None,
    min_reward: float | None = None,
    best: int | None = None,
    resume: bool = False,
    quiet: bool = False,
    **settings: JsonValue,
) -> FineTuning:
    """Train a model to imitate dialogues, or the best rollouts of a run.

    `data` is a list or a JSONL file of `{"messages": [...], "tools": [...]}`; every assistant turn
    is trained. Of the rollouts of `from_run` those with `min_reward` are, at most the `best` of a
    group; without `min_reward` the best one of each group, if it is above the group's mean.
    `settings` are keys of the config; `resume` continues the run `name`, or the newest.

    Raises:
        ConfigError: invalid input; nothing was started.
    """
    source = Source(data, held_out, from_run, min_reward, best)
    return tune("sft", source, settings, open_console(quiet=quiet), resume=resume)


def dpo(
    data: Dialogues | None = None,
    *,
    held_out: Dialogues | None = None,
    from_run: str | Path | None = None,
    min_margin: float = 0.0,
    resume: bool = False,
    quiet: bool = False,
    **settings: JsonValue,
) -> FineTuning:
    """Train a model to prefer the chosen to the rejected answer of pairs, by the DPO loss.

    `data` is a list or a JSONL file of `{"prompt": ..., "chosen": ..., "rejected": ...}`. Pairs of
    `from_run` are the best and the worst rollout of each group, if their rewards differ by at
    least `min_margin`. `settings` are keys of the config; `resume` continues the run `name`, or
    the newest.

    Raises:
        ConfigError: invalid input; nothing was started.
    """
    source = Source(data, held_out, from_run, min_margin=min_margin)
    return tune("dpo", source, settings, open_console(quiet=quiet), resume=resume)


def tune(
    kind: TuningKind,
    source: Source,
    values: Mapping[str, JsonValue],
    console: Console,
    *,
    resume: bool = False,
    on_folder: Callable[[RunFolder], None] = lambda folder: None,
) -> FineTuning:
    """Check everything, create or resume the run's folder, train and report.

    `on_folder` is called with the folder once there is one.
    """
    source.check()
    if source.from_run is not None and not resume:
        records = RunFolder.find(source.from_run, resolve(values).dir)
        values = {"model": records.read_config().model} | dict(values)
    check_config(resolve(values), kind)
    folder = RunFolder.to_resume(resolve(values), kind) if resume else None
    config = folder.read_resumed_config(values) if folder else resolve(values)
    check_trackers(config.tracking)
    model = resolve_model(config.model, progress=console.print)
    if source.from_run is not None:
        _check_vocabulary(source.from_run, config, model)
    examples, held_out = _load_examples(kind, source, model, config, console)
    if folder is None:
        config = config.model_copy(update={"steps": count_updates(len(examples), config)})
        folder = RunFolder.create(config, kind)
    on_folder(folder)
    folder.keep_inputs({"examples": _digest(examples), "held-out examples": _digest(held_out)})
    if resume:
        folder.resume(values)
    console.print(
        f"{kind} of {config.model}: {len(examples)} examples, {len(held_out)} held out, "
        f"{config.steps} optimizer steps; {folder.path}",
        highlight=False,
        soft_wrap=True,
    )
    trained_on = f"{len(examples):,} examples {source.describe()}"
    result = run_async(_train, kind, folder, examples, held_out, trained_on, console)
    _print_result(console, result)
    return result


def check_config(config: RunConfig, kind: TuningKind) -> None:
    """Raise ConfigError for keys that have no meaning here."""
    if config.trainer.kind != "local":
        raise ConfigError(f"{kind} trains in this process: leave out trainer.kind")
    defaults = dict(list_leaves(RunConfig().model_dump(mode="json")))
    for key, value in list_leaves(config.model_dump(mode="json")):
        known = key in KEYS or key.partition(".")[0] in KEYS
        if value != defaults.get(key) and (
            not known or (kind == "sft" and key == "supervised.beta")
        ):
            raise ConfigError(f"config key {key!r} has no meaning for {kind}: leave it out")


# ------------------------------------------------------------------- preparation


def _check_vocabulary(source: str | Path, config: RunConfig, model: Path) -> None:
    """Refuse rollouts of another tokenizer: their tokens are trained as they were sampled."""
    sampled = RunFolder.find(source, config.dir).read_config().model
    if sampled != config.model and read_vocabulary(resolve_model(sampled)) != read_vocabulary(
        model
    ):
        raise ConfigError(
            f"the rollouts of {str(source)!r} are tokens of {sampled!r}, which has another "
            f"tokenizer than {config.model!r}"
        )


def _load_examples(
    kind: TuningKind, source: Source, model: Path, config: RunConfig, console: Console
) -> tuple[list[SupervisedExample], list[SupervisedExample]]:
    """Examples to train and to hold out."""
    renderer = build_renderer(model, config)
    limit = min(read_model_context(model), config.engine.max_context or read_model_context(model))

    def read(data: Dialogues) -> list[SupervisedExample]:
        return _fit_context(_render(kind, data, renderer), limit, config, console)

    if source.from_run is not None:
        records = RunFolder.find(source.from_run, config.dir)
        examples = run_async(_read_rollouts, kind, source, records, config)
        examples = _fit_context(examples, limit, config, console)
    else:
        assert source.data is not None
        examples = read(source.data)
    if source.held_out is not None:
        return examples, read(source.held_out)
    shuffled = random.Random(f"{config.seed}/held out").sample(examples, len(examples))
    count = int(len(examples) * config.supervised.held_out)
    return shuffled[count:], shuffled[:count]


def _render(kind: TuningKind, data: Dialogues, renderer: Renderer) -> list[SupervisedExample]:
    if kind == "sft":
        return [imitate(dialogue, renderer) for dialogue in load_dialogues(data)]
    return [prefer(pair, renderer) for pair in load_pairs(data)]


async def _read_rollouts(
    kind: TuningKind, source: Source, folder: RunFolder, config: RunConfig
) -> list[SupervisedExample]:
    async with folder.open_records() as store:
        if kind == "dpo":
            return await read_pairs(store, config.selection, min_margin=source.min_margin)
        best = source.best or (1 if source.min_reward is None else None)
        return await read_best(store, config.selection, min_reward=source.min_reward, best=best)


def _fit_context(
    examples: list[SupervisedExample], limit: int, config: RunConfig, console: Console
) -> list[SupervisedExample]:
    def count_tokens(example: SupervisedExample) -> int:
        return max(len(row.tokens) for row in (*example.rows, *example.rejected))

    long = [example for example in examples if count_tokens(example) > limit]
    if long and not config.supervised.skip_long:
        raise ConfigError(
            f"{long[0].name}: {count_tokens(long[0]):,} tokens do not fit into the model's context "
            f"of {limit:,} ({len(long)} such examples): shorten them, or set "
            "supervised.skip_long to true"
        )
    if len(long) == len(examples):
        raise ConfigError(
            f"no example fits into the model's context of {limit:,} tokens: shorten them, or "
            "choose another model"
        )
    if long:
        console.print(f"left out {len(long)} examples of more than {limit:,} tokens")
    return [example for example in examples if count_tokens(example) <= limit]


def _digest(examples: Sequence[SupervisedExample]) -> list[JsonValue]:
    return [
        digest_tokens(
            [token for row in (*each.rows, *each.rejected) for token in row.tokens]
        ).hexdigest()
        for each in examples
    ]


# ------------------------------------------------------------------- training


async def _train(
    kind: TuningKind,
    folder: RunFolder,
    examples: Sequence[SupervisedExample],
    held_out: Sequence[SupervisedExample],
    trained_on: str,
    console: Console,
) -> FineTuning:
    began = time.monotonic()
    config = folder.read_config()
    with folder.lock(), ExitStack() as stack:
        stack.callback(folder.discard_if_new)
        model = resolve_model(config.model)
        async with (
            folder.open_store() as log,
            open_trackers(folder, console.print) as tracking,
            open_trainer(config, model) as (trainer, policy),
        ):
            folder.keep()
            assert isinstance(policy, LocalPolicy)
            scorer = LocalScorer(policy)
            objective = await _build_objective(kind, folder, scorer, [*examples, *held_out])
            for record in await log.steps():
                _report(record, config, tracking, console)
            with _show_progress(config, console) as advance:
                records = fit(
                    examples,
                    held_out,
                    objective,
                    config,
                    checkpoints=folder.checkpoints,
                    trainer=trainer,
                    log=log,
                    on_update=advance,
                )
                async for record in records:
                    _delete_others(folder.checkpoints, record.checkpoint)
                    _report(record, config, tracking, console)
            await trainer.export(folder.model)
            steps = tuple(await log.steps())
            seconds = time.monotonic() - began
            result = FineTuning(folder.path, folder.model, steps, seconds, trained_on)
            tracking.finish({f"final_{name}": value for name, value in result.after.items()})
    folder.write_report(result.as_json())
    return result


async def _build_objective(
    kind: TuningKind, folder: RunFolder, scorer: Scorer, examples: Sequence[SupervisedExample]
) -> Objective:
    """The objective of a run; the reference of pairs is computed once, before training."""
    if kind == "sft":
        return Imitation(scorer)
    file = folder.path / REFERENCE
    if not file.exists():
        reference = await score_pairs(scorer, examples)
        with atomic_file(file) as partial:
            partial.write_text(json.dumps(reference))
    saved: Reference = json.loads(file.read_text())
    return Preference(scorer, folder.read_config().supervised.beta, saved)


def _delete_others(checkpoints: Path, keep: str) -> None:
    for folder in checkpoints.iterdir():
        if folder.name != keep:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _show_progress(config: RunConfig, console: Console) -> Generator[Callable[[], None]]:
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=config.steps)
        yield lambda: bar.advance(task)


def _report(record: StepRecord, config: RunConfig, tracking: Tracking, console: Console) -> None:
    tracking.step(record.version, record.metrics)
    metrics = record.metrics
    if record.step == 0:
        names = [name.replace("held_out_", "held-out ") for name in _select_shown(metrics)]
        header = " ".join(f"{name:>{max(9, len(name))}}" for name in [*names, "tokens/s"])
        console.print(f"{'step':>11} {header}", highlight=False)
    values = [f"{value:>{max(9, len(name))}.4f}" for name, value in _select_shown(metrics).items()]
    rate = metrics["trained_tokens"] / metrics["seconds"]
    line = " ".join([f"{record.version:>5}/{config.steps:<5}", *values, f"{rate:>9,.0f}"])
    console.print(line, highlight=False)


def _select_shown(metrics: Metrics) -> dict[str, float]:
    names = ("loss", "held_out_loss", "margin", "accuracy", "held_out_accuracy")
    return {name: metrics[name] for name in names if name in metrics}


def _print_result(console: Console, result: FineTuning) -> None:
    lines = [f"held-out {name}: {value:.4f}" for name, value in result.after.items()]
    if lines:
        lines[0] += f", {result.before['loss']:.4f} before training"
    lines.append(f"took {result.seconds:.0f} s; model: {result.model}")
    lines.append(
        f"next: `whet chat {result.run}`, or `whet train AGENT --tasks FILE --model {result.run}`"
    )
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
