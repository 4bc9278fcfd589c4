"""verl's agent loop manager, and the Ray actor behind it that runs rollouts.

The manager hands prompts over and returns at once, as verl requires. The actor runs the sessions of
each prompt at a host, and writes their rows to TransferQueue. If it dies, Ray starts it again and
repeats its unfinished calls: rollouts are known by their ids, so those that ended are read, not
run again.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import ray
import torch
import transfer_queue as tq
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import NonTensorData, NonTensorStack
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.utils import tensordict_utils

from whet.trainers.verl.entries import SessionResult, build_entries
from whet.trainers.verl.settings import ESTIMATORS, LOSS, SECTION

logger = logging.getLogger(__name__)

FINISHED, FAILURE, RUNNING = "finished", "failure", "running"


class Host(Protocol):
    """Runs the sessions of prompts: a gateway in front of verl's servers, and a queue."""

    async def run(
        self, uid: str, task: str, *, sessions: int, validate: bool, global_steps: int
    ) -> Sequence[SessionResult | str]:
        """Return each session, or the reason why it failed; `task` is JSON."""
        ...


OpenHost = Callable[[Mapping[str, Any], Any], AbstractAsyncContextManager[Host]]
"""Opens a host from verl's config, as plain values, and verl's client of its servers."""


class Bridge:
    """Actor that runs prompts at a host and writes what comes out to TransferQueue."""

    def __init__(self, open_host: OpenHost, config: Any, client: Any) -> None:
        tq.init()
        self._config = config
        self._by_rollout = config.algorithm.adv_estimator in ESTIMATORS.values()
        self._opening = asyncio.Lock()
        self._open_host = open_host
        self._client = client
        self._host: Host | None = None
        self._serving: asyncio.Task[None] | None = None

    async def ready(self) -> None:
        """Open the host, or raise why it cannot be opened."""
        async with self._opening:
            if self._host is None:
                opened: asyncio.Future[Host] = asyncio.get_running_loop().create_future()
                # One task opens and closes it: calls of an actor are tasks of their own.
                self._serving = asyncio.create_task(self._serve(opened))
                self._host = await opened

    async def _serve(self, opened: "asyncio.Future[Host]") -> None:
        try:
            async with self._open_host(self._config, self._client) as host:
                opened.set_result(host)
                await asyncio.Event().wait()
        except Exception as error:
            if not opened.done():
                opened.set_exception(error)
            else:
                logger.exception("host of rollouts failed")
                self._host = None

    async def run(self, prompts: list[dict[str, Any]], global_steps: int, validate: bool) -> None:
        """Run prompts to their ends, successful or not."""
        await asyncio.gather(*(self._run_prompt(p, global_steps, validate) for p in prompts))

    async def _run_prompt(
        self, prompt: Mapping[str, Any], global_steps: int, validate: bool
    ) -> None:
        uid, partition = str(prompt["uid"]), "val" if validate else "train"
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": RUNNING})
        try:
            status = await self._run_sessions(uid, prompt, global_steps, validate, partition)
        except Exception:  # whatever it is, verl must learn that the prompt has ended
            logger.exception("prompt failed uid=%s", uid)
            status = FAILURE
        await tq.async_kv_put(key=uid, partition_id=partition, tag={"status": status})

    async def _run_sessions(
        self,
        uid: str,
        prompt: Mapping[str, Any],
        global_steps: int,
        validate: bool,
        partition: str,
    ) -> str:
        rollout = self._config.actor_rollout_ref.rollout
        sessions = int(prompt.get("__rollout_n__", rollout.val_kwargs.n if validate else rollout.n))
        await self.ready()
        assert self._host is not None
        results = await self._host.run(
            uid, prompt["task"], sessions=sessions, validate=validate, global_steps=global_steps
        )
        entries = [
            entry
            for number, result in enumerate(results)
            if not isinstance(result, str)
            for entry in build_entries(
                uid,
                number,
                result,
                prompt,
                global_steps=global_steps,
                by_rollout=self._by_rollout and not validate,
            )
        ]
        if entries:
            fields = [entry.fields for entry in entries]
            await tq.async_kv_batch_put(
                keys=[entry.key for entry in entries],
                fields=tensordict_utils.list_of_dict_to_tensordict(fields),
                tags=[entry.tag for entry in entries],
                partition_id=partition,
            )
        for result in results:
            if isinstance(result, str):
                logger.warning("session failed uid=%s reason=%s", uid, result)
        return FAILURE if any(isinstance(result, str) for result in results) else FINISHED


class BridgeManager:
    """The class that `agent_loop_manager_class` names; a subclass sets `open_host`."""

    open_host: OpenHost

    def __init__(self, actor: Any, arguments: Sequence[Any]) -> None:
        self._actor = actor
        self._arguments = arguments
        """References to what the actor was made with, which a restart needs again."""
        self._running: list[Any] = []
        """Unfinished calls: Ray repeats them after a restart as long as they are referred to."""

    @classmethod
    def create(cls, *, config: Any, llm_client: Any, **_: Any) -> "BridgeManager":
        """Start the actor, as verl's task runner does once its servers listen."""
        check_plugin(config)
        # Where this process is: its gateway has the address that the run was given.
        placement = NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        arguments = ray.put(config), ray.put(llm_client)
        actor_class: Any = ray.remote(Bridge)
        actor = actor_class.options(
            num_cpus=float(config[SECTION].cpus),
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=100_000,
            scheduling_strategy=placement,
        ).remote(cls.open_host, *arguments)
        ray.get(actor.ready.remote())
        return cls(actor, arguments)

    def generate_sequences(self, prompts: Any) -> None:
        """Start the sessions of a batch of prompts; the rows go to TransferQueue."""
        if self._running:
            _, self._running = ray.wait(self._running, num_returns=len(self._running), timeout=0)
        call = self._actor.run.remote(
            split_batch(prompts),
            int(tensordict_utils.get(prompts, "global_steps")),
            bool(tensordict_utils.get(prompts, "validate", False)),
        )
        self._running.append(call)


def split_batch(prompts: Any) -> list[dict[str, Any]]:
    """The columns of each prompt of a batch, as plain values."""
    samples: list[dict[str, Any]] = [{} for _ in range(len(prompts))]
    for key, column in prompts.items():
        for index, sample in enumerate(samples):
            if isinstance(column, torch.Tensor):
                sample[key] = column[index].tolist()
            elif isinstance(column, NonTensorStack):
                sample[key] = column[index].data
            elif isinstance(column, NonTensorData):
                sample[key] = column.data
    return samples


def check_plugin(config: Any) -> None:
    """Raise ValueError if verl has not loaded the plugin: it only logs why, at level debug."""
    try:
        get_adv_estimator_fn(config.algorithm.adv_estimator)
        get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.get("loss_mode", "vanilla"))
    except ValueError as error:
        raise ValueError(
            f"{error}: verl finds {LOSS} by the entry point of whet; install whet with pip in "
            "verl's environment, and leave VERL_USE_EXTERNAL_PLUGINS at 'auto'"
        ) from error
