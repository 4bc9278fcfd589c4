"""The contract of every engine, against a real vLLM."""

from collections.abc import AsyncGenerator

import anyio
import pytest
from tokenizers import Tokenizer, models

from contracts.test_engine import *  # noqa: F403
from support.models.tiny_llama import CONTEXT, VOCABULARY, decode, make_model
from support.servers.real_vllm import NEEDS_VLLM, Launch
from whet.engines.remote.connect import connect_servers
from whet.engines.remote.launch import VLLMProcess
from whet.protocols import Engine

pytestmark = [pytest.mark.anyio, pytest.mark.slow, NEEDS_VLLM]

del test_a_grammar_it_cannot_hold_to_is_refused  # noqa: F821 - it can


@pytest.fixture(scope="session")
def random_llama(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> VLLMProcess:
    """A server of a random model with heads as vLLM has kernels for, and a word for each id."""
    folder = make_model(tmp_path_factory.mktemp("models") / "random-llama", width=128)
    words = {f"w{id}": id for id in range(VOCABULARY)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w2"}'
    (folder / "tokenizer_config.json").write_text(settings)
    return launch(folder)


@pytest.fixture
async def engine(random_llama: VLLMProcess) -> AsyncGenerator[Engine]:
    with anyio.fail_after(900):
        engine = await connect_servers(
            "vllm",
            [random_llama.url],
            decode,
            context_length=CONTEXT,
            startup_error=random_llama.find_startup_error,
            progress=print,
        )
        random_llama.mark_ready()
        yield engine
        await engine.close()
