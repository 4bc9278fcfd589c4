"""The fake engine: scripts, stop conditions and versions."""

import subprocess
import sys

import pytest

from support.models.tiny_llama import ask
from whet.engines.fake import FakeEngine

pytestmark = pytest.mark.anyio


async def test_a_script_is_followed_answer_by_answer_then_it_is_on_its_own() -> None:
    engine = FakeEngine([b"hello", b"you"])
    first = await ask(engine, b"ab", top_k=1, temperature=0)
    second = await ask(engine, b"cd")
    third = await ask(engine, b"ef", max_tokens=3)
    assert bytes(first.tokens) == b"hello"
    assert bytes(second.tokens) == b"you"
    assert first.stop == second.stop == "stop"
    assert all(-30 < logprob < 0 for logprob in first.logprobs)
    assert (len(third.tokens), third.stop) == (3, "length")
    assert engine.prompts == [tuple(b"ab"), tuple(b"cd"), tuple(b"ef")]


async def test_stop_conditions_of_a_request_cut_the_script() -> None:
    engine = FakeEngine([b"hello"] * 4)
    assert (await ask(engine, b"p", max_tokens=2)).stop == "length"
    assert (await ask(engine, b"p", max_tokens=5)).stop == "length"
    assert bytes((await ask(engine, b"p", stop=["el"])).tokens) == b"hel"
    assert bytes((await ask(engine, b"p", stop_ids=list(b"h"))).tokens) == b"h"


async def test_the_version_is_that_of_the_moment() -> None:
    engine = FakeEngine()
    before = await ask(engine, b"p", temperature=0, max_tokens=4)
    engine.version = 7
    after = await ask(engine, b"p", temperature=0, max_tokens=4)
    assert before.versions == (0,) * 4
    assert after.versions == (7,) * 4
    assert before.tokens != after.tokens


def test_an_empty_answer_is_invalid() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        FakeEngine([b"a", b""])


def test_neither_fake_needs_torch() -> None:
    code = (
        "import sys, whet.engines.fake, whet.trainers.fake; "
        "sys.exit(bool({'torch', 'numpy', 'llguidance'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
