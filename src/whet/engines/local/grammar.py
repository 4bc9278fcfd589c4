"""Grammar-constrained sampling: which tokens may come next, and when the text may end.

Grammars are Lark text in llguidance's dialect; see docs/decisions/0005-logprobs.md.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from whet.errors import RequestError, boundary

MAX_COMPILED = 64
"""Compiled grammars to keep; an agent uses the same few repeatedly."""


class Matcher:
    """The grammar state of one generation."""

    def __init__(self, matcher: LLMatcher, stop_ids: Sequence[int], end_ids: Sequence[int]) -> None:
        """`end_ids` are llguidance's own end tokens; `stop_ids` are the request's."""
        self._matcher = matcher
        self._stop_ids = list(stop_ids)
        self._end_ids = list(end_ids)
        self.finished = False
        """Whether no token may follow, not even a stop id."""
        self.allowed_V = self._compute_allowed()
        """Whether each id may come next; a stop id may only where the text is complete."""

    def advance(self, token: int) -> None:
        """Consume a sampled token. Raises RequestError if the grammar has no continuation."""
        if token in self._stop_ids:
            self.finished = True
            return
        self._matcher.consume_token(token)
        self.allowed_V = self._compute_allowed()

    def _compute_allowed(self) -> NDArray[np.bool_]:
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed_V = np.unpackbits(packed, bitorder="little").astype(np.bool_)
        complete = self._matcher.is_accepting()
        if self._matcher.is_error():
            raise RequestError(f"the grammar has no continuation: {_explain(self._matcher)}")
        allowed_V[self._end_ids] = False
        allowed_V[[id for id in self._stop_ids if id < len(allowed_V)]] = complete
        if not allowed_V.any():
            if not complete:
                raise RequestError("the grammar requires text this model has no tokens for")
            self.finished = True
        return allowed_V


@dataclass
class Grammars:
    """The compiled grammars of one model. Thread-safe."""

    folder: Path
    """The model's folder, for its tokenizer."""
    end_ids: Sequence[int]
    """Ids that end a turn."""

    def create_matcher(self, grammar: str, stop_ids: Sequence[int]) -> Matcher:
        """Start a generation. Raises RequestError if the grammar does not compile."""
        return Matcher(self._compiled(grammar).deep_copy(), stop_ids, self._tokenizer.eos_tokens)

    @cached_property
    def _compiled(self) -> Callable[[str], LLMatcher]:
        return lru_cache(MAX_COMPILED)(self._compile)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be compiled: {_explain(matcher)}")
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Built on first use: a large vocabulary takes a second."""
        with boundary(RequestError, "this model's tokenizer does not support grammars"):
            tokenizer = json.loads((self.folder / "tokenizer.json").read_text())
            tokenizer |= {"padding": None, "truncation": None}
            return LLTokenizer(json.dumps(tokenizer), eos_token=list(self.end_ids) or None)


def mask_logits(logits_BV: Tensor, matchers: Sequence[Matcher | None]) -> Tensor:
    """Set logits to minus infinity where a row's grammar forbids the token."""
    if not any(matchers):
        return logits_BV
    # The LM head may be wider than the tokenizer: an id without text matches no grammar.
    vocabulary = logits_BV.shape[1]
    allowed_BV = np.ones(logits_BV.shape, np.bool_)
    for row, matcher in enumerate(matchers):
        if matcher is not None:
            known_V = matcher.allowed_V[:vocabulary]
            allowed_BV[row] = False
            allowed_BV[row, : len(known_V)] = known_V
    mask_BV = torch.from_numpy(allowed_BV).to(logits_BV.device)
    return logits_BV.masked_fill(~mask_BV, float("-inf"))


def _explain(matcher: LLMatcher) -> str:
    """The first line of llguidance's error, without its position in the grammar's text."""
    first = matcher.get_error().split("\n", 1)[0]
    position, colon, rest = first.partition("): ")
    return rest if colon and position.startswith("at ") else first
