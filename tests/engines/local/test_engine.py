"""The local engine: samples, log-probabilities, batches and shared prefixes."""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from anyio import CapacityLimiter, to_thread
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

from support.models.tiny_llama import (
    VOCABULARY,
    Answer,
    HandMade,
    ask,
    decode,
    load,
    make_model,
    nudge,
    plain_logprobs,
    prompt_of,
)
from whet.config import LocalEngineConfig
from whet.engines.local.batch import KVCache
from whet.engines.local.engine import LocalEngine
from whet.engines.local.forward import (
    CudaGraphForward,
    EagerForward,
    Forward,
    Ids,
    build_forward,
)
from whet.errors import EngineError
from whet.models.huggingface import LocalPolicy
from whet.types import Sampling

pytestmark = pytest.mark.anyio

EXACT = 1e-4
"""The sampler's log-probabilities against a forward pass without a cache, in fp32."""


Ways = Callable[[LocalPolicy, int], Forward]
WAYS: dict[LocalPolicy, Ways] = {}
"""How the models of some policies are run; the others as they are."""


@pytest.fixture(params=[build_forward, CudaGraphForward])
def policy(tiny_folder: Path, request: pytest.FixtureRequest) -> Iterator[LocalPolicy]:
    policy = load(tiny_folder)
    nudge(policy)  # B is zero in a fresh LoRA: then it would not be tested
    WAYS[policy] = request.param
    yield policy
    del WAYS[policy]


@asynccontextmanager
async def started(policy: LocalPolicy, kv_tokens: int = 16_384) -> AsyncGenerator[LocalEngine]:
    config = LocalEngineConfig(kv_tokens=kv_tokens)
    forward = WAYS.get(policy, build_forward)
    engine = LocalEngine(policy, config, decode, threads=1, forward=forward)
    with anyio.fail_after(60):
        try:
            yield engine
        finally:
            await engine.close()


async def together(jobs: Sequence[Callable[[], Awaitable[Answer]]]) -> list[Answer]:
    answers: dict[int, Answer] = {}

    async def one(index: int) -> None:
        answers[index] = await jobs[index]()

    async with anyio.create_task_group() as tasks:
        for index in range(len(jobs)):
            tasks.start_soon(one, index)
    return [answers[index] for index in range(len(jobs))]


def all_of(
    engine: LocalEngine, prompts: Sequence[Sequence[int]], **sampling: Any
) -> Awaitable[list[Answer]]:
    return together([lambda p=p: ask(engine, p, **sampling) for p in prompts])


async def test_logprobs_are_those_of_a_plain_forward_pass(policy: LocalPolicy) -> None:
    dice = random.Random(0)
    requests = [
        (
            prompt_of(dice.randint(1, 120), seed=index),
            Sampling(
                temperature=dice.choice([0, 0.5, 1, 1.7]),
                top_k=dice.choice([0, 0, 7]),
                top_p=dice.choice([1, 1, 0.8]),
                max_tokens=dice.randint(1, 30),
                seed=index,
            ),
        )
        for index in range(40)
    ]
    async with started(policy) as engine:
        answers = await together(
            [lambda p=p, s=s: ask(engine, p, **s.model_dump()) for p, s in requests]
        )
    for (prompt, sampling), answer in zip(requests, answers, strict=True):
        expected = plain_logprobs(policy, prompt, answer.tokens, sampling)
        assert answer.logprobs == pytest.approx(expected, abs=EXACT)


async def test_greedy_is_the_argmax_of_the_logits(policy: LocalPolicy) -> None:
    prompt = prompt_of(30)
    async with started(policy) as engine:
        answer = await ask(engine, prompt, temperature=0, max_tokens=20)
    with torch.inference_mode():
        logits_TV = policy.model(input_ids=torch.tensor([[*prompt, *answer.tokens]])).logits[0]
    assert answer.tokens == tuple(logits_TV[29:-1].argmax(dim=-1).tolist())


async def test_a_seed_gives_the_same_whatever_else_is_in_the_batch(policy: LocalPolicy) -> None:
    prompts = [prompt_of(10 + 3 * index, seed=index) for index in range(12)]
    async with started(policy) as engine:
        alone = [await ask(engine, prompt, seed=4, max_tokens=15) for prompt in prompts]
    async with started(policy) as engine:
        among = await all_of(engine, prompts, seed=4, max_tokens=15)
    assert [answer.tokens for answer in alone] == [answer.tokens for answer in among]


async def test_closing_a_generator_frees_its_row(policy: LocalPolicy) -> None:
    async with started(policy) as engine:
        left = engine.generate(prompt_of(20), Sampling(), stream=True)
        await anext(left)
        assert engine.active == 1
        await left.aclose()
        await ask(engine, prompt_of(10), max_tokens=1)
        assert engine.active == 0


async def test_tokens_sampled_while_the_reader_waits_are_one_chunk(policy: LocalPolicy) -> None:
    async with started(policy) as engine:
        chunks = engine.generate(prompt_of(20), Sampling(max_tokens=30), stream=True)
        first = await anext(chunks)
        while engine.active:  # noqa: ASYNC110 - the engine is another thread
            await anyio.sleep(0.01)
        await ask(engine, prompt_of(10), max_tokens=1)  # the pass after the last one
        [rest] = [chunk async for chunk in chunks]
        assert len(first.tokens) + len(rest.tokens) == 30
        assert len(rest.tokens) == len(rest.logprobs) == len(rest.versions)
        assert rest.stop == "length"


async def test_tokens_come_before_the_fault_that_ended_them(policy: LocalPolicy) -> None:
    async with started(policy) as engine:
        chunks = engine.generate(prompt_of(20), Sampling(), stream=True)
        await anext(chunks)
        prompts = [prompt_of(20, seed=seed) for seed in range(3)]
        await all_of(engine, prompts, max_tokens=3)  # meanwhile it goes on
        await engine.close()
        assert (await anext(chunks)).stop is None
        with pytest.raises(EngineError, match="closed"):
            await anext(chunks)


async def test_a_request_that_waits_may_be_closed(policy: LocalPolicy) -> None:
    async with started(policy, kv_tokens=1024) as engine:
        long = [engine.generate(prompt_of(300, seed=i), Sampling(), stream=True) for i in range(2)]
        for chunks in long:
            await anext(chunks)
        with anyio.move_on_after(0.05):  # there is room for two, so this one only waits
            await ask(engine, prompt_of(300, seed=9), max_tokens=1)
        for chunks in long:
            await chunks.aclose()
        assert (await ask(engine, prompt_of(300, seed=3), max_tokens=1)).stop == "length"
        assert engine.active == 0


async def test_preemption_does_not_change_samples(policy: LocalPolicy) -> None:
    prompts = [prompt_of(50, seed=index) for index in range(12)]
    async with started(policy) as roomy:
        expected = await all_of(roomy, prompts, temperature=0, max_tokens=40)
        assert roomy.prefilled == 12 * 49
    async with started(policy, kv_tokens=1024) as tight:
        answers = await all_of(tight, prompts, temperature=0, max_tokens=40)
        assert tight.prefilled > 12 * 49, "no request was preempted"
    assert [a.tokens for a in answers] == [a.tokens for a in expected]
    for answer, other in zip(answers, expected, strict=True):
        assert answer.logprobs == pytest.approx(other.logprobs, abs=EXACT)


async def test_one_long_request_does_not_narrow_the_batch_for_good(policy: LocalPolicy) -> None:
    async with started(policy, kv_tokens=1024) as engine:
        await ask(engine, prompt_of(400), max_tokens=2)
        streams = [
            engine.generate(prompt_of(20, seed=index), Sampling(max_tokens=30), stream=True)
            for index in range(10)
        ]
        async with anyio.create_task_group() as tasks:
            for stream in streams:
                tasks.start_soon(anext, stream)
        assert engine.active == 10
        for stream in streams:
            await stream.aclose()


async def test_the_next_turn_prefills_only_new_tokens(policy: LocalPolicy) -> None:
    async with started(policy) as engine:
        first = prompt_of(40)
        answer = await ask(engine, first, max_tokens=8)
        assert engine.prefilled == 39
        second = [*first, *answer.tokens, *prompt_of(5, seed=1)]
        again = await ask(engine, second, max_tokens=8)
        # The last sampled token was never run, and the last of the prompt is the first step.
        assert engine.prefilled == 39 + 1 + 4
    expected = plain_logprobs(policy, second, again.tokens, Sampling())
    assert again.logprobs == pytest.approx(expected, abs=EXACT)


async def test_equal_prompts_are_prefilled_once(policy: LocalPolicy) -> None:
    prompt = prompt_of(60)
    async with started(policy) as engine:
        answers = await all_of(engine, [prompt] * 8, max_tokens=6)
        assert engine.prefilled == 59
    for answer in answers:
        expected = plain_logprobs(policy, prompt, answer.tokens, Sampling())
        assert answer.logprobs == pytest.approx(expected, abs=EXACT)


async def test_requests_beside_running_rows_share_the_passes_of_their_prefills(
    tiny_folder: Path,
) -> None:
    policy, gaps = load(tiny_folder), list[int]()

    class Counting(CudaGraphForward):
        steps = 0

        def prefill(self, rows: Sequence[int], new_ids: Sequence[Sequence[int]]) -> None:
            if engine.active > len(rows):  # else nothing is running
                gaps.append(self.steps)
            self.steps = 0
            super().prefill(rows, new_ids)

        def step(self, token_B: Ids) -> Tensor:
            self.steps += 1
            return super().step(token_B)

    WAYS[policy] = Counting
    async with started(policy) as engine:
        running = engine.generate(prompt_of(20), Sampling(max_tokens=200), stream=True)
        await anext(running)
        for n in range(8):
            prompt = prompt_of(12, seed=n)
            answer = await ask(engine, prompt, max_tokens=1)
            expected = plain_logprobs(policy, prompt, answer.tokens, Sampling())
            assert answer.logprobs == pytest.approx(expected, abs=EXACT)
        await running.aclose()
    del WAYS[policy]
    assert gaps
    assert min(gaps) >= CudaGraphForward.steps_per_prefill


async def test_a_branch_shares_only_the_equal_prefix(policy: LocalPolicy) -> None:
    stem = prompt_of(50)
    branches = [[*stem, *prompt_of(10, seed=index)] for index in range(1, 4)]
    async with started(policy) as engine:
        for branch in branches:
            answer = await ask(engine, branch, max_tokens=5)
            expected = plain_logprobs(policy, branch, answer.tokens, Sampling())
            assert answer.logprobs == pytest.approx(expected, abs=EXACT)
        assert engine.prefilled == 59 + 9 + 9


async def test_a_prompt_longer_than_one_prefill_pass(tmp_path: Path) -> None:
    policy = load(make_model(tmp_path / "long", context=8192, layers=1))
    prompt = prompt_of(EagerForward.prefill_tokens + 500)
    async with started(policy) as engine:
        answer = await ask(engine, prompt, max_tokens=2)
        assert engine.prefilled == len(prompt) - 1
    expected = plain_logprobs(policy, prompt, answer.tokens, Sampling())
    assert answer.logprobs == pytest.approx(expected, abs=EXACT)


def check_each_version(
    copies: dict[int, nn.Module], prompt: Sequence[int], answer: Answer, sampling: Sampling
) -> None:
    for version in set(answer.versions):
        expected = plain_logprobs(HandMade(copies[version]), prompt, answer.tokens, sampling)
        for got, want, of in zip(answer.logprobs, expected, answer.versions, strict=True):
            if of == version:
                # Of large random weights: rounding is coarser, another version is far off.
                assert got == pytest.approx(want, abs=10 * EXACT)


async def test_a_token_is_of_its_reported_version(policy: LocalPolicy) -> None:
    copies = {policy.version: deepcopy(policy.model)}
    one_at_a_time = CapacityLimiter(1)

    def change() -> None:
        nudge(policy, seed=policy.version, size=0.1)
        copies[policy.version] = deepcopy(policy.model)

    async def watched(engine: LocalEngine, prompt: Sequence[int]) -> Answer:
        answer = Answer()
        async for chunk in engine.generate(prompt, Sampling(max_tokens=40), stream=True):
            answer.tokens += chunk.tokens
            answer.logprobs += chunk.logprobs
            answer.versions += chunk.versions
            if len(answer.tokens) in (5, 11):
                # An engine that never lets go of the weights would hang here.
                await to_thread.run_sync(change, limiter=one_at_a_time)
        return answer

    prompts = [prompt_of(20 + index, seed=index) for index in range(3)]
    async with started(policy) as engine:
        answers = await together([lambda p=p: watched(engine, p) for p in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(set(answer.versions)) > 1
        assert list(answer.versions) == sorted(answer.versions)
        check_each_version(copies, prompt, answer, Sampling())


async def test_a_cache_outlives_no_change_of_weights_whatever_their_version(
    policy: LocalPolicy,
) -> None:
    prompt = prompt_of(40)
    async with started(policy) as engine:
        await ask(engine, prompt, max_tokens=3)
        version = policy.version
        nudge(policy, seed=7)
        policy.version = version  # as restoring another checkpoint of the same version would
        answer = await ask(engine, prompt, max_tokens=3)
    expected = plain_logprobs(policy, prompt, answer.tokens, Sampling())
    assert answer.logprobs == pytest.approx(expected, abs=EXACT)


async def test_under_every_kind_of_pressure_at_once_logprobs_stay_exact(
    policy: LocalPolicy,
) -> None:
    dice = random.Random(3)
    copies = {policy.version: deepcopy(policy.model)}
    stems = [prompt_of(n, seed=n) for n in (10, 33, 64)]
    records: list[tuple[list[int], Answer, Sampling]] = []

    def change() -> None:
        nudge(policy, seed=policy.version, size=0.1)
        copies[policy.version] = deepcopy(policy.model)

    async def one(index: int) -> None:
        prompt = [*dice.choice(stems), *prompt_of(dice.randint(0, 30), seed=index)]
        sampling = Sampling(
            temperature=dice.choice([0, 1, 1.5]), max_tokens=dice.randint(1, 70), seed=index
        )
        leaves_after = dice.choice([None, None, 3])
        answer = Answer()
        stream = engine.generate(prompt, sampling, stream=True)
        async for chunk in stream:
            answer.tokens += chunk.tokens
            answer.logprobs += chunk.logprobs
            answer.versions += chunk.versions
            if len(answer.tokens) == leaves_after:
                break
        await stream.aclose()
        records.append((prompt, answer, sampling))

    async with started(policy, kv_tokens=1024) as engine:
        for wave in range(3):
            async with anyio.create_task_group() as tasks:
                for index in range(10):
                    tasks.start_soon(one, 100 * wave + index)
                if wave:
                    await to_thread.run_sync(change)
    for prompt, answer, sampling in records:
        check_each_version(copies, prompt, answer, sampling)


class Moody(nn.Module):
    """A model that fails, or returns NaN, on demand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model
        self.mood = "well"

    def forward(self, **inputs: object) -> CausalLMOutputWithPast:
        if self.mood == "raises":
            raise RuntimeError("out of memory")
        output: CausalLMOutputWithPast = self.inner(**inputs)
        if self.mood == "nan":
            assert output.logits is not None
            output.logits = torch.full_like(output.logits, float("nan"))  # pyright: ignore[reportAttributeAccessIssue]  # a tensor is one
        return output


@pytest.mark.parametrize(("mood", "says"), [("raises", "out of memory"), ("nan", "not finite")])
async def test_a_failing_model_fails_its_requests_and_the_engine_lives_on(
    policy: LocalPolicy, mood: str, says: str
) -> None:
    moody = Moody(policy.model)
    prompts = [prompt_of(30, seed=index) for index in range(3)]
    failed: list[str] = []

    async def one(prompt: Sequence[int]) -> None:
        with pytest.raises(EngineError, match=says) as caught:
            await ask(engine, prompt, max_tokens=4)
        failed.append(str(caught.value))

    async with started(HandMade(moody)) as engine:
        before = await ask(engine, prompts[0], temperature=0, max_tokens=4)
        moody.mood = mood
        async with anyio.create_task_group() as tasks:
            for prompt in prompts:
                tasks.start_soon(one, prompt)
        moody.mood = "well"
        after = await ask(engine, prompts[0], temperature=0, max_tokens=4)
    assert len(failed) == 3
    assert after.tokens == before.tokens


class Cramped(KVCache):
    """A cache that finds no memory, once."""

    failed = False

    def resize(self, rows: int, capacity: int) -> None:
        if not self.failed:
            self.failed = True
            raise RuntimeError("out of memory")
        super().resize(rows, capacity)


def cramped(policy: LocalPolicy, positions: int) -> Forward:
    forward = EagerForward(policy)
    forward.cache = Cramped()
    return forward


async def test_a_request_that_runs_out_of_memory_gets_an_error(tiny_folder: Path) -> None:
    engine = LocalEngine(load(tiny_folder), LocalEngineConfig(), decode, threads=1, forward=cramped)
    with anyio.fail_after(30):
        with pytest.raises(EngineError, match="out of memory"):
            await ask(engine, prompt_of(20), max_tokens=2)
        assert (await ask(engine, prompt_of(20), max_tokens=2)).stop == "length"
        await engine.close()


class Lost(Cramped):
    """A cache on a GPU that fails, and from then on does nothing."""

    def clear(self) -> None:
        raise RuntimeError("the GPU is lost")


def lost(policy: LocalPolicy, positions: int) -> Forward:
    forward = EagerForward(policy)
    forward.cache = Lost()
    return forward


async def test_an_engine_that_cannot_go_on_fails_its_requests_and_later_ones(
    tiny_folder: Path,
) -> None:
    engine = LocalEngine(load(tiny_folder), LocalEngineConfig(), decode, threads=1, forward=lost)
    with anyio.fail_after(30):
        with pytest.raises(EngineError, match="out of memory"):
            await ask(engine, prompt_of(20), max_tokens=2)
        for _ in range(2):
            with pytest.raises(EngineError, match=r"the engine stopped: .*the GPU is lost"):
                await ask(engine, prompt_of(20), max_tokens=2)
        await engine.close()


async def test_weights_that_were_no_numbers_leave_nothing_behind(policy: LocalPolicy) -> None:
    prompt = prompt_of(30)
    async with started(policy) as engine:
        stream = engine.generate(prompt, Sampling(), stream=True)
        await anext(stream)
        good = {name: value.detach().clone() for name, value in policy.get_trainable().items()}
        with policy.update(9), torch.no_grad():
            for parameter in policy.get_trainable().values():
                parameter.fill_(float("nan"))
        with pytest.raises(EngineError, match="not finite"):
            async for _ in stream:
                pass
        with policy.update(10), torch.no_grad():
            for name, parameter in policy.get_trainable().items():
                parameter.copy_(good[name])
        answer = await ask(engine, prompt, max_tokens=3)
    expected = plain_logprobs(policy, prompt, answer.tokens, Sampling())
    assert answer.logprobs == pytest.approx(expected, abs=EXACT)


def test_a_closed_event_loop_does_not_affect_others(policy: LocalPolicy) -> None:
    engine = LocalEngine(policy, LocalEngineConfig(), decode, threads=1)
    gone = asyncio.new_event_loop()
    orphan = engine.generate(prompt_of(20), Sampling(), stream=True)
    gone.run_until_complete(anext(orphan))
    gone.close()

    async def others() -> None:
        answers = await all_of(engine, [prompt_of(20, seed=i) for i in range(4)], max_tokens=9)
        assert [len(answer.tokens) for answer in answers] == [9] * 4
        await orphan.aclose()
        await engine.close()

    asyncio.run(others())


class Counting(nn.Module):
    """The next id is the last one plus 1; knows neither positions nor a cache."""

    def forward(
        self, input_ids: Tensor, logits_to_keep: Tensor, **_: object
    ) -> CausalLMOutputWithPast:
        last_BT = input_ids[:, logits_to_keep]
        logits_BTV = 50.0 * nn.functional.one_hot((last_BT + 1) % VOCABULARY, VOCABULARY)
        return CausalLMOutputWithPast(logits=logits_BTV)  # pyright: ignore[reportArgumentType]


async def test_rows_keep_to_their_requests_as_others_come_and_go() -> None:
    async with started(HandMade(Counting()), kv_tokens=1024) as engine:
        answers = await together(
            [lambda n=n: ask(engine, [n], max_tokens=1 + 7 * n % 40) for n in range(30)]
        )
    for n, answer in enumerate(answers):
        assert answer.tokens == tuple(range(n + 1, n + 2 + 7 * n % 40))
