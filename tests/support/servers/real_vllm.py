"""The real vLLM that these tests run against, and its settings on a CPU."""

import os
from collections.abc import Callable

import pytest

from whet.engines.remote.launch import VLLMProcess

PROGRAM = os.environ.get("WHET_VLLM")
ON_A_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
"""One thread: more of them wait for each other where cores are shared."""

TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
"""For agents that ask it for chats themselves."""

NEEDS_VLLM = pytest.mark.skipif(
    PROGRAM is None, reason="WHET_VLLM names no vLLM: make test-vllm installs one"
)

Launch = Callable[..., VLLMProcess]
