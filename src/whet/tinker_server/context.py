"""What the endpoints share: the workshop, the records, the promises, and who is still there."""

import time
import uuid
from collections.abc import Awaitable, Callable

from starlette.responses import JSONResponse

from whet.errors import NotFound, RequestError
from whet.tinker_server.promises import Line, Promises, Reply
from whet.tinker_server.records import Records, Run, Session
from whet.tinker_server.workshop import Samplers, TrainingRuns

SILENT_S = 300.0
"""A client that has not been heard of for so long is gone; its heart beats every ten seconds."""


class Context:
    """The state of a server. For one event loop."""

    def __init__(self, runs: TrainingRuns, samplers: Samplers, records: Records) -> None:
        self.runs = runs
        self.samplers = samplers
        self.records = records
        self.promises = Promises()
        self._lines: dict[str, Line] = {}
        """Of the runs that are in memory."""
        self._heard: dict[str, float] = {}
        """When each session was last heard of."""

    def begin_session(self, session: Session) -> None:
        self.records.keep_session(session)
        self._heard[session.id] = time.monotonic()

    def beat(self, id: str) -> bool:
        """Note that a session is alive; says whether it may go on. Raises NotFound."""
        if self.records.session(id).finished:
            return False
        self._heard[id] = time.monotonic()
        return True

    def require_session(self, id: str) -> None:
        """Raises RequestError, or NotFound, unless there is such a session that goes on."""
        if not self.beat(id):
            raise RequestError(f"the session {id!r} has ended: make another client")

    def finish(self, id: str) -> None:
        """Let go of what a session held in memory, and of what it saved without a name."""
        session = self.records.session(id)
        self.records.keep_session(session.model_copy(update={"finished": True}))
        self._forget(id)
        self.records.delete_ephemeral(id)

    def forget_silent(self) -> None:
        """Let go of runs whose clients are gone without a word."""
        now = time.monotonic()
        for id in [id for id, at in self._heard.items() if at < now - SILENT_S]:
            self._forget(id)

    def add_run(self, run: Run) -> None:
        self.records.keep_run(run)
        self._lines[run.id] = Line()

    def run(self, id: str) -> Run:
        """A run that is in memory. Raises NotFound, and says how to have it again."""
        if id not in self._lines:
            raise NotFound(
                f"the training run {id!r} is not in memory: the server was started again, or its "
                "session has ended; continue with create_training_client_from_state_with_optimizer"
            )
        return self.records.run(id)

    def in_order(self, run: str, number: int, work: Callable[[], Awaitable[Reply]]) -> JSONResponse:
        """Promise work on a run, to be done when it is its turn.

        What is wrong with a request is for the work to say: one that is refused before would leave
        a number out, and all requests after it waiting.
        """
        line = self._lines[run]

        async def on_turn() -> Reply:
            async with line.turn(number):
                return await work()

        id = f"{run}:{number}"
        self.promises.make(id, on_turn)
        return JSONResponse({"request_id": id, "model_id": run})

    def refuse_other_models(self, base_model: str) -> None:
        served = self.samplers.served
        if base_model not in (served.name, *served.also):
            raise RequestError(f"this server has {served.name!r} alone, not {base_model!r}")

    def _forget(self, session: str) -> None:
        self._heard.pop(session, None)
        for run in [run for run in self._lines if run.startswith(f"{session}:")]:
            self._lines.pop(run).close()
            self.runs.forget(run)


def new_id() -> str:
    """A name that nothing else has."""
    return uuid.uuid4().hex
