"""A gateway in this process: a real store, the tiny model's template, scripted answers."""

import json
import shutil
import threading
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
import httpx
import pytest
from anyio.lowlevel import checkpoint
from starlette.types import ASGIApp

import whet
from whet.config import GatewayConfig
from whet.errors import EngineError, PromptTooLong, RequestError
from whet.gateway import auth
from whet.gateway.app import build_app
from whet.gateway.pipeline import CallPipeline
from whet.gateway.templates.chat_template import ChatTemplate
from whet.gateway.templates.renderer import Renderer
from whet.protocols import Engine
from whet.store.sqlite import SQLiteStore
from whet.types import Attempt, AttemptId, Call, Mode, Rollout, Sampling, TokenChunk

TINY = Path(whet.__file__).parent / "demos" / "tiny"
SECRET = b"0123456789abcdef"
MODEL = "policy"
CONTEXT = 4096

CALCULATOR = {
    "name": "calculator",
    "description": "Evaluate an expression.",
    "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
}
CHAT_TOOL: dict[str, Any] = {"type": "function", "function": CALCULATOR}
FLAT_TOOL = {"type": "function", "strict": True, **CALCULATOR}
CLAUDE_TOOL = {
    "name": "calculator",
    "description": "Evaluate an expression.",
    "input_schema": CALCULATOR["parameters"],
}
ARGUMENTS = '{"expression":   "2 + 3"}'
CALLING = f'<tool_call>\n{{"name": "calculator", "arguments": {ARGUMENTS}}}\n</tool_call>'
TWO_CALLS = f"{CALLING}\n{CALLING}"

Json = dict[str, Any]


class ScriptedEngine(Engine):
    """Engine with scripted answers, a token per chunk or all `at_once`; the last one repeats.

    An answer that is an error is raised. The last chunk waits for the `gate`, if there is one, and
    is the error of `breaks`, if there is one. Requests after the first wait for `next`.
    """

    def __init__(self, answers: Sequence[Sequence[int] | Exception]) -> None:
        self.script = deque(answers)
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.active = 0
        self.left = threading.Event()
        """Set once a request has ended."""
        self.gate: anyio.Event | None = None
        self.next: anyio.Event | None = None
        self.breaks: Exception | None = None
        self.at_once = False
        self.vocabulary = 1280

    async def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        *,
        stream: bool = False,
        affinity: str = "",
    ) -> AsyncGenerator[TokenChunk]:
        if not 0 < len(prompt) < CONTEXT:
            raise PromptTooLong(f"the prompt has {len(prompt)} tokens")
        if max(prompt) >= self.vocabulary:
            raise RequestError("the prompt has ids outside the vocabulary")
        if self.next is not None and self.prompts:
            await self.next.wait()
        self.prompts.append(list(prompt))
        self.samplings.append(sampling)
        answer = self.script.popleft() if len(self.script) > 1 else self.script[0]
        if isinstance(answer, Exception):
            raise answer
        ids = list(answer)[: sampling.max_tokens]
        stop = "stop" if len(ids) == len(answer) else "length"
        top = tuple((id, -1.0) for id in range(sampling.top_logprobs))
        self.active += 1
        try:
            singly = stream and not self.at_once
            for at in range(len(ids)) if singly else [0]:
                if not self.at_once:
                    await checkpoint()
                part = ids[at : at + 1] if singly else ids
                last = not singly or at == len(ids) - 1
                if self.gate is not None and last:
                    await self.gate.wait()
                if self.breaks is not None and last:
                    raise self.breaks
                yield TokenChunk(
                    tuple(part),
                    (-0.5,) * len(part),
                    (0,) * len(part),
                    (top,) * len(part) if top else (),
                    stop=stop if last else None,
                )
        finally:
            self.active -= 1
            self.left.set()

    async def close(self) -> None:
        pass


class WatchedStore(SQLiteStore):
    """A store with a hook before a call is written."""

    before_append: Callable[[], Awaitable[None]] | None = None

    async def append(self, call: Call) -> None:
        if self.before_append is not None:
            await self.before_append()
        await super().append(call)


@dataclass
class Gateway:
    """A gateway and one attempt that calls it."""

    store: WatchedStore
    renderer: Renderer
    engine: ScriptedEngine
    attempt: Attempt
    config: GatewayConfig = field(default_factory=GatewayConfig)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Drop all state in memory."""
        pipeline = CallPipeline(
            engine=self.engine,
            log=self.store,
            renderer=self.renderer,
            models=(MODEL, "claude-stub"),
            context_length=CONTEXT,
        )
        self.serve(build_app(pipeline, SECRET, self.config))

    def serve(self, app: ASGIApp) -> None:
        """Send the requests to this app from now on."""
        self.app = app
        self.client = httpx.AsyncClient(
            transport=httpx.ASGITransport(self.app, raise_app_exceptions=False),
            base_url="http://gateway",
            timeout=10,
        )

    @property
    def key(self) -> str:
        return auth.mint_key(self.attempt.id, SECRET)

    @property
    def reward_key(self) -> str:
        """The `authorization` of whoever posts rewards."""
        return f"Bearer {auth.mint_reward_key(self.attempt.id, SECRET)}"

    @property
    def gateway_key(self) -> str:
        return auth.mint_key(auth.ANY_ATTEMPT, SECRET)

    async def send(
        self, method: str, path: str, body: Json | bytes | None = None, **headers: str
    ) -> httpx.Response:
        content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.client.request(
            method,
            path,
            content=content,
            headers={"authorization": f"Bearer {self.key}"} | names,
        )

    async def post(self, path: str, body: Json | bytes, **headers: str) -> Json:
        response = await self.send("POST", path, body, **headers)
        assert response.status_code == 200, response.text
        return cast(Json, response.json())

    async def events(self, path: str, body: Json, **headers: str) -> list[Json]:
        response = await self.send("POST", path, body | {"stream": True}, **headers)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return read_events(response.text)

    async def calls(self) -> list[Call]:
        return await self.store.calls(self.attempt.id)

    def text(self, ids: Sequence[int]) -> str:
        return self.renderer.template.decode_all(ids)


def read_events(text: str) -> list[Json]:
    """The JSON events of a stream; `[DONE]` and comments are left out."""
    lines = [line for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


@pytest.fixture(scope="session")
def renderer() -> Renderer:
    return Renderer(ChatTemplate(TINY))


@pytest.fixture(scope="session")
def thinking_renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    """The tiny model with reasoning between marks."""
    folder = tmp_path_factory.mktemp("models") / "thinking"
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "chat_template.jinja"
    plain = "'<|im_start|>' + message.role + '\\n' + text(message.content)"
    thought = (
        "'<|im_start|>' + message.role + '\\n' + ("
        "'<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' "
        "if message.reasoning_content else '') + text(message.content)"
    )
    assert plain in file.read_text()
    file.write_text(file.read_text().replace(plain, thought))
    return Renderer(ChatTemplate(folder))


NewGateway = Callable[..., Awaitable[Gateway]]


@pytest.fixture
async def new_gateway(tmp_path: Path, renderer: Renderer) -> AsyncGenerator[NewGateway]:
    """Builds a gateway whose model gives these answers, each closed as the template closes it."""
    store = WatchedStore(tmp_path / "store.db")
    made: list[Gateway] = []

    async def build(
        *answers: str | Exception | list[int],
        renderer: Renderer = renderer,
        mode: Mode = Mode.TRAIN,
        **config: Any,
    ) -> Gateway:
        assert renderer.end_of_turn_id is not None
        script: list[list[int] | Exception] = []
        for answer in answers or ("hello there",):
            if isinstance(answer, str):
                script.append([*renderer.template.encode(answer), renderer.end_of_turn_id])
            else:
                script.append(answer)
        id = f"r{len(made)}"
        await store.enqueue([Rollout(id=id, task={}, group="g", mode=mode)])
        attempt = await store.claim("worker", lease_s=600, wait_s=0)
        assert attempt is not None
        engine = ScriptedEngine(script)
        engine.vocabulary = max(engine.vocabulary, 1 + max(renderer.template.added_ids))
        made.append(Gateway(store, renderer, engine, attempt, GatewayConfig(**config)))
        return made[-1]

    with anyio.fail_after(60):
        yield build
        for gateway in made:
            await gateway.client.aclose()
        await store.close()


@pytest.fixture
async def gateway(new_gateway: NewGateway) -> Gateway:
    return await new_gateway()


def attempt_path(gateway: Gateway) -> str:
    return f"/rollout/{gateway.attempt.rollout.id}/attempt/{gateway.attempt.id}"


def other_key(attempt: str) -> str:
    return auth.mint_key(AttemptId(attempt), SECRET)


FAILS = EngineError("the device is on fire")
