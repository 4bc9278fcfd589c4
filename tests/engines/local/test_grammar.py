"""Sampling under a grammar: the text follows it, and the log-probabilities are right."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from whet.config import LocalEngineConfig, LocalTrainerConfig
from whet.engines.fake import FakeEngine
from whet.engines.local.engine import LocalEngine
from whet.engines.local.grammar import Grammars, Matcher, mask_logits
from whet.errors import RequestError
from whet.models.catalog import TINY
from whet.models.huggingface import LocalPolicy
from whet.types import Sampling, TokenChunk

pytestmark = pytest.mark.anyio

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
END = 2
"""`<|im_end|>` in both models."""


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Color(StrEnum):
    RED = "red"
    GREEN = "light green"


class Point(Closed):
    x: Annotated[int, Field(ge=-9, le=9)]
    label: Annotated[str, Field(max_length=4)] | None


class Drawing(Closed):
    kind: Literal["drawing"]
    color: Color
    points: Annotated[list[Point], Field(min_length=1, max_length=2)]
    visible: bool


class Dot(Closed):
    kind: Literal["dot"]
    at: Point


class Page(Closed):
    item: Annotated[Drawing | Dot, Field(discriminator="kind")]


SHAPES: dict[str, TypeAdapter[object]] = {
    "enum": TypeAdapter(Color),
    "nested": TypeAdapter(Drawing),
    "union": TypeAdapter(Page),
    "array": TypeAdapter(Annotated[list[Color], Field(max_length=3)]),
    "number": TypeAdapter(Annotated[int, Field(ge=10, le=250)]),
}


class Bench(NamedTuple):
    """A model and the engine in front of it."""

    policy: LocalPolicy
    grammars: Grammars
    engine: LocalEngine
    tokenizer: Tokenizer

    def prompt(self, text: str = "Hi") -> list[int]:
        turn = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return self.tokenizer.encode(turn, add_special_tokens=False).ids


def write_random_model(folder: Path) -> None:
    """Every byte is a token, a few words too; the head is wider than the tokenizer."""
    alphabet = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges = [("r", "e"), ("re", "d"), ('"', "x"), ("{", '"')]
    vocabulary = {t: i for i, t in enumerate([*alphabet, *("".join(m) for m in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(vocabulary) + 37,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", params=["tiny", "random"])
async def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncGenerator[Bench]:
    folder = TINY
    if request.param == "random":
        folder = tmp_path_factory.mktemp("random")
        write_random_model(folder)
    policy = LocalPolicy(folder, LocalTrainerConfig(weights="full"), device="cpu", seed=0)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    grammars = Grammars(folder, [END])
    engine = LocalEngine(
        policy,
        LocalEngineConfig(),
        lambda ids: tokenizer.decode(list(ids)),
        grammars=grammars,
        threads=1,
    )
    yield Bench(policy, grammars, engine, tokenizer)
    await engine.close()


def of_shape(name: str) -> str:
    return of_schema(SHAPES[name].json_schema())


def of_schema(schema: dict[str, Any]) -> str:
    return f"start: %json {json.dumps({**schema, 'x-guidance': {'whitespace_pattern': ' '}})}"


async def sample(
    bench: Bench, prompt: Sequence[int] | None = None, *, stream: bool = False, **settings: object
) -> TokenChunk:
    """One generation as one chunk; by default the close id ends it."""
    sampling = Sampling.model_validate({"stop_ids": (END,), "max_tokens": 120, **settings})
    chunks = bench.engine.generate(prompt or bench.prompt(), sampling, stream=stream)
    return join_chunks([chunk async for chunk in chunks])


def join_chunks(chunks: Sequence[TokenChunk]) -> TokenChunk:
    return TokenChunk(
        tuple(t for p in chunks for t in p.tokens),
        tuple(x for p in chunks for x in p.logprobs),
        tuple(v for p in chunks for v in p.versions),
        tuple(t for p in chunks for t in p.top),
        chunks[-1].stop,
    )


def text_of(bench: Bench, chunk: TokenChunk) -> str:
    """The text of a chunk, whose last token is the close id."""
    assert chunk.stop == "stop"
    assert chunk.tokens[-1] == END
    assert END not in chunk.tokens[:-1]
    return bench.tokenizer.decode(list(chunk.tokens[:-1]), skip_special_tokens=False)


# ------------------------------------------------------------------------- the text


@pytest.mark.parametrize("shape", SHAPES)
async def test_whatever_is_sampled_follows_the_schema(bench: Bench, shape: str) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 3.0, "top_p": 0.9},
        {},
        {},
    ]
    chunks = await asyncio.gather(
        *(sample(bench, grammar=of_shape(shape), **setting) for setting in settings)
    )
    assert any(chunk.stop == "stop" for chunk in chunks)
    for chunk in chunks:
        if chunk.stop == "length":
            assert len(chunk.tokens) == 120
            continue
        SHAPES[shape].validate_json(text_of(bench, chunk))


async def test_an_object_of_any_shape_is_an_object(bench: Bench) -> None:
    prompts = [bench.prompt(f"Write {n}") for n in range(4)]
    grammar = of_schema({"type": "object"})
    chunks = await asyncio.gather(
        *(sample(bench, p, grammar=grammar, max_tokens=60) for p in prompts)
    )
    for chunk in chunks:
        if chunk.stop == "stop":
            assert isinstance(json.loads(text_of(bench, chunk)), dict)
        else:
            assert len(chunk.tokens) == 60


async def test_a_truncated_generation_reports_its_length_limit(bench: Bench) -> None:
    chunk = await sample(bench, grammar=of_shape("nested"), max_tokens=5)
    assert chunk.stop == "length"
    assert len(chunk.tokens) == 5


async def test_without_stop_ids_it_ends_where_nothing_can_follow(bench: Bench) -> None:
    chunk = await sample(bench, grammar=of_shape("enum"), stop_ids=())
    assert chunk.stop == "stop"
    SHAPES["enum"].validate_json(bench.tokenizer.decode(list(chunk.tokens)))


async def test_a_stop_string_ends_a_constrained_generation_too(bench: Bench) -> None:
    chunk = await sample(bench, grammar=of_shape("nested"), stop=("drawing",))
    assert chunk.stop == "stop"
    assert bench.tokenizer.decode(list(chunk.tokens)).endswith("drawing")


async def test_a_stop_id_may_come_exactly_where_the_text_is_complete(bench: Bench) -> None:
    matcher = bench.grammars.create_matcher(of_schema({"type": "integer"}), [END])
    seen = [bool(matcher.allowed_V[END])]
    for character in "-120":
        (id,) = bench.tokenizer.encode(character, add_special_tokens=False).ids
        assert matcher.allowed_V[id]
        matcher.advance(id)
        seen.append(bool(matcher.allowed_V[END]))
    assert seen == [False, False, True, True, True]
    assert not matcher.allowed_V[0]
    assert not matcher.finished


# ------------------------------------------------------------------------- the numbers


@torch.inference_mode()
def expected_logprobs(
    bench: Bench, grammar: str, prompt: list[int], chunk: TokenChunk
) -> list[float]:
    """From one plain forward pass, masked position by position."""
    ids = torch.tensor([[*prompt, *chunk.tokens]])
    logits_TV = bench.policy.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    matcher = bench.grammars.create_matcher(grammar, [END])
    found: list[float] = []
    for logits_V, token in zip(logits_TV, chunk.tokens, strict=True):
        allowed_V = torch.zeros(len(logits_V), dtype=torch.bool)
        known = min(len(allowed_V), len(matcher.allowed_V))
        allowed_V[:known] = torch.from_numpy(matcher.allowed_V[:known])
        assert allowed_V[token]
        found.append(float(torch.log_softmax(logits_V[allowed_V], -1)[allowed_V[:token].sum()]))
        matcher.advance(token)
    return found


@pytest.mark.parametrize("shape", ["nested", "number"])
async def test_log_probabilities_are_those_of_the_masked_distribution(
    bench: Bench, shape: str
) -> None:
    prompt = bench.prompt("Draw")
    grammar = of_shape(shape)
    chunk = await sample(bench, prompt, grammar=grammar, top_logprobs=3)
    expected = expected_logprobs(bench, grammar, prompt, chunk)
    assert chunk.logprobs == pytest.approx(expected, abs=1e-4)
    assert any(logprob < -0.01 for logprob in chunk.logprobs)
    for likeliest in chunk.top:
        assert sum(np.exp([logprob for _, logprob in likeliest])) < 1 + 1e-4


async def test_rows_without_a_grammar_are_as_they_would_be_alone(bench: Bench) -> None:
    free: Any = {"temperature": 0, "max_tokens": 40}
    prompts = [bench.prompt(text) for text in ("Who are you?", "Repeat exactly: Mia955y")]
    alone = [await sample(bench, prompt, **free) for prompt in prompts]
    first, _, second, _ = await asyncio.gather(
        sample(bench, prompts[0], **free),
        sample(bench, grammar=of_shape("nested")),
        sample(bench, prompts[1], **free),
        sample(bench, grammar=of_shape("union")),
    )
    for one, other in zip(alone, (first, second), strict=True):
        assert one.tokens == other.tokens
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_an_id_the_tokenizer_does_not_know_is_never_allowed(bench: Bench) -> None:
    matcher = bench.grammars.create_matcher(of_schema({"type": "object"}), [END])
    wide = len(matcher.allowed_V) + 5
    masked_BV = mask_logits(torch.zeros(2, wide), [None, matcher])
    assert torch.isfinite(masked_BV[0]).all()
    kept = torch.isfinite(masked_BV[1]).nonzero()[:, 0].tolist()
    assert kept == np.flatnonzero(matcher.allowed_V).tolist()
    narrow_BV = mask_logits(torch.zeros(1, 40), [matcher])
    assert narrow_BV.shape == (1, 40)


def test_logits_without_a_grammar_are_not_copied() -> None:
    logits_BV = torch.zeros(2, 4)
    assert mask_logits(logits_BV, [None, None]) is logits_BV


async def test_a_seed_decides_the_sample(bench: Bench) -> None:
    settings: Any = {"grammar": of_shape("nested"), "temperature": 2.0, "max_tokens": 30}
    one, same = [await sample(bench, seed=7, **settings) for _ in range(2)]
    others = [await sample(bench, seed=seed, **settings) for seed in range(3)]
    assert one.tokens == same.tokens
    assert any(other.tokens != one.tokens for other in others)


# ------------------------------------------------------------------------- along the way


async def test_a_stream_is_the_same_token_by_token(bench: Bench) -> None:
    settings: Any = {"grammar": of_shape("nested"), "seed": 3}
    whole = await sample(bench, **settings)
    streamed = await sample(bench, stream=True, **settings)
    assert streamed.tokens == whole.tokens
    assert streamed.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_new_weights_half_way_change_nothing_about_the_grammar(bench: Bench) -> None:
    sampling = Sampling(grammar=of_shape("nested"), stop_ids=(END,), max_tokens=120)
    weight = next(iter(bench.policy.get_trainable().values()))
    before = bench.policy.version
    kept = weight.detach().clone()
    chunks: list[TokenChunk] = []
    async for chunk in bench.engine.generate(bench.prompt(), sampling, stream=True):
        chunks.append(chunk)
        if len(chunks) == 3:
            with bench.policy.update(before + 1), torch.no_grad():
                weight.mul_(1.5)
    with bench.policy.update(before + 2), torch.no_grad():
        weight.copy_(kept)
    chunk = join_chunks(chunks)
    assert set(chunk.versions) == {before, before + 1}
    if chunk.stop == "stop":
        SHAPES["nested"].validate_json(text_of(bench, chunk))


async def test_a_canceled_generation_leaves_the_grammar_to_others(bench: Bench) -> None:
    sampling = Sampling(grammar=of_shape("nested"), stop_ids=(END,))
    async with aclosing(bench.engine.generate(bench.prompt(), sampling, stream=True)) as chunks:
        async for _ in chunks:
            break
    SHAPES["number"].validate_json(text_of(bench, await sample(bench, grammar=of_shape("number"))))


# ------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("grammar", "why"),
    [
        (of_schema({"type": "object", "not": {}}), "not"),
        (of_schema({"$ref": "#/$defs/missing"}), "missing"),
        (of_schema({"type": "frob"}), "frob"),
        ("start: (", ""),
        ("", ""),
    ],
)
async def test_a_grammar_that_cannot_be_compiled_is_refused_before_sampling(
    bench: Bench, grammar: str, why: str
) -> None:
    with pytest.raises(RequestError, match=f"grammar cannot be compiled.*{why}"):
        await sample(bench, grammar=grammar)


async def test_an_engine_that_cannot_constrain_refuses(bench: Bench) -> None:
    engine = LocalEngine(bench.policy, LocalEngineConfig(), lambda ids: "")
    sampling = Sampling(grammar=of_shape("enum"))
    for unable in (engine, FakeEngine()):
        with pytest.raises(RequestError, match="grammar"):
            async for _ in unable.generate([5, 6], sampling):
                pass
        await unable.close()


def test_a_grammar_without_tokens_for_it_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"<|im_end|>": 0, "a": 1, "b": 2}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    grammars = Grammars(tmp_path, [0])
    assert grammars.create_matcher('start: "ab"', [0]).allowed_V[:3].tolist() == [
        False,
        True,
        False,
    ]
    with pytest.raises(RequestError):
        follow(grammars.create_matcher('start: "a" ("c" | "d")', [0]), [1])


def follow(matcher: Matcher, tokens: Sequence[int]) -> None:
    for token in tokens:
        matcher.advance(token)


async def test_a_token_the_grammar_forbids_is_an_error(bench: Bench) -> None:
    (id,) = bench.tokenizer.encode("[", add_special_tokens=False).ids
    with pytest.raises(RequestError, match="has no continuation"):
        follow(bench.grammars.create_matcher(of_schema({"type": "object"}), [END]), [id])


def test_a_folder_without_a_tokenizer_cannot_constrain(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="tokenizer does not support grammars"):
        Grammars(tmp_path, [0]).create_matcher('start: "a"', [0])


async def test_a_grammar_is_compiled_once(bench: Bench) -> None:
    grammars = Grammars(bench.policy.folder, [END])
    first, second = [grammars.create_matcher(of_shape("enum"), [END]) for _ in range(2)]
    (id,) = bench.tokenizer.encode('"', add_special_tokens=False).ids
    first.advance(id)
    assert second.allowed_V[id]
    assert not first.allowed_V[id]
    cached: Any = grammars._compiled
    assert cached.cache_info().misses == 1
