"""smolagents' tool-calling agent. Its loop is not async: the runner gives it a thread."""

from smolagents import OpenAIModel, ToolCallingAgent, tool
from smolagents.agents import EMPTY_PROMPT_TEMPLATES
from sums import SYSTEM, grade

from whet.demos.problems import calculate

PROMPTS = {
    **EMPTY_PROMPT_TEMPLATES,
    "system_prompt": SYSTEM,  # its own has thousands of tokens, more than a tiny model reads
    "final_answer": {"pre_messages": SYSTEM, "post_messages": "{{task}}"},
}


@tool
def calculator(expression: str) -> str:
    """Evaluates arithmetic.

    Args:
        expression: such as 12+30
    """
    return calculate(expression)


def solve(task, llm):
    # whet: begin
    model = OpenAIModel(
        api_base=llm.base_url, api_key=llm.api_key, model_id=llm.model, tool_choice="auto"
    )
    # whet: end
    model.kwargs["max_tokens"] = 64
    agent = ToolCallingAgent(
        tools=[calculator],
        model=model,
        prompt_templates=PROMPTS,
        max_steps=2,
        verbosity_level=0,
        stream_outputs=task.get("stream", False),
    )
    answer = agent.run(task["question"])
    steps = agent.memory.get_full_steps()
    return grade(answer, task, has_calculated=any(step.get("observations") for step in steps))
