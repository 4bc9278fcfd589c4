"""Endpoints of training runs: adapters, gradients, optimizer steps, checkpoints."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.app.tinker_server import codec
from whet.app.tinker_server.backend import Lora, TrainingRuns
from whet.app.tinker_server.encryption import encrypt_files, parse_recipients
from whet.app.tinker_server.futures import FutureResult
from whet.app.tinker_server.schemas import (
    Body,
    CreateModel,
    Load,
    OptimStep,
    RunRequest,
    Save,
    parse,
    read_body,
    read_json,
)
from whet.app.tinker_server.state import ServerState, create_id
from whet.app.tinker_server.storage import (
    SCHEME,
    Checkpoint,
    CheckpointKind,
    SamplingSession,
    TrainingRun,
)
from whet.errors import RequestError

B = TypeVar("B", bound=Body)


def build_training_routes(state: ServerState) -> list[Route]:
    """Build the routes."""
    endpoints = _Training(state)
    return [
        Route("/create_model", endpoints.create, methods=["POST"]),
        Route("/get_info", endpoints.read_info, methods=["POST"]),
        Route("/forward_backward", endpoints.forward_backward, methods=["POST"]),
        Route("/optim_step", endpoints.optim_step, methods=["POST"]),
        Route("/save_weights", endpoints.save, methods=["POST"]),
        Route("/save_weights_for_sampler", endpoints.save_for_sampler, methods=["POST"]),
        Route("/save_weights_external", endpoints.save_external, methods=["POST"]),
        Route("/load_weights", endpoints.load, methods=["POST"]),
    ]


class _Training:
    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def create(self, request: Request) -> Response:
        body = await read_json(request, CreateModel)
        state, id = self._state, f"{body.session_id}:train:{body.model_seq_id}"
        model = state.find_model(body.base_model)
        state.require_session(body.session_id)
        if body.lora_config is None:
            raise RequestError("this server trains LoRA adapters only: set lora_config")
        if body.optimizer_config.type != "adamw":
            raise RequestError(
                f"unsupported optimizer {body.optimizer_config.type!r}: expected adamw"
            )
        requested = body.lora_config
        lora = Lora.model_validate(requested.model_dump(exclude={"seed"}))
        if not (lora.train_unembed or lora.train_mlp or lora.train_attn):
            raise RequestError("set at least one of train_unembed, train_mlp, train_attn")
        run = TrainingRun(
            id=id,
            session=body.session_id,
            created=time.time(),
            base_model=model.samplers.served.name,
            lora=lora,
            metadata=body.user_metadata,
        )

        async def work() -> FutureResult:
            state.drop_inactive()
            await model.runs.create(id, lora, requested.seed)
            state.add_run(run)
            return {"model_id": id, "type": "create_model"}

        state.futures.start(id, work)
        return JSONResponse({"request_id": id, "model_id": id})

    async def read_info(self, request: Request) -> Response:
        run = self._state.find_run((await read_json(request, RunRequest)).model_id)
        served = self._state.find_model(run.base_model).samplers.served
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": run.id,
                "model_name": served.name,
                "is_lora": True,
                "lora_rank": run.lora.rank,
                "model_data": {"model_name": served.name, "tokenizer_id": served.name},
            }
        )

    async def forward_backward(self, request: Request) -> Response:
        encoding = request.headers.get("content-encoding", "")
        message = codec.parse_pass(await read_body(request), encoding)
        run = self._state.find_run(message.model_id)

        async def work() -> FutureResult:
            data, settings = codec.decode_data(message), codec.decode_settings(message)
            passed = await self._get_runs(run).forward_backward(
                run.id, data, message.loss_fn, settings, forward_only=message.forward_only
            )
            return codec.encode_pass(passed)

        return self._state.run_in_order(run.id, message.seq_id, work)

    async def optim_step(self, request: Request) -> Response:
        return await self._schedule_in_order(request, OptimStep, self._update)

    async def _update(self, run: TrainingRun, body: OptimStep) -> FutureResult:
        if body.adam_params is None:
            raise RequestError("this server supports AdamW only: set AdamParams")
        metrics = await self._get_runs(run).optim_step(run.id, body.adam_params.to_adam())
        return {"metrics": {**metrics}, "type": "optim_step"}

    async def save(self, request: Request) -> Response:
        return await self._schedule_in_order(request, Save, partial(self._save, "weights"))

    async def save_external(self, request: Request) -> Response:
        return await self._schedule_in_order(request, Save, partial(self._save, "external_weights"))

    async def save_for_sampler(self, request: Request) -> Response:
        return await self._schedule_in_order(request, Save, partial(self._save, "sampler_weights"))

    async def _save(self, kind: CheckpointKind, run: TrainingRun, body: Save) -> FutureResult:
        saved = await self._write(run, kind, body)
        reply_types = {
            "weights": "save_weights",
            "external_weights": "save_weights_external",
            "sampler_weights": "save_weights_for_sampler",
        }
        self._state.mark_used(saved)
        self._state.drop_unnamed(run.id)
        if not saved.ephemeral:
            return {"path": saved.path, "type": reply_types[kind]}
        sampler = SamplingSession(
            id=f"{run.session}:sample:{create_id()}",
            session=run.session,
            base_model=run.base_model,
            model_path=saved.path,
        )
        self._state.storage.save_sampler(sampler)
        return {"sampling_session_id": sampler.id, "type": reply_types[kind]}

    async def _write(self, run: TrainingRun, kind: CheckpointKind, body: Save) -> Checkpoint:
        storage = self._state.storage
        ephemeral = kind == "sampler_weights" and body.path is None
        if body.path is None and not ephemeral:
            raise RequestError("missing checkpoint name")
        saved = Checkpoint(
            run=run.id,
            kind=kind,
            name=create_id() if body.path is None else body.path,
            created=time.time(),
            base_model=run.base_model,
            lora=run.lora,
            expires=time.time() + body.ttl_seconds if body.ttl_seconds else None,
            ephemeral=ephemeral,
            metadata=body.user_metadata,
        )
        recipients = parse_recipients(body.age_encryption_recipients or ())
        if recipients and kind != "external_weights":
            raise RequestError("only exported weights can be encrypted: use save_weights_external")
        if storage.has_checkpoint(saved.path) and not body.overwrite:
            again = "pass overwrite=True or " if kind == "weights" else ""
            raise RequestError(f"the checkpoint {saved.path!r} exists: {again}choose another name")
        with storage.write(saved) as folder:
            await self._get_runs(run).save(run.id, folder, kind)
            if recipients:
                await to_thread.run_sync(encrypt_files, folder, recipients)
        return saved

    async def load(self, request: Request) -> Response:
        return await self._schedule_in_order(request, Load, self._load)

    async def _load(self, run: TrainingRun, body: Load) -> FutureResult:
        saved = self._state.storage.read_checkpoint(body.path)
        if saved.kind != "weights":
            raise RequestError(
                f"{body.path!r} holds sampler weights: training needs a path of save_state, "
                f"{SCHEME}RUN/weights/NAME"
            )
        if saved.base_model != run.base_model:
            raise RequestError(
                f"{body.path!r} was trained on {saved.base_model!r}, this run trains "
                f"{run.base_model!r}"
            )
        if saved.lora != run.lora:
            raise RequestError(
                f"{body.path!r} has adapters of rank {saved.lora.rank}, "
                f"this run {run.lora.rank}, or on other layers"
            )
        folder = self._state.storage.find_folder(body.path)
        await self._get_runs(run).load(run.id, folder, optimizer=body.optimizer)
        return {"path": body.path, "type": "load_weights"}

    def _get_runs(self, run: TrainingRun) -> TrainingRuns:
        return self._state.find_model(run.base_model).runs

    async def _schedule_in_order(
        self,
        request: Request,
        kind: type[B],
        work: Callable[[TrainingRun, B], Awaitable[FutureResult]],
    ) -> Response:
        """Schedule work on a run; its body is validated when it is its turn."""
        body = await read_body(request)
        run_request = parse(body, RunRequest)
        run = self._state.find_run(run_request.model_id)
        return self._state.run_in_order(
            run.id, run_request.seq_id, lambda: work(run, parse(body, kind))
        )
