"""`whet.train`: check a run, create or resume its folder, run it and print the report."""

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import AsyncExitStack, ExitStack, contextmanager
from functools import partial
from typing import Any

from anyio import to_thread
from pydantic import JsonValue
from rich.console import Console

from whet.algorithms import check_algorithm, is_custom
from whet.app.cli.display import Display, open_console, print_next, print_start
from whet.app.cli.report import draw_picture, print_report
from whet.app.composition.distributed import (
    STORE_VARIABLE,
    connect_store,
    find_store,
    watch_workers,
)
from whet.app.composition.ray_runners import run_agents_on_ray
from whet.app.composition.run import open_run
from whet.app.composition.trainers import check_credit, load_algorithm, name_algorithm
from whet.app.dashboard.serving import serve_beside
from whet.app.evaluation.model_sources import resolve_starts
from whet.app.experiment import Result, has_only_failures, run_experiment
from whet.app.inputs import (
    NO_INPUTS,
    AgentInputs,
    ResourceValues,
    Tasks,
    check_held_out,
    check_parameters,
    check_policies,
    load_tasks,
    parse_resources,
    plan_rollouts,
)
from whet.app.run_folder import RunFolder
from whet.config import RunConfig, SupervisedConfig, merge, resolve
from whet.errors import ConfigError, RunFailed
from whet.io.threads import run_async, run_in_thread
from whet.models.catalog import resolve_model
from whet.protocols import Algorithm
from whet.runners.agent import Agent, check_agent, get_name
from whet.runners.attempt import check_runnable
from whet.runners.hooks import Hooks
from whet.runners.judges.judge import Judge
from whet.runners.loading import get_spec
from whet.store import DEFAULT_RUN
from whet.training.tracking import check_trackers
from whet.types import Attempt, Outcome

KIND = "train"


def train(
    agent: Agent,
    tasks: Tasks,
    *,
    held_out: Tasks | None = None,
    algorithm: Algorithm | dict[str, JsonValue] | str | None = None,
    resources: ResourceValues | None = None,
    hooks: Sequence[Hooks] = (),
    judge: Judge | None = None,
    tracer: str | None = None,
    resume: bool = False,
    store: str | None = None,
    quiet: bool = False,
    **settings: JsonValue,
) -> Result:
    """Train the model behind an agent on tasks; `settings` are keys of the config.

    With `held_out` tasks the base and the trained model are compared on them. `algorithm` is an
    object of your own, a name, or keys of the config. `resources` are passed to every rollout, and
    `hooks` are called around each attempt. A `judge` ranks the answers of each training group, and
    its scores are added to the rewards. `tracer` records the spans of the agent's SDK. `resume`
    continues the run `name`, or the newest. With a `store`, or WHET_STORE in the environment, this
    process only trains: `whet serve` and `whet runner` at that store do the rest, and the same call
    continues a run that was begun.

    Raises:
        ConfigError: invalid input; nothing was started.
        RunFailed: every rollout of a step failed, or nothing was trained; the message says why.
    """
    settings, own = _read_algorithm(settings, algorithm)
    if tracer is not None:
        settings = merge(settings, {"runner": {"tracer": tracer}})
    address = store or os.environ.get(STORE_VARIABLE)
    _check_runs_in_process(hooks, resolve(settings), address)
    console = open_console(quiet=quiet)
    agent_inputs = AgentInputs(parse_resources(resources), tuple(hooks), judge)
    train_on = load_tasks(tasks)
    compare_on = load_tasks(held_out, "held_out") if held_out is not None else []
    check_held_out(resolve(settings), compare_on)
    folder = prepare_run(
        agent,
        settings,
        KIND,
        console,
        algorithm=own,
        agent_inputs=agent_inputs,
        store=address,
        resume=resume,
        inputs=(train_on, compare_on),
    )
    result = run_and_report(
        *(agent, train_on, compare_on, folder, console),
        algorithm=own,
        agent_inputs=agent_inputs,
        store=address,
    )
    check_trained(result)
    return result


async def train_async(agent: Agent, tasks: Tasks, **arguments: Any) -> Result:  # Any: of `train`
    """Call `train` with the same arguments in a thread, and wait for it without blocking.

    The run has an event loop of its own. A cancellation ends it cleanly before it is raised, as
    Ctrl-C does; `resume` continues it.
    """
    return await run_in_thread(partial(train, agent, tasks, **arguments))


def _read_algorithm(
    settings: dict[str, JsonValue], algorithm: Algorithm | dict[str, JsonValue] | str | None
) -> tuple[dict[str, JsonValue], Algorithm | None]:
    """The settings that name the algorithm, and the object if it is one of the user's own."""
    if algorithm is None:
        return settings, None
    if isinstance(algorithm, str):
        return {**settings, "algorithm": {"name": algorithm}}, None
    if isinstance(algorithm, dict):
        return {**settings, "algorithm": algorithm}, None
    own = check_credit(algorithm)
    return {**settings, "algorithm": {"name": name_algorithm(own)}}, own


def _check_runs_in_process(hooks: Sequence[Hooks], config: RunConfig, store: str | None) -> None:
    """Raise ConfigError for hooks and tracers of agents that run elsewhere, and for verl."""
    if config.trainer.kind == "verl":
        raise ConfigError("to train with verl, use whet.Trainer(algorithm=whet.VERL(...)).fit(...)")
    if hooks and (store is not None or config.runner.ray is not None):
        raise ConfigError("hooks are called where agents run: give them to the runners")
    if config.runner.tracer and store is not None:
        raise ConfigError("the tracer is set where agents run: give it to the runners")


def prepare_run(
    agent: Agent | None,
    values: dict[str, JsonValue],
    kind: str,
    console: Console,
    *,
    algorithm: Algorithm | None = None,
    agent_inputs: AgentInputs | None = NO_INPUTS,
    store: str | None = None,
    resume: bool = False,
    continues: bool = False,
    inputs: tuple[Sequence[JsonValue], Sequence[JsonValue]] | None = None,
) -> RunFolder:
    """Check a run and create its folder: a run that cannot start leaves nothing behind.

    `resume` takes the folder of the run that is named, or the newest; `continues` the named one if
    it exists, as runs in a `store` always do. `inputs` are the tasks and the held-out ones.

    Raises:
        ConfigError: invalid input.
    """
    if store is not None:
        values = {"name": DEFAULT_RUN} | values
    progress = partial(console.print, highlight=False)
    config = resolve(values)
    if config.policies or "model" in values:  # others start from the default model
        values = resolve_starts(values, config, progress)
        config = resolve(values)
    folder = _find_resumed_folder(
        config, kind, resume=resume, continues=continues, in_store=store is not None
    )
    if folder is not None:
        config = folder.read_resumed_config(values)
    check_run(
        agent, config, algorithm=algorithm, agent_inputs=agent_inputs, runs_agent=store is None
    )
    for each in (config, *(config.for_policy(name) for name in config.policies)):
        resolve_model(each.model, progress=progress)
    if folder is None:
        return RunFolder.create(config, kind)
    if inputs is not None:
        folder.keep_tasks(*inputs)
    folder.resume(values)  # last: what is refused changes nothing
    return folder


def check_run(
    agent: Agent | None,
    config: RunConfig,
    *,
    algorithm: Algorithm | None,
    agent_inputs: AgentInputs | None,
    runs_agent: bool,
) -> None:
    """Raise ConfigError for what could not work, before anything is started.

    Checks the agent, its parameters, the way it is run, the algorithm and the trackers; without
    `agent_inputs`, parameters are not checked.
    """
    if agent is None and config.runner.ray is not None:
        raise ConfigError("runner.ray needs an agent: name it, or start the runners apart")
    if config.supervised != SupervisedConfig():
        raise ConfigError("config section 'supervised' is for sft and dpo")
    if agent is not None:
        check_agent(agent)
        if agent_inputs is not None:
            check_parameters(agent, agent_inputs.resources)
        if runs_agent:
            check_runnable(agent, config.runner)
        if config.runner.ray is not None:
            get_spec(agent)
    check_policies(config, agent_inputs.resources if agent_inputs else {})
    if config.policies and not runs_agent:
        raise ConfigError("several policies are trained in one process: leave out the store")
    for own in map(config.for_policy, config.trained_policies):
        check_algorithm(own)
        inherits = own.algorithm == config.algorithm and algorithm is not None
        if is_custom(own.algorithm.name) and not inherits:
            load_algorithm(own.algorithm.name)
    check_trackers(config.tracking)


def run_and_report(
    agent: Agent | None,
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    folder: RunFolder,
    console: Console,
    *,
    algorithm: Algorithm | None = None,
    agent_inputs: AgentInputs = NO_INPUTS,
    store: str | None = None,
) -> Result:
    """Run the rest of a run, and print its result. With a `store` it runs no agent."""
    with ExitStack() as stack:
        display = stack.enter_context(Display(console))

        def begin() -> None:
            print_start(console, folder, len(tasks))
            if store is None and not console.quiet:  # `whet store` serves one itself
                stack.enter_context(_serve_dashboard(folder, console))

        training = partial(
            run_training,
            agent,
            tasks,
            held_out,
            folder,
            display,
            algorithm=algorithm,
            agent_inputs=agent_inputs,
            store=store,
            on_open=begin,
        )
        result = run_async(training)
    draw_picture(result, folder.picture)
    print_report(console, result)
    print_next(console, folder, result.steps, has_failures=bool(result.failures))
    return result


def check_trained(result: Result, command: str | None = None) -> None:
    """Raise RunFailed if every rollout of a step failed, or nothing was trained.

    `command` is what a user types to resume the run.
    """
    if result.problem is None:
        return
    found, text = result.problem, ""
    if command is not None and has_only_failures(result.steps[-1]):
        text = f"{found}: {command}"
    elif result.total("unproven_generations") or result.total("unselected_generations"):
        text = f"{found}; `whet doctor --run {result.run}` counts the reasons"
    raise RunFailed.phrase(python=found, command=text)


@contextmanager
def _serve_dashboard(folder: RunFolder, console: Console) -> Generator[None]:
    """Serve the runs of the folder's directory beside a run, and print the link."""
    config = folder.read_config().dashboard
    if not config.serve:
        yield
        return
    directory = folder.path.parent.parent
    with serve_beside(directory, host=config.host, port=config.port) as dashboard:
        link = dashboard.create_link(folder.path.name)
        console.print(f"dashboard {link}", highlight=False, soft_wrap=True)
        yield


async def run_training(
    agent: Agent | None,
    tasks: Sequence[JsonValue],
    held_out: Sequence[JsonValue],
    folder: RunFolder,
    display: Display,
    *,
    algorithm: Algorithm | None = None,
    agent_inputs: AgentInputs = NO_INPUTS,
    store: str | None = None,
    on_open: Callable[[], None] | None = None,
) -> Result:
    """Run the rest of a run: in this process, or at the address of a `store`.

    At a store the agent is run only on a Ray cluster. `on_open` is called once the model is loaded.
    """

    def on_outcome(attempt: Attempt, outcome: Outcome) -> None:
        display.count_ended(1)

    folder.keep_tasks(tasks, held_out)
    runner = folder.read_config().runner
    async with AsyncExitStack() as stack:
        connected = None
        address = None
        if store is not None:
            address = await find_store(store, folder.path.name, folder.path.parent.parent)
            connected = await stack.enter_async_context(connect_store(address))
        run = await stack.enter_async_context(
            open_run(
                folder,
                agent=None if connected else agent,
                store=connected,
                algorithm=algorithm,
                agent_inputs=agent_inputs,
                on_outcome=on_outcome,
                on_ended=display.count_ended if connected or runner.ray else None,
                plan_groups=lambda rewards: plan_rollouts(
                    tasks, folder.read_config(), group_rewards=rewards
                ),
                progress=display.note,
            )
        )
        if on_open is not None:
            await to_thread.run_sync(on_open)
        if connected is not None and address is not None:
            if runner.ray is not None and agent is not None:
                watched = run_agents_on_ray(
                    agent, runner, connected, address, progress=display.note
                )
            else:
                watched = watch_workers(connected, display.note)
            await stack.enter_async_context(watched)
        name = "" if agent is None else get_name(agent)
        return await run_experiment(run, tasks, held_out, display, agent=name)


def _find_resumed_folder(
    config: RunConfig, kind: str, *, resume: bool, continues: bool, in_store: bool
) -> RunFolder | None:
    if resume:
        return RunFolder.to_resume(config, kind, in_store=in_store)
    named = RunFolder(config.dir / "runs" / config.name) if config.name else None
    if named is None or not named.config_file.exists():
        return None
    if in_store:  # its run is there, and commands of several kinds may use it
        return named
    return RunFolder.to_resume(config, kind) if continues else None
