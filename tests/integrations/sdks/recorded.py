"""The strands-vllm example, with the records of its recorder for the test."""

import json
import sys
from pathlib import Path

from strands_vllm import VLLMTokenRecorder

sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / "sdks"))

from strands_vllm_agent import answer


async def solve(task, llm):
    recorder = VLLMTokenRecorder()
    reward = await answer(task, llm, recorder)
    note(llm, recorder)
    return reward


def note(llm, recorder):
    last = {"prompt_token_ids": recorder.prompt_token_ids, "token_ids": recorder.token_ids}
    attempt = llm.base_url.split("/attempt/")[1].split("/")[0]
    Path(f"{attempt}.json").write_text(json.dumps({"history": recorder.history, "last": last}))
