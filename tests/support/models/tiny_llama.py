"""A random Llama of some 50,000 weights, and helpers to sample from and train models."""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutput

from whet.config import LocalTrainerConfig
from whet.models.distribution import SamplingTransform, compute_log_probs
from whet.models.huggingface import FairLock, LocalPolicy
from whet.models.layers import LMHead
from whet.protocols import Engine
from whet.types import GenerationId, Row, SampledSegment, Sampling, StopReason

torch.set_num_threads(1)  # more only get in each other's way on matrices this small

VOCABULARY = 300
CONTEXT = 512


def make_model(
    folder: Path, *, seed: int = 0, layers: int = 2, context: int = CONTEXT, width: int = 48
) -> Path:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def load(
    folder: Path, seed: int = 0, *, keep_reference: bool = False, **settings: object
) -> LocalPolicy:
    config = LocalTrainerConfig.model_validate({"lora_rank": 4, "lora_alpha": 8} | settings)
    policy = LocalPolicy(folder, config, device="cpu", seed=seed)
    if keep_reference and config.weights == "full":
        policy.keep_reference()
    return policy


class LogitsAsStates(nn.Module):
    """A model whose hidden states are its logits already."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, **settings: object) -> BaseModelOutput:
        everything = torch.arange(input_ids.shape[1])
        output = self.model(input_ids=input_ids, logits_to_keep=everything, **settings)
        return BaseModelOutput(last_hidden_state=output.logits)


class NoHead(LMHead):
    """Does nothing."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def __call__(self, hidden_ND: torch.Tensor) -> torch.Tensor:
        return hidden_ND

    @property
    def vocabulary(self) -> int:
        return self._vocabulary

    @property
    def trained(self) -> list[nn.Parameter]:
        return []


class HandMade(LocalPolicy):
    """A policy around any module that is called as a Hugging Face model is."""

    def __init__(self, model: nn.Module, vocabulary: int = VOCABULARY, **settings: object) -> None:
        self.config = LocalTrainerConfig.model_validate({"weights": "full"} | settings)
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.version = 0
        self.revision = 0
        self.lock = FairLock()
        self.context_length = CONTEXT
        self.vocabulary = vocabulary
        self.packs_rows = True
        self.model = model.eval()
        self.body = LogitsAsStates(model)
        self.head = NoHead(vocabulary)

    def get_trainable(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


def nudge(policy: LocalPolicy, *, seed: int = 1, size: float = 0.3) -> None:
    """Change every trainable weight, as a training step would."""
    generator = torch.Generator().manual_seed(seed)
    with policy.update(policy.version + 1), torch.no_grad():
        for parameter in policy.get_trainable().values():
            parameter += size * torch.randn(parameter.shape, generator=generator)


def decode(tokens: Sequence[int]) -> str:
    """A letter for each id, so that text and tokens correspond."""
    return "".join(chr(0x4E00 + token) for token in tokens)


def plain_logprobs(
    policy: LocalPolicy, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling
) -> list[float]:
    """Of `tokens` after `prompt`, by one full forward pass without any cache."""
    with torch.inference_mode():
        logits_TV = policy.model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0]
    settings = [(sampling.temperature, sampling.top_p, sampling.top_k)] * len(tokens)
    logp_TV = compute_log_probs(
        logits_TV[len(prompt) - 1 : -1], SamplingTransform.from_settings(settings, "cpu")
    )
    return logp_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


@dataclass
class Answer:
    """All chunks of a generation joined."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    versions: tuple[int, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    stop: StopReason | None = None
    chunks: int = 0


async def ask(
    engine: Engine, prompt: Sequence[int], *, stream: bool = False, **sampling: object
) -> Answer:
    """Sample with a seed: a few sequences in a thousand are so unlikely that rounding shows."""
    answer = Answer()
    parameters = Sampling.model_validate({"seed": 0} | sampling)
    async with aclosing(engine.generate(prompt, parameters, stream=stream)) as stream_of_chunks:
        async for chunk in stream_of_chunks:
            assert answer.stop is None
            answer.tokens += chunk.tokens
            answer.logprobs += chunk.logprobs
            answer.versions += chunk.versions
            answer.top += chunk.top
            answer.stop = chunk.stop
            answer.chunks += 1
    return answer


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()


def row_of(
    prompt: Sequence[int],
    tokens: Sequence[int],
    logprobs: Sequence[float],
    advantage: float,
    *,
    weight: float = 1.0,
    version: int = 0,
    sampling: Sampling | None = None,
    generation: str = "c.0",
) -> Row:
    sampling = sampling or Sampling()
    segment = SampledSegment(
        generation=GenerationId(generation),
        start=len(prompt),
        logprobs=tuple(logprobs),
        versions=(version,) * len(tokens),
        advantages=(advantage,) * len(tokens),
        weight=weight,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
    )
    return Row((*prompt, *tokens), (segment,), rollout="r", group="g")
