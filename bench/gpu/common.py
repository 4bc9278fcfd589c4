"""Shared parts of the GPU benches: the model, its prompts, the heading of a result."""

import asyncio
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import torch
import transformers

from whet.config import LocalEngineConfig, LocalTrainerConfig
from whet.demos.problems import CALCULATOR, SYSTEM, problems
from whet.engines.local.engine import LocalEngine
from whet.gateway.messages import Message
from whet.gateway.templates.chat_template import ChatTemplate
from whet.models.catalog import resolve_model
from whet.models.huggingface import LocalPolicy
from whet.types import GenerationId, Row, SampledSegment, Sampling

PEAK_FLOPS = 790e12
"""Of bf16 matrix products measured on an H200; the datasheet says 989e12."""


def head(what: str) -> None:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    print(
        f"{what}\n{date.today()}, {gpu}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, Python {platform.python_version()}"
    )


SHAPES: dict[str, dict[str, int | bool]] = {
    "135m": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49_152,
        "tie_word_embeddings": True,
    },
    "1.5b": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "7b": {
        "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
"""Shapes of SmolLM2-135M, Qwen2.5-1.5B and Qwen2.5-7B."""


def model_folder(name: str = "smollm2") -> Path:
    """Folder of a model by its name, or of random weights of a shape."""
    return random_model(name) if name in SHAPES else resolve_model(name, progress=print)


def random_model(shape: str) -> Path:
    """Write a Llama of random weights with the tiny model's tokenizer: right for speed alone."""
    folder = Path(tempfile.gettempdir()) / f"whet-bench-{shape}"
    if (folder / "config.json").exists():
        return folder
    tiny = resolve_model("tiny")
    config = transformers.AutoConfig.from_pretrained(tiny)
    size = SHAPES[shape]
    config.update({**size, "head_dim": size["hidden_size"] // size["num_attention_heads"]})
    config.max_position_embeddings = 8192
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    (folder / "config.json").unlink()  # written last, with the weights: marks a whole folder
    model.save_pretrained(folder)
    return folder


def load(folder: Path, device: str, kv_tokens: int, **settings: object) -> "Local":
    config = LocalTrainerConfig.model_validate({"weights": "full"} | settings)
    policy = LocalPolicy(folder, config, device=device, seed=0)
    template = ChatTemplate(folder)
    engine = LocalEngine(policy, LocalEngineConfig(kv_tokens=kv_tokens), template.decode)
    return Local(policy, engine)


@dataclass
class Local:
    """A model of this process, sampled from."""

    policy: LocalPolicy
    engine: LocalEngine

    async def sample(self, prompts: Sequence[Sequence[int]], **sampling: object) -> list[Row]:
        """One answer to each prompt, as rows; all at once."""
        wanted = Sampling.model_validate(sampling)
        return await asyncio.gather(*[self._one(i, p, wanted) for i, p in enumerate(prompts)])

    async def _one(self, index: int, prompt: Sequence[int], sampling: Sampling) -> Row:
        async with aclosing(self.engine.generate(prompt, sampling)) as pieces:
            piece = await anext(pieces)
        span = SampledSegment(
            generation=GenerationId(f"{index}.0"),
            start=len(prompt),
            logprobs=piece.logprobs,
            versions=piece.versions,
            advantages=(0.0,) * len(piece.tokens),
            weight=1.0,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
        )
        return Row((*prompt, *piece.tokens), (span,), rollout=f"r{index}", group="g")


def credited(row: Row, advantage: float) -> Row:
    """The row with every sampled token worth so much."""
    segments = [replace(s, advantages=(advantage,) * len(s.logprobs)) for s in row.segments]
    return replace(row, segments=tuple(segments))


def prompts(folder: Path, count: int, *, length: int | None = None) -> list[list[int]]:
    """Prompts of the calculator task; with `length` all of so many tokens, by a longer system."""
    template = ChatTemplate(folder)

    def render(task: dict, padding: str) -> list[int]:
        messages = [Message("system", SYSTEM + padding), Message("user", task["question"])]
        text = template.render(messages, [CALCULATOR], add_generation_prompt=True)
        return template.encode(text)

    found: list[list[int]] = []
    for task in problems("train", count, 0):
        ids = render(task, "")
        if length is not None:
            ids = render(task, " Take care." * ((length - len(ids)) // 3 + 1))
            ids = [*ids[: length // 2], *ids[len(ids) - (length - length // 2) :]]
        found.append(ids)
    return found


def timed(work: Callable[[], object], repeats: int) -> float:
    """Seconds of one call, the fastest of some."""
    best = float("inf")
    for _ in range(repeats):
        synchronize()
        began = time.perf_counter()
        work()
        synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def forget_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb() -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0


def weights_in(folder: Path) -> int:
    """Count the weights of the model."""
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())
