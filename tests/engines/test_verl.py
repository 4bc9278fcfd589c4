"""The engine on verl's client: the requests it sends, and how it reads the replies."""

from types import SimpleNamespace
from typing import Any

import pytest

from support.models.tiny_llama import CONTEXT, VOCABULARY, ask, decode, prompt_of
from whet.engines.fake import FakeEngine
from whet.engines.verl import VerlEngine
from whet.errors import EngineError, PromptTooLong, RequestError
from whet.types import Sampling

pytestmark = pytest.mark.anyio

PROMPT = prompt_of(20)


class Client:
    """verl's client, on the fake engine; it notes its requests."""

    def __init__(self, **output: Any) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self._engine = FakeEngine(decode=decode, vocabulary=VOCABULARY, context_length=CONTEXT)
        self._output = output

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any:
        self.requests.append((request_id, dict(sampling_params)))
        sampling = Sampling(
            temperature=sampling_params["temperature"],
            max_tokens=sampling_params["max_tokens"],
            stop_ids=tuple(sampling_params["stop_token_ids"]),
            seed=sampling_params.get("seed"),
        )
        [chunk] = [c async for c in self._engine.generate(prompt_ids, sampling)]
        output = {
            "token_ids": list(chunk.tokens),
            "log_probs": list(chunk.logprobs),
            "stop_reason": "completed",
            "extra_fields": {"min_global_steps": 3, "max_global_steps": 4},
        }
        return SimpleNamespace(**(output | self._output))


def open_engine(client: Client) -> VerlEngine:
    return VerlEngine(client, decode, context_length=CONTEXT)


async def test_ids_go_in_and_ids_logprobs_and_versions_come_out() -> None:
    client = Client()
    answer = await ask(open_engine(client), PROMPT, max_tokens=9)
    assert len(answer.tokens) == len(answer.logprobs) == 9
    assert answer.stop == "length"
    assert answer.versions == (3, *[4] * 8), "the bounds of what is known"
    [(_, sent)] = client.requests
    assert sent["logprobs"] is True
    assert sent["top_k"] == -1


async def test_a_server_without_versions_samples_with_those_of_the_run() -> None:
    engine = open_engine(Client(extra_fields={}))
    engine.version = 11
    assert (await ask(engine, PROMPT, max_tokens=3)).versions == (11, 11, 11)


async def test_stop_ids_and_stop_strings_end_it_and_stay() -> None:
    engine = open_engine(Client())
    free = await ask(engine, PROMPT, seed=2, max_tokens=20)
    stop = free.tokens[5]
    stopped = await ask(engine, PROMPT, seed=2, max_tokens=20, stop_ids=[stop])
    assert stopped.tokens == free.tokens[: free.tokens.index(stop) + 1]
    text = decode(free.tokens)
    cut = await ask(engine, PROMPT, seed=2, max_tokens=20, stop=[text[4:7]])
    assert decode(cut.tokens) == text[: text.index(text[4:7]) + 3]
    assert (stopped.stop, cut.stop) == ("stop", "stop")


async def test_without_a_limit_it_fills_the_context() -> None:
    answer = await ask(open_engine(Client()), prompt_of(CONTEXT - 10))
    assert (len(answer.tokens), answer.stop) == (10, "length")
    with pytest.raises(PromptTooLong):
        await ask(open_engine(Client()), prompt_of(CONTEXT))


async def test_a_conversation_keeps_to_one_server() -> None:
    client = Client()
    engine = open_engine(client)
    sampling = Sampling(max_tokens=1)
    for affinity in ("a", "a", ""):
        _ = [chunk async for chunk in engine.generate(PROMPT, sampling, affinity=affinity)]
    names = [name for name, _ in client.requests]
    assert names[:2] == ["a", "a"]
    assert names[2] not in ("", "a")


async def test_what_verl_cannot_do_is_refused() -> None:
    engine = open_engine(Client())
    with pytest.raises(RequestError, match="grammars"):
        await ask(engine, PROMPT, grammar="start: /[0-9]+/")
    with pytest.raises(RequestError, match="top log-probabilities"):
        await ask(engine, PROMPT, top_logprobs=2)


@pytest.mark.parametrize(
    "output", [{"stop_reason": "aborted"}, {"log_probs": None}, {"token_ids": [], "log_probs": []}]
)
async def test_an_incomplete_reply_is_an_error_that_may_be_retried(output: dict[str, Any]) -> None:
    with pytest.raises(EngineError):
        await ask(open_engine(Client(**output)), PROMPT, max_tokens=3)


async def test_a_closed_engine_refuses_and_fails_what_is_in_flight() -> None:
    class ClosingClient(Client):
        async def generate(self, request_id: str, **request: Any) -> Any:
            output = await super().generate(request_id, **request)
            await engine.close()
            return output

    engine = open_engine(ClosingClient())
    with pytest.raises(EngineError, match="was closed"):
        await ask(engine, PROMPT, max_tokens=3)
    with pytest.raises(EngineError, match="is closed"):
        await ask(engine, PROMPT)
