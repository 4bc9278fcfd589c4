"""Scores in chunks are the scores of all logits at once, and so are their gradients."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig

from whet.models.distribution import SamplingTransform, compute_log_probs
from whet.models.layers import LMHead
from whet.trainers.logprobs import PolicyScores, score_tokens

WIDTH, WORDS = 6, 11


def head_of(*, trained: bool, bias: bool = False, **config: object) -> tuple[LMHead, nn.Linear]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        linear = nn.Linear(WIDTH, WORDS, bias=bias).requires_grad_(trained)
    settings = LlamaConfig()
    for key, value in config.items():
        setattr(settings, key, value)
    return LMHead(linear, settings), linear


def plainly(
    hidden_ND: Tensor, head: LMHead, target_N: Tensor, transform: SamplingTransform
) -> PolicyScores:
    logp_NV = compute_log_probs(head(hidden_ND), transform, target_N)
    logp_N = logp_NV.gather(1, target_N[:, None])[:, 0]
    finite_NV = logp_NV.masked_fill(logp_NV == -torch.inf, 0.0)
    return PolicyScores(logp_N, -(logp_NV.exp() * finite_NV).sum(dim=-1))


def gradients(scores: PolicyScores, leaves: list[Tensor], *, entropy: bool) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    n = len(scores.logp_N)
    value = (scores.logp_N * torch.randn(n, generator=random)).sum()
    if entropy:
        value = value + (scores.entropy_N * torch.randn(n, generator=random)).sum()
    return list(torch.autograd.grad(value, leaves))


settings_of_a_token = st.tuples(
    st.sampled_from([0.0, 0.6, 1.0, 1.7]), st.sampled_from([1.0, 0.8]), st.sampled_from([0, 3])
)


@given(
    st.lists(settings_of_a_token, min_size=1, max_size=9),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.sampled_from([{}, {"final_logit_softcapping": 2.0}, {"logits_scaling": 3.0}]),
)
@settings(max_examples=80)
def test_chunks_change_nothing(
    tokens: list[tuple[float, float, int]],
    at_once: int,
    trained: bool,
    entropy: bool,
    config: dict[str, object],
) -> None:
    head, linear = head_of(trained=trained, bias=True, **config)
    random = torch.Generator().manual_seed(len(tokens))
    hidden_ND = torch.randn(len(tokens), WIDTH, generator=random).mul_(3).requires_grad_()
    target_N = torch.randint(0, WORDS, (len(tokens),), generator=random)
    transform = SamplingTransform.from_settings(tokens, "cpu")
    leaves = [hidden_ND, *linear.parameters()] if trained else [hidden_ND]

    wanted = plainly(hidden_ND, head, target_N, transform)
    found = score_tokens(
        hidden_ND, head, target_N, transform, entropy_grad=entropy, chunk_logits=at_once * WORDS
    )
    assert torch.allclose(found.logp_N, wanted.logp_N, atol=1e-6)
    assert torch.allclose(found.entropy_N, wanted.entropy_N, atol=1e-6)
    assert found.entropy_N.requires_grad == entropy
    pairs = zip(
        gradients(found, leaves, entropy=entropy),
        gradients(wanted, leaves, entropy=entropy),
        strict=True,
    )
    for mine, theirs in pairs:
        assert torch.allclose(mine, theirs, atol=2e-5)


def test_a_vocabulary_larger_than_a_chunk_is_one_token_at_a_time() -> None:
    head, _ = head_of(trained=False)
    hidden_ND, target_N = torch.ones(3, WIDTH), torch.tensor([0, 1, 2])
    transform = SamplingTransform.from_settings([(1, 1, 0)] * 3, "cpu")
    found = score_tokens(hidden_ND, head, target_N, transform, chunk_logits=1)
    assert torch.allclose(found.logp_N, plainly(hidden_ND, head, target_N, transform).logp_N)


def test_logits_are_never_there_all_at_once() -> None:
    seen: list[int] = []

    class Watched(LMHead):
        def __call__(self, hidden_ND: Tensor) -> Tensor:
            seen.append(len(hidden_ND))
            return super().__call__(hidden_ND)

    for trained in (False, True):
        linear = nn.Linear(WIDTH, WORDS).requires_grad_(trained)
        head = Watched(linear, LlamaConfig())
        hidden_ND = torch.randn(10, WIDTH, requires_grad=True)
        transform = SamplingTransform.from_settings([(1, 1, 0)] * 10, "cpu")
        scores = score_tokens(
            hidden_ND, head, torch.zeros(10).long(), transform, chunk_logits=4 * WORDS
        )
        scores.logp_N.sum().backward()
    once = [4, 4, 2]
    assert seen == once + once + once, "a frozen head is computed once, a trained one twice"


def test_half_precision_gives_whole_logits() -> None:
    head, linear = head_of(trained=True)
    linear.to(torch.bfloat16)
    head = LMHead(linear, LlamaConfig())
    hidden_ND = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).mul_(20)
    half_ND = hidden_ND.bfloat16().requires_grad_()
    logits_NV = head(half_ND)
    exact_NV = half_ND.float() @ linear.weight.float().T
    assert logits_NV.dtype == torch.float32
    assert torch.allclose(logits_NV, exact_NV, atol=1e-5)
    assert not torch.allclose(logits_NV, (half_ND @ linear.weight.T).float(), atol=1e-2)
    [mine_ND] = torch.autograd.grad(logits_NV.square().sum(), half_ND)
    [theirs_ND] = torch.autograd.grad(exact_NV.square().sum(), half_ND)
    assert torch.allclose(mine_ND.float(), theirs_ND.float(), rtol=0.02, atol=0.5)
    assert linear(half_ND[None]).shape == (1, 4, WORDS)
