"""`whet optimize-prompt`: search for better prompts of an agent."""

import argparse
import json
import sys
from typing import Any, cast

from whet.app.cli.config_flags import add_config_flags, read_config_values
from whet.app.cli.flags import (
    CommandParser,
    add_agent_flags,
    add_output_flags,
    add_tasks_flags,
    load_agent,
)
from whet.app.inputs import load_tasks
from whet.app.prompts.apo import APO
from whet.app.prompts.gepa import GEPA
from whet.app.prompts.saved import load_prompts
from whet.app.prompts.search import PromptResult, PromptSearch, read_reflection
from whet.config import resolve
from whet.errors import ConfigError
from whet.runners.loading import load_function
from whet.types import Endpoint

SHOWN = {
    "model": ("model", "engine.kind", "engine.device"),
    "running agents": ("runner.concurrency", "runner.processes", "runner.timeout_s"),
    "output": ("name", "dir"),
}
KEYS = ("model", "dir", "name", "seed", "engine", "gateway", "trainer.precision", "runner")
DEFAULT_BUDGET = 200


def add_arguments(parser: CommandParser) -> None:
    """Add the flags of `whet optimize-prompt`."""
    parser.usage = "whet optimize-prompt AGENT --tasks FILE --prompt FILE [options]"
    add_agent_flags(parser)
    add_tasks_flags(parser, held_out=False)
    parser.group("agent and tasks").add_argument(
        "--held-out",
        metavar="FILE",
        help="tasks whose rewards decide between prompts (default: those of --tasks)",
    )
    group = parser.group("search")
    group.add_argument(
        "--prompt",
        required=True,
        metavar="FILE",
        help="prompt to start from: a text file, JSON of prompts by name, or an earlier run",
    )
    group.add_argument(
        "--optimizer",
        default="gepa",
        metavar="NAME",
        help="gepa, apo, or your own as file.py:Class (default gepa)",
    )
    group.add_argument(
        "--budget",
        type=int,
        metavar="N",
        help=f"rollouts of the search (default {DEFAULT_BUDGET})",
    )
    group.add_argument(
        "--reflection-endpoint",
        metavar="URL",
        help="OpenAI-compatible URL of the model that reflects (default: the policy itself)",
    )
    group.add_argument("--reflection-model", metavar="NAME", help="its name at the endpoint")
    group.add_argument(
        "--key-variable",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="environment variable with the endpoint's key (default OPENAI_API_KEY)",
    )
    for title in SHOWN:
        parser.group(title)
    add_output_flags(parser)
    add_config_flags(parser, SHOWN, only=KEYS)
    parser.set_defaults(run=run_search)


def run_search(args: argparse.Namespace) -> int:
    """Run `whet optimize-prompt`."""
    values = read_config_values(args)
    config = resolve(values)
    tasks = load_tasks(args.tasks)
    held_out = load_tasks(args.held_out) if args.held_out else []
    prompts = load_prompts(args.prompt)
    reflection = read_reflection(args.reflection_endpoint, args.reflection_model, args.key_variable)
    search = _build(args.optimizer, args.budget, reflection, config.seed)
    settings = cast(dict[str, Any], values)  # checked by the config
    try:
        result: PromptResult = search.run(
            load_agent(args),
            tasks,
            held_out=held_out,
            resources=prompts,
            quiet=args.quiet or args.json,
            **settings,
        )
    except KeyboardInterrupt:
        sys.stderr.write("whet: stopped; the same command with the run's --name continues\n")
        return 130
    if args.json:
        sys.stdout.write(json.dumps(result.as_json()) + "\n")
    return 0


def _build(name: str, budget: int | None, reflection: Endpoint | None, seed: int) -> PromptSearch:
    if budget is not None and budget < 1:
        raise ConfigError(f"--budget is a number of rollouts, at least 1; found {budget}")
    if name in ("gepa", "apo"):
        ours = GEPA if name == "gepa" else APO
        return ours(budget=budget or DEFAULT_BUDGET, reflection=reflection, seed=seed)
    if budget is not None:
        raise ConfigError("--budget is for gepa and apo: set that of your own in its class")
    kind: Any = load_function(name, "optimizer")
    if not (isinstance(kind, type) and issubclass(kind, PromptSearch)):
        raise ConfigError(f"{name!r} is not an optimizer: inherit from whet.PromptSearch")
    return kind(reflection=reflection)
