"""`agl.APO` finds a known better prompt with a scripted model, through the agents of `agl`."""

from pathlib import Path

import pytest
from openai import AsyncOpenAI

import whet.agl as agl
from integrations.agl.test_seeds import serve_reply

BETTER = "Answer {question} step by step"


@agl.rollout
async def solve(task: dict[str, str], prompt_template: agl.PromptTemplate) -> float:
    prompt = prompt_template.format(question=task["q"])
    return 1.0 if "step by step" in prompt else 0.0


@pytest.mark.slow
def test_apo_finds_the_better_prompt(tmp_path: Path) -> None:
    start = agl.PromptTemplate(template="Answer {question}", engine="f-string")
    with serve_reply(f"```\n{BETTER}\n```") as url:
        client = AsyncOpenAI(base_url=url, api_key="x")
        algorithm = agl.APO(
            client, gradient_model="m", beam_rounds=1, branch_factor=1, dir=str(tmp_path)
        )
        trainer = agl.Trainer(algorithm=algorithm, initial_resources={"prompt_template": start})
        trainer.fit(solve, [{"q": "a"}, {"q": "b"}])
    assert algorithm.get_best_prompt().template == BETTER
