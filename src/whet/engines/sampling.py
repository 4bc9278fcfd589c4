"""Draws the next token of many rows at once, each with its own settings and randomness."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from whet.policies.distribution import Shaping, log_probs
from whet.types import Piece, Sampling, StopReason


class Drawn(NamedTuple):
    """One token with its log-probability, and the likeliest others if asked for."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True, eq=False)
class Request:
    """One continuation being sampled."""

    prompt: Sequence[int]
    sampling: Sampling
    limit: int
    """Most tokens it may sample."""
    stream: bool
    deliver: Callable[[Piece | Exception], None]
    """Takes pieces to whoever asked; called in the engine's thread."""
    generator: torch.Generator | None
    drawn: list[Drawn] = field(default_factory=list[Drawn])
    versions: list[int] = field(default_factory=list[int])
    delivered: int = 0
    cancelled: bool = False

    @property
    def tokens(self) -> list[int]:
        """The prompt and what was sampled after it."""
        return [*self.prompt, *(d.token for d in self.drawn)]

    def take(self, drawn: Drawn, version: int, decode: Callable[[Sequence[int]], str]) -> bool:
        """Add a token and deliver what is due; returns whether this was the last one."""
        self.drawn.append(drawn)
        self.versions.append(version)
        stop = self._stop_reason(decode)
        if stop or self.stream:
            fresh = self.drawn[self.delivered :]
            self.deliver(
                Piece(
                    tokens=tuple(d.token for d in fresh),
                    logprobs=tuple(d.logprob for d in fresh),
                    versions=tuple(self.versions[self.delivered :]),
                    top=tuple(d.top for d in fresh) if self.sampling.top_logprobs else (),
                    stop=stop,
                )
            )
            self.delivered = len(self.drawn)
        return stop is not None

    def _stop_reason(self, decode: Callable[[Sequence[int]], str]) -> StopReason | None:
        if self.drawn[-1].token in self.sampling.stop_ids:
            return "stop"
        if self.sampling.stop and self._stop_string(decode):
            return "stop"
        return "length" if len(self.drawn) >= self.limit else None

    def _stop_string(self, decode: Callable[[Sequence[int]], str]) -> bool:
        # A token holds at least one byte, so a stop string that ends in the newest token
        # began no more than its own length in tokens ago.
        reach = max(len(s.encode()) for s in self.sampling.stop) + 1
        tail = decode([d.token for d in self.drawn[-reach:]])
        return any(s in tail for s in self.sampling.stop)


def seeded(seed: int | None, device: torch.device) -> torch.Generator | None:
    """A request's own randomness, or None to share the engine's."""
    return None if seed is None else torch.Generator(device).manual_seed(seed % 2**63)


def fresh_generator(device: torch.device) -> torch.Generator:
    """Randomness that no seed of the run decides: equal requests differ."""
    return torch.Generator(device).manual_seed(secrets.randbits(63))


def draw(logits_BV: Tensor, requests: Sequence[Request], shared: torch.Generator) -> list[Drawn]:
    """The next token of each row, exactly from the distribution whose log-probability it gets."""
    settings = [(r.sampling.temperature, r.sampling.top_p, r.sampling.top_k) for r in requests]
    shaping = Shaping.of(settings, logits_BV.device)
    logp_BV = log_probs(logits_BV, shaping)
    # argmax of p / E with E exponential draws from p (the Gumbel trick without two logarithms).
    noise_BV = torch.empty_like(logp_BV).exponential_(generator=shared)
    for row, request in enumerate(requests):
        if request.generator is not None:
            noise_BV[row].exponential_(generator=request.generator)
    greedy_B = shaping.temperature_N == 0
    noise_BV[greedy_B] = 1.0
    token_B = (logp_BV.exp() / noise_BV).argmax(dim=-1)
    chosen_B = logp_BV.gather(1, token_B[:, None])[:, 0]
    tops = _tops(logp_BV, requests)
    return [
        Drawn(*both, top)
        for *both, top in zip(token_B.tolist(), chosen_B.tolist(), tops, strict=True)
    ]


def _tops(logp_BV: Tensor, requests: Sequence[Request]) -> list[tuple[tuple[int, float], ...]]:
    most = max(r.sampling.top_logprobs for r in requests)
    if most == 0:
        return [()] * len(requests)
    value_BK, id_BK = logp_BV.topk(most, dim=-1)
    rows = zip(requests, id_BK.tolist(), value_BK.tolist(), strict=True)
    return [
        tuple(zip(ids, values, strict=True))[: request.sampling.top_logprobs]
        for request, ids, values in rows
    ]
