"""A task of Inspect with its data in the file."""

# pyright: basic, reportMissingImports=false
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate


@task
def vowels() -> Task:
    samples = [Sample(input=f"Say {word}.", target="a") for word in "abcdefghijklmnopqrst"]
    return Task(dataset=samples, solver=generate(max_tokens=8), scorer=includes())
