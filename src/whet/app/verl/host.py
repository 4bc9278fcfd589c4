"""Host of a verl run's rollouts: our gateway on verl's servers, and our queue.

Runs in an actor of verl's Ray cluster. Runners, anywhere, find the gateway through the store.
"""

import json
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from whet.app.composition.distributed import StoreAddress
from whet.app.composition.gateway_server import advertise, serve_gateway
from whet.app.composition.samplers import TextEngine, build_renderer
from whet.config import RunConfig
from whet.engines.verl import TokenClient, VerlEngine
from whet.protocols import Store
from whet.store import open_store
from whet.store.http import token
from whet.trainers.verl.entries import SessionResult
from whet.trainers.verl.settings import SECTION
from whet.training.rows import build_rows
from whet.types import Credit, Mode, Rollout, SamplingOverride, Trajectory

logger = logging.getLogger(__name__)


class RolloutHost:
    """Queues the sessions of prompts as rollouts, waits, and reads their rows back."""

    def __init__(self, store: Store, engine: VerlEngine, config: RunConfig, rollout: Any) -> None:
        self._store = store
        self._engine = engine
        self._config = config
        self._rollout = rollout
        """verl's config of rollouts."""

    async def run(
        self, uid: str, task: str, *, sessions: int, validate: bool, global_steps: int
    ) -> Sequence[SessionResult | str]:
        """Run the sessions of a prompt; those of an earlier call with the same uid are reused."""
        self._engine.version = global_steps
        rollouts = [
            Rollout(
                id=f"{uid}-{number}",
                group=uid,
                task=json.loads(task),
                mode=Mode.VAL if validate else Mode.TRAIN,
                sampling=self._read_sampling(validate=validate),
                timeout_s=self._config.runner.timeout_s,
                max_attempts=self._config.runner.max_attempts,
            )
            for number in range(sessions)
        ]
        ids = [rollout.id for rollout in rollouts]
        await self._store.enqueue(rollouts)
        await self._store.wait(ids)
        found = {t.attempt.rollout.id: t for t in await self._store.trajectories(ids)}
        failures = await self._store.failures(ids)
        return [
            read_session(found[id]) if id in found else failures.get(id, "the rollout was canceled")
            for id in ids
        ]

    def _read_sampling(self, *, validate: bool) -> SamplingOverride:
        """The distribution that verl's actor computes: its temperature, and nothing cut off."""
        used = self._rollout.val_kwargs if validate else self._rollout
        return SamplingOverride(
            temperature=float(used.temperature), top_p=float(used.top_p), top_k=max(0, used.top_k)
        )


def read_session(trajectory: Trajectory) -> SessionResult | str:
    """The rows of a trajectory, or why it has none."""
    built = build_rows([Credit.even(trajectory, 1.0)])
    if not built.rows:
        return f"nothing to train: {len(trajectory.calls)} calls, {len(built.unproven)} unproven"
    return SessionResult(built.rows, trajectory.reward, len(trajectory.calls))


@asynccontextmanager
async def open_host(config: Any, client: TokenClient) -> AsyncGenerator[RolloutHost]:
    """Serve the gateway on verl's servers for the run of a store.

    `config` is verl's, with our section: model, store, run, the folder with its token, and the
    run's own config as JSON.
    """
    ours: Mapping[str, Any] = config[SECTION]
    rollout = config.actor_rollout_ref.rollout
    run_config = RunConfig.model_validate_json(ours["config"])
    address = StoreAddress(ours["store"], ours["run"], token.find_token(Path(ours["token_folder"])))
    renderer = build_renderer(Path(ours["model"]), run_config)
    engine = VerlEngine(
        client,
        renderer.template.decode,
        context_length=int(
            rollout.get("max_model_len") or rollout.prompt_length + rollout.response_length
        ),
    )
    sampler = TextEngine(engine, engine.context_length, renderer)
    async with (
        open_store(address.url, run=address.run, token=address.token) as store,
        serve_gateway(
            {"": sampler},
            run_config,
            store,
            address.secret,
            algorithms=lambda: [run_config.algorithm],
            progress=logger.info,
        ) as gateway,
        advertise(store, ours.get("url") or gateway.url),
    ):
        yield RolloutHost(store, engine, run_config, rollout)
