"""State shared by the endpoints: backend, storage, futures and live sessions."""

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence

from starlette.responses import JSONResponse

from whet.app.tinker_server.backend import ServedModel, Weights
from whet.app.tinker_server.futures import FutureResult, Futures, SequenceLock
from whet.app.tinker_server.storage import Checkpoint, Session, Storage, TrainingRun
from whet.errors import NotFound, RequestError

SESSION_TIMEOUT_S = 3600.0
"""A client without a heartbeat for this long counts as gone: it sends one every ten seconds, but
its machine may sleep."""
SESSION_KEPT_S = 30 * 24 * 3600.0
"""How long the record of a silent session is kept, if no checkpoint is left of it."""
SAMPLES_TIMEOUT_S = 120.0
"""The samples of a client without a heartbeat for this long are stopped: others wait for them."""
UNNAMED_KEPT = 8
UNNAMED_IDLE_S = 600.0
"""Older unnamed sampler weights of a run than its newest ones are deleted when they have not been
sampled from for this long: clients make one after each step and never release it."""


class ServerState:
    """State of a server; used from one event loop."""

    def __init__(
        self,
        models: Sequence[ServedModel],
        storage: Storage,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self.models = tuple(models)
        self.storage = storage
        self.futures = Futures()
        self._locks: dict[str, SequenceLock] = {}
        """Request order of each run in memory."""
        self._last_seen: dict[str, float] = {}
        """Time of each session's last request."""
        self._last_used: dict[str, float] = {}
        """Time at which unnamed weights were last sampled from."""
        self._started = self._clock()
        for session in storage.list_sessions():  # what was open before a restart may come back
            if not session.finished:
                self._last_seen[session.id] = self._started

    def begin_session(self, session: Session) -> None:
        self.storage.delete_old_sessions(time.time() - SESSION_KEPT_S)
        self.storage.save_session(session)
        self._last_seen[session.id] = self._clock()

    def touch(self, id: str) -> bool:
        """Mark a session as alive; return whether it is still open. Raises NotFound."""
        if self.storage.read_session(id).finished:
            return False
        self._last_seen[id] = self._clock()
        self.storage.mark_alive(id)
        return True

    def require_session(self, id: str) -> None:
        """Raise RequestError or NotFound unless the session exists and is open."""
        if not self.touch(id):
            raise RequestError(f"the session {id!r} has ended: create another client")

    def finish(self, id: str) -> None:
        """Release the runs of a session and delete its unnamed checkpoints."""
        session = self.storage.read_session(id)
        self.storage.save_session(session.model_copy(update={"finished": True}))
        self._drop(id)

    def drop_inactive(self) -> None:
        """Release the runs of sessions that timed out, and sooner their samples in progress."""
        now = self._clock()
        for id, at in self._last_seen.items():
            if at < now - SAMPLES_TIMEOUT_S:
                self.futures.abandon(f"{id}:sample:")
        for id in [id for id, at in self._last_seen.items() if at < now - SESSION_TIMEOUT_S]:
            self._drop(id)

    def mark_used(self, saved: Checkpoint) -> None:
        """Keep unnamed weights that are sampled from."""
        if saved.ephemeral:
            self._last_used[saved.path] = self._clock()

    def drop_unnamed(self, run: str) -> None:
        """Delete old unnamed weights of a run that nothing samples from."""
        before = self._clock() - UNNAMED_IDLE_S
        for saved in self.storage.list_unnamed(run)[UNNAMED_KEPT:]:
            if self._last_used.get(saved.path, self._started) < before:
                self._last_used.pop(saved.path, None)
                self.storage.delete_unnamed(saved)

    def add_run(self, run: TrainingRun) -> None:
        """Add a new run. Raises RequestError if its session has ended meanwhile."""
        try:
            self.require_session(run.session)
        except RequestError:
            self._release(run.id)
            raise
        self.storage.save_run(run)
        self._locks[run.id] = SequenceLock()

    def find_run(self, id: str) -> TrainingRun:
        """Return a run that is in memory. Raises NotFound with how to restore it."""
        if id not in self._locks:
            raise NotFound(
                f"the training run {id!r} is not in memory: the server was restarted, or its "
                f"session has ended, or was silent for {SESSION_TIMEOUT_S / 60:.0f} minutes; "
                "continue with create_training_client_from_state_with_optimizer"
            )
        return self.storage.read_run(id)

    def run_in_order(
        self, run: str, number: int, work: Callable[[], Awaitable[FutureResult]]
    ) -> JSONResponse:
        """Schedule work on a run after the requests with lower numbers.

        Validation belongs into `work`: a request refused earlier would leave a gap in the
        numbers, and all later requests waiting.
        """
        lock = self._locks[run]

        async def on_turn() -> FutureResult:
            async with lock.wait_turn(number):
                return await work()

        id = f"{run}:{number}"
        self.futures.start(id, on_turn)
        return JSONResponse({"request_id": id, "model_id": run})

    def find_model(self, name: str) -> ServedModel:
        """Return the model that is served under a name. Raises RequestError."""
        for model in self.models:
            if name in model.samplers.served.names:
                return model
        served = ", ".join(repr(name) for m in self.models for name in m.samplers.served.listed)
        raise RequestError(f"unknown model {name!r}: this server serves {served}")

    def find_sampled_model(self, base_model: str | None, path: str | None) -> ServedModel:
        """Return the model that a sampler uses: the one it names, or that of its checkpoint.

        Raises:
            RequestError: both are missing, or the checkpoint is another model's or exported.
            NotFound: there is no such checkpoint.
        """
        named = None if base_model is None else self.find_model(base_model)
        if path is None:
            if named is None:
                raise RequestError("missing base_model or model_path")
            return named
        saved = self.storage.read_checkpoint(path)
        if saved.kind == "external_weights":
            raise RequestError(f"{path!r} holds exported weights, which cannot be sampled from")
        model = self.find_model(saved.base_model)
        if named not in (None, model):
            raise RequestError(f"{path!r} was trained on {saved.base_model!r}, not {base_model!r}")
        return model

    def find_weights(self, path: str | None) -> Weights | None:
        """Return the weights of a checkpoint, and mark it as used; None without a path.

        Raises:
            NotFound: there is no such checkpoint.
        """
        if path is None:
            return None
        saved = self.storage.read_checkpoint(path)
        self.mark_used(saved)
        return Weights(self.storage.find_folder(path), saved.lora, saved.created)

    def _drop(self, session: str) -> None:
        self._last_seen.pop(session, None)
        for run in [run for run in self._locks if run.startswith(f"{session}:")]:
            self._locks.pop(run).close()
            self._release(run)
        self.futures.cancel_all(f"{session}:sample:")
        for saved in self.storage.list_unnamed_in_session(session):
            self.storage.delete_unnamed(saved)

    def _release(self, run: str) -> None:
        for model in self.models:
            model.runs.drop(run)


def create_id() -> str:
    """Return a unique id."""
    return uuid.uuid4().hex
