"""Endpoints that list, update and delete stored checkpoints, runs and sessions."""

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from whet.app.tinker_server.auth import Signer
from whet.app.tinker_server.schemas import CheckpointRequest, Lifetime, read_json
from whet.app.tinker_server.state import ServerState
from whet.app.tinker_server.storage import KINDS, SCHEME, Checkpoint, TrainingRun
from whet.errors import NotFound, RequestError

T = TypeVar("T")

CHECKPOINT_PATH = "/training_runs/{run}/checkpoints/{kind}/{name}"


def build_management_routes(state: ServerState, signer: Signer) -> list[Route]:
    """Build the routes."""
    endpoints = _Management(state, signer)
    return [
        Route("/weights_info", endpoints.read_weights_info, methods=["POST"]),
        Route("/training_runs", endpoints.list_runs),
        Route("/training_runs/{run}", endpoints.read_run),
        Route("/training_runs/{run}/checkpoints", endpoints.list_run_checkpoints),
        Route("/checkpoints", endpoints.list_checkpoints),
        Route(CHECKPOINT_PATH, endpoints.delete, methods=["DELETE"]),
        Route("/training_runs/{run}/checkpoints/{name}", _require_kind, methods=["DELETE"]),
        Route(f"{CHECKPOINT_PATH}/ttl", endpoints.set_lifetime, methods=["PUT"]),
        Route(f"{CHECKPOINT_PATH}/publish", endpoints.publish, methods=["POST", "DELETE"]),
        Route(f"{CHECKPOINT_PATH}/external_weights_urls", endpoints.list_urls),
        Route("/sessions", endpoints.list_sessions),
        Route("/sessions/{session}", endpoints.read_session),
        Route("/files/{token}/{run}/{name}/{file:path}", endpoints.send_file),
    ]


async def _require_kind(request: Request) -> Response:
    """Refuse a name that checkpoints of several kinds may have."""
    name = request.path_params["name"]
    kinds = ", ".join(f"{kind}/{name}" for kind in KINDS)
    raise RequestError(f"invalid checkpoint {name!r}: expected one of {kinds}")


class _Management:
    def __init__(self, state: ServerState, signer: Signer) -> None:
        self._state = state
        self._storage = state.storage
        self._signer = signer

    async def read_weights_info(self, request: Request) -> Response:
        saved = self._storage.read_checkpoint(
            (await read_json(request, CheckpointRequest)).tinker_path
        )
        return JSONResponse(
            {
                "base_model": saved.base_model,
                "is_lora": True,
                "lora_rank": saved.lora.rank,
                **saved.lora.model_dump(exclude={"rank"}),
            }
        )

    async def list_runs(self, request: Request) -> Response:
        runs, cursor = _select_page(request, self._storage.list_runs(), 20)
        return JSONResponse(
            {"training_runs": [self._format_run(run) for run in runs], "cursor": cursor}
        )

    async def read_run(self, request: Request) -> Response:
        return JSONResponse(self._format_run(self._storage.read_run(request.path_params["run"])))

    async def list_run_checkpoints(self, request: Request) -> Response:
        run = self._storage.read_run(request.path_params["run"])
        saved = self._storage.list_checkpoints(run.id)
        return JSONResponse({"checkpoints": [self._format_checkpoint(one) for one in saved]})

    async def list_checkpoints(self, request: Request) -> Response:
        saved, cursor = _select_page(request, self._storage.list_checkpoints(), 100)
        shown: list[JsonValue] = [self._format_checkpoint(one) for one in saved]
        return JSONResponse({"checkpoints": shown, "cursor": cursor})

    async def delete(self, request: Request) -> Response:
        self._storage.delete(_read_path(request))
        return JSONResponse({})

    async def set_lifetime(self, request: Request) -> Response:
        seconds = (await read_json(request, Lifetime)).ttl_seconds
        saved = self._storage.read_checkpoint(_read_path(request))
        expires = time.time() + seconds if seconds else None
        self._storage.change(saved.model_copy(update={"expires": expires}))
        return JSONResponse({})

    async def publish(self, request: Request) -> Response:
        saved = self._storage.read_checkpoint(_read_path(request))
        public = request.method == "POST"
        self._storage.change(saved.model_copy(update={"public": public}))
        return JSONResponse({})

    async def list_urls(self, request: Request) -> Response:
        path = _read_path(request)
        saved = self._storage.read_checkpoint(path)
        if saved.kind != "external_weights":
            raise RequestError(f"{path!r} holds no exported weights: use save_weights_external")
        folder = self._storage.find_folder(path)
        token = self._signer.sign(path)
        base = f"{request.base_url}api/v1/files/{token}/{saved.run}/{saved.name}"
        urls = {name: f"{base}/{name}" for name in _list_files(folder)}
        expires = datetime.now(UTC) + timedelta(seconds=self._signer.lifetime_s)
        return JSONResponse({"urls": urls, "expires": expires.isoformat()})

    async def send_file(self, request: Request) -> Response:
        params = request.path_params
        path = f"{SCHEME}{params['run']}/external_weights/{params['name']}"
        self._signer.check(params["token"], path)
        folder = self._storage.find_folder(path)
        if params["file"] not in _list_files(folder):
            raise NotFound(f"unknown file {params['file']!r} of {path!r}")
        return FileResponse(folder / params["file"])

    async def list_sessions(self, request: Request) -> Response:
        sessions, _ = _select_page(request, self._storage.list_sessions(), 20)
        return JSONResponse({"sessions": [session.id for session in sessions]})

    async def read_session(self, request: Request) -> Response:
        session = self._storage.read_session(request.path_params["session"])
        runs = [run.id for run in self._storage.list_runs() if run.session == session.id]
        return JSONResponse(
            {
                "training_run_ids": runs,
                "sampler_ids": [s.id for s in self._storage.list_samplers(session.id)],
                "user_metadata": session.metadata,
                "display_name": session.display_name,
            }
        )

    def _format_run(self, run: TrainingRun) -> dict[str, JsonValue]:
        saved = self._storage.list_checkpoints(run.id)
        newest = {kind: next((s for s in saved if s.kind == kind), None) for kind in KINDS}
        state, sampler = newest["weights"], newest["sampler_weights"]
        last = max([run.created, *(one.created for one in saved)])
        return {
            "training_run_id": run.id,
            "base_model": run.base_model,
            "model_owner": "local",
            "is_lora": True,
            "lora_rank": run.lora.rank,
            "last_request_time": _format_time(last),
            "last_checkpoint": self._format_checkpoint(state) if state else None,
            "last_sampler_checkpoint": self._format_checkpoint(sampler) if sampler else None,
            "user_metadata": run.metadata,
        }

    def _format_checkpoint(self, saved: Checkpoint) -> dict[str, JsonValue]:
        return {
            "checkpoint_id": f"{saved.kind}/{saved.name}",
            "checkpoint_type": KINDS[saved.kind],
            "time": _format_time(saved.created),
            "tinker_path": saved.path,
            "size_bytes": self._storage.measure(saved.path),
            "public": saved.public,
            "user_metadata": {**saved.metadata} if saved.metadata else None,
            "expires_at": _format_time(saved.expires) if saved.expires else None,
        }


def _select_page(
    request: Request, found: list[T], limit: int
) -> tuple[list[T], dict[str, JsonValue]]:
    try:
        limit = int(request.query_params.get("limit", limit))
        offset = int(request.query_params.get("offset", 0))
    except ValueError as error:
        raise RequestError("limit and offset must be integers") from error
    if limit < 0 or offset < 0:
        raise RequestError(f"limit and offset must be at least 0; found {limit} and {offset}")
    cursor: dict[str, JsonValue] = {"offset": offset, "limit": limit, "total_count": len(found)}
    return found[offset : offset + limit], cursor


def _read_path(request: Request) -> str:
    params = request.path_params
    return f"{SCHEME}{params['run']}/{params['kind']}/{params['name']}"


def _list_files(folder: Path) -> list[str]:
    files = [file.relative_to(folder) for file in folder.rglob("*") if file.is_file()]
    return sorted(str(file) for file in files if file.name != "checkpoint.json")


def _format_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
