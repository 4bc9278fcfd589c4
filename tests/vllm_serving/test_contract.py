"""What every engine promises, kept by a real vLLM."""

import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import anyio
import pytest
from real_vllm import NEEDS_VLLM, Launch
from tokenizers import Tokenizer, models

from tiny_llama import CONTEXT, VOCABULARY, decode, make_model
from whet.engines.joining import join_servers
from whet.engines.launch import LaunchedVLLM
from whet.protocols import Engine

sys.path.insert(0, str(Path(__file__).parent.parent / "contracts"))
from test_engine import *  # noqa: F403

pytestmark = [pytest.mark.anyio, pytest.mark.slow, NEEDS_VLLM]

del test_a_grammar_it_cannot_hold_to_is_refused  # noqa: F821 - it can


@pytest.fixture(scope="session")
def random_llama(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> LaunchedVLLM:
    """A server of a random model with heads as vLLM has kernels for, and a word for each id."""
    folder = make_model(tmp_path_factory.mktemp("models") / "random-llama", width=128)
    words = {f"w{id}": id for id in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2"}'
    (folder / "tokenizer_config.json").write_text(settings)
    return launch(folder)


@pytest.fixture
async def engine(random_llama: LaunchedVLLM) -> AsyncGenerator[Engine]:
    with anyio.fail_after(900):
        engine = await join_servers(
            "vllm",
            [random_llama.url],
            decode,
            context_length=CONTEXT,
            alive=random_llama.why_dead,
            say=print,
        )
        random_llama.was_ready()
        yield engine
        await engine.close()
