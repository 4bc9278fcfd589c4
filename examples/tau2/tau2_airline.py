"""Tasks of tau2-bench as an environment by name, `tau2:airline`. Nothing here knows of whet.

A rollout is a simulation as tau2-bench runs it: its agent, user simulator, tools and evaluation.
Agent and user are named by a header, so that one of them can be trained alone.
"""

import asyncio
import os
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # litellm would fetch its prices

from loguru import logger
from tau2.orchestrator.orchestrator import Orchestrator
from tau2.runner import build_agent, build_environment, build_user, get_tasks, run_simulation

SPLITS = {"train": "train", "held_out": "test"}
OPTIONS = {"max_steps": 30, "max_tokens": 256}
"""Messages of a simulation, and tokens of one of them."""

logger.remove()  # it writes every message to stderr


class Tau2:
    """A domain of tau2-bench, with its own training and test tasks."""

    def __init__(self, name: str, options: Any) -> None:
        if unknown := set(options) - set(OPTIONS):
            raise ValueError(f"tau2 takes the options {', '.join(OPTIONS)}; found {unknown}")
        for option, value in options.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"the option {option!r} is a positive integer; found {value!r}")
        self.domain = name
        self.options = OPTIONS | dict(options)
        self.tasks = {split: get_tasks(name, task_split_name=SPLITS[split]) for split in SPLITS}

    def list_tasks(self, split: str, count: int) -> list[Any]:
        """The first tasks of a split, by their ids."""
        return [{"split": split, "id": task.id} for task in self.tasks[split][:count]]

    async def rollout(self, task: Any, llm: Any) -> float:
        """Run one simulation; the reward is that of tau2-bench, and 0 if it ends too early."""
        return await asyncio.to_thread(self._simulate, task, llm)

    def _simulate(self, task: Any, llm: Any) -> float:
        [found] = [one for one in self.tasks[task["split"]] if one.id == task["id"]]
        environment = build_environment(self.domain)
        agent = build_agent("llm_agent", environment, **self._model(llm, "assistant"))
        user = build_user("user_simulator", environment, found, **self._model(llm, "customer"))
        simulation = Orchestrator(
            self.domain, agent, user, environment, found, max_steps=self.options["max_steps"]
        )
        return float(run_simulation(simulation).reward_info.reward)

    def _model(self, llm: Any, agent: str) -> dict[str, Any]:
        """The model behind an endpoint, as litellm takes it. TAU2_USER_MODEL is the customer's."""
        other = os.environ.get("TAU2_USER_MODEL") if agent == "customer" else None
        return {
            "llm": other or f"openai/{llm.model}",
            "llm_args": {
                "max_tokens": self.options["max_tokens"],
                "num_retries": 0,
                **({} if other else connect(llm, agent)),
            },
        }


def connect(llm: Any, agent: str) -> dict[str, Any]:
    return {
        "api_base": llm.base_url,
        "api_key": llm.api_key,
        "extra_headers": {"x-whet-agent": agent},
    }
