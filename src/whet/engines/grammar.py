"""Keeps sampling to a grammar: which tokens may come next, and when the text may end.

Grammars are Lark text in llguidance's dialect; see docs/decisions/040-constrained-decoding.md.
"""

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from whet.errors import RequestError, boundary

GRAMMARS_KEPT = 64
"""Compiled; an agent asks for the same few over and over."""


class Matcher:
    """Where one generation stands in its grammar."""

    def __init__(self, matcher: LLMatcher, stop_ids: Sequence[int], end_ids: Sequence[int]) -> None:
        """`end_ids` are those llguidance ends a text with; `stop_ids` are the request's."""
        self._matcher = matcher
        self._stop_ids = list(stop_ids)
        self._end_ids = list(end_ids)
        self.finished = False
        """Nothing may follow, not even a stop id."""
        self.allowed_V = self._allowed()
        """Whether each id may come next: a stop id may exactly where the text is complete."""

    def advance(self, token: int) -> None:
        """Take the token that was sampled. Raises RequestError if the grammar ends in a corner."""
        if token in self._stop_ids:
            self.finished = True
            return
        self._matcher.consume_token(token)
        self.allowed_V = self._allowed()

    def _allowed(self) -> NDArray[np.bool_]:
        packed = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed_V = np.unpackbits(packed, bitorder="little").astype(np.bool_)
        complete = self._matcher.is_accepting()
        if self._matcher.is_error():
            raise RequestError(f"the grammar cannot be followed: {_reason(self._matcher)}")
        allowed_V[self._end_ids] = False
        allowed_V[[id for id in self._stop_ids if id < len(allowed_V)]] = complete
        if not allowed_V.any():
            if not complete:
                raise RequestError("the grammar asks for text this model has no tokens for")
            self.finished = True
        return allowed_V


class Grammars:
    """The grammars asked of one model, each compiled once. Safe to use from many threads."""

    def __init__(self, folder: Path, end_ids: Sequence[int]) -> None:
        """For the tokenizer in a model's folder, whose turns end with one of `end_ids`."""
        self._folder = folder
        self._end_ids = tuple(end_ids)
        self._compiled = lru_cache(GRAMMARS_KEPT)(self._compile)

    def matcher(self, grammar: str, stop_ids: Sequence[int]) -> Matcher:
        """The beginning of a text. Raises RequestError if the grammar cannot be compiled."""
        return Matcher(self._compiled(grammar).deep_copy(), stop_ids, self._tokenizer.eos_tokens)

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            raise RequestError(f"the grammar cannot be compiled: {_reason(matcher)}")
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Made when first needed: a large vocabulary takes a second."""
        with boundary(RequestError, "this model's tokenizer cannot be held to a grammar"):
            tokenizer = json.loads((self._folder / "tokenizer.json").read_text())
            tokenizer |= {"padding": None, "truncation": None}
            return LLTokenizer(json.dumps(tokenizer), eos_token=list(self._end_ids) or None)


def constrain(logits_BV: Tensor, matchers: Sequence[Matcher | None]) -> Tensor:
    """The logits with minus infinity where a row's grammar forbids the token."""
    if not any(matchers):
        return logits_BV
    # The head may be wider than the tokenizer: an id without text follows no grammar.
    vocabulary = logits_BV.shape[1]
    allowed_BV = np.ones(logits_BV.shape, np.bool_)
    for row, matcher in enumerate(matchers):
        if matcher is not None:
            known_V = matcher.allowed_V[:vocabulary]
            allowed_BV[row] = False
            allowed_BV[row, : len(known_V)] = known_V
    mask_BV = torch.from_numpy(allowed_BV).to(logits_BV.device)
    return logits_BV.masked_fill(~mask_BV, float("-inf"))


def _reason(matcher: LLMatcher) -> str:
    """The first line of what llguidance says, without the place in the grammar's text."""
    first = matcher.get_error().split("\n", 1)[0]
    place, colon, rest = first.partition("): ")
    return rest if colon and place.startswith("at ") else first
