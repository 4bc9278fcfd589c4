"""Endpoints that train: adapters, gradients, steps, and what is saved of them."""

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whet.errors import RequestError
from whet.tinker_server import wire
from whet.tinker_server.context import Context, new_id
from whet.tinker_server.promises import Reply
from whet.tinker_server.records import SCHEME, Checkpoint, Kind, Run, Sampler
from whet.tinker_server.requests import (
    Body,
    CreateModel,
    Load,
    OfModel,
    OptimStep,
    Save,
    parse,
    read,
    whole,
)
from whet.tinker_server.workshop import Lora

B = TypeVar("B", bound=Body)


def training_routes(context: Context) -> list[Route]:
    """The routes."""
    endpoints = _Training(context)
    return [
        Route("/create_model", endpoints.create, methods=["POST"]),
        Route("/get_info", endpoints.info, methods=["POST"]),
        Route("/forward_backward", endpoints.forward_backward, methods=["POST"]),
        Route("/optim_step", endpoints.optim_step, methods=["POST"]),
        Route("/save_weights", endpoints.save, methods=["POST"]),
        Route("/save_weights_for_sampler", endpoints.save_for_sampler, methods=["POST"]),
        Route("/save_weights_external", endpoints.save_external, methods=["POST"]),
        Route("/load_weights", endpoints.load, methods=["POST"]),
    ]


class _Training:
    def __init__(self, context: Context) -> None:
        self._context = context

    async def create(self, request: Request) -> Response:
        body = await read(request, CreateModel)
        context, id = self._context, f"{body.session_id}:train:{body.model_seq_id}"
        context.refuse_other_models(body.base_model)
        context.require_session(body.session_id)
        if body.lora_config is None:
            raise RequestError("this server trains LoRA adapters alone: give a lora_config")
        if body.optimizer_config.type != "adamw":
            raise RequestError(f"this server has AdamW alone, not {body.optimizer_config.type!r}")
        wanted = body.lora_config
        lora = Lora.model_validate(wanted.model_dump(exclude={"seed"}))
        if not (lora.train_unembed or lora.train_mlp or lora.train_attn):
            raise RequestError("one of train_unembed, train_mlp and train_attn has to be true")
        run = Run(
            id=id,
            session=body.session_id,
            created=time.time(),
            base_model=context.samplers.served.name,
            lora=lora,
            metadata=body.user_metadata,
        )

        async def work() -> Reply:
            context.forget_silent()
            await context.runs.create(id, lora, wanted.seed)
            context.add_run(run)
            return {"model_id": id, "type": "create_model"}

        context.promises.make(id, work)
        return JSONResponse({"request_id": id, "model_id": id})

    async def info(self, request: Request) -> Response:
        run = self._context.run((await read(request, OfModel)).model_id)
        served = self._context.samplers.served
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
        asked = wire.parse_pass(await whole(request), encoding)
        run = self._context.run(asked.model_id)

        async def work() -> Reply:
            data, settings = wire.examples(asked), wire.settings(asked)
            passed = await self._context.runs.forward_backward(
                run.id, data, asked.loss_fn, settings, forward_only=asked.forward_only
            )
            return wire.encode_pass(passed)

        return self._context.in_order(run.id, asked.seq_id, work)

    async def optim_step(self, request: Request) -> Response:
        return await self._numbered(request, OptimStep, self._step)

    async def _step(self, run: Run, body: OptimStep) -> Reply:
        if body.adam_params is None:
            raise RequestError("this server has AdamW alone: give AdamParams")
        metrics = await self._context.runs.optim_step(run.id, body.adam_params.adam())
        return {"metrics": {**metrics}, "type": "optim_step"}

    async def save(self, request: Request) -> Response:
        return await self._numbered(request, Save, partial(self._save, "weights"))

    async def save_external(self, request: Request) -> Response:
        return await self._numbered(request, Save, partial(self._save, "external_weights"))

    async def save_for_sampler(self, request: Request) -> Response:
        return await self._numbered(request, Save, partial(self._save, "sampler_weights"))

    async def _save(self, kind: Kind, run: Run, body: Save) -> Reply:
        if body.age_encryption_recipients:
            raise RequestError("this server does not encrypt: leave out the recipients")
        saved = await self._write(run, kind, body)
        named = {
            "weights": "save_weights",
            "external_weights": "save_weights_external",
            "sampler_weights": "save_weights_for_sampler",
        }
        if not saved.ephemeral:
            return {"path": saved.path, "type": named[kind]}
        sampler = Sampler(
            id=f"{run.session}:sample:{new_id()}",
            session=run.session,
            base_model=run.base_model,
            model_path=saved.path,
        )
        self._context.records.keep_sampler(sampler)
        return {"sampling_session_id": sampler.id, "type": named[kind]}

    async def _write(self, run: Run, kind: Kind, body: Save) -> Checkpoint:
        records = self._context.records
        ephemeral = kind == "sampler_weights" and body.path is None
        if body.path is None and not ephemeral:
            raise RequestError("give the checkpoint a name")
        saved = Checkpoint(
            run=run.id,
            kind=kind,
            name=new_id() if body.path is None else body.path,
            created=time.time(),
            base_model=run.base_model,
            lora=run.lora,
            expires=time.time() + body.ttl_seconds if body.ttl_seconds else None,
            ephemeral=ephemeral,
            metadata=body.user_metadata,
        )
        if records.folder(saved.path).exists() and not body.overwrite:
            again = "pass overwrite=True or " if kind == "weights" else ""
            raise RequestError(f"there is a checkpoint {saved.path!r}: {again}choose another name")
        with records.keeping(saved) as folder:
            await self._context.runs.save(run.id, folder, kind)
        return saved

    async def load(self, request: Request) -> Response:
        return await self._numbered(request, Load, self._load)

    async def _load(self, run: Run, body: Load) -> Reply:
        saved = self._context.records.checkpoint(body.path)
        if saved.kind != "weights":
            raise RequestError(
                f"{body.path!r} is for samplers; what save_state gave, "
                f"{SCHEME}RUN/weights/NAME, can be trained on"
            )
        if saved.lora != run.lora:
            raise RequestError(
                f"{body.path!r} has adapters of rank {saved.lora.rank}, "
                f"this run {run.lora.rank}, or on other layers"
            )
        folder = self._context.records.folder(body.path)
        await self._context.runs.load(run.id, folder, optimizer=body.optimizer)
        return {"path": body.path, "type": "load_weights"}

    async def _numbered(
        self, request: Request, kind: type[B], work: Callable[[Run, B], Awaitable[Reply]]
    ) -> Response:
        """Promise work on a run; its body is read when it is its turn."""
        said = await whole(request)
        place = parse(said, OfModel)
        run = self._context.run(place.model_id)
        return self._context.in_order(run.id, place.seq_id, lambda: work(run, parse(said, kind)))
