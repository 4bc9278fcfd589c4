"""What was sampled: exact tokens and where they came from."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from struct import Struct
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from whet.types.work import AttemptId, CallId, GenerationId, Value


class Sampling(Value):
    """How to sample one continuation."""

    temperature: Annotated[float, Field(ge=0, le=10)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 is off."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """`None` samples until the model stops or its context is full."""
    stop: tuple[str, ...] = ()
    """Sampling ends once the text contains one of these; the tokens keep it."""
    stop_ids: tuple[int, ...] = ()
    """Sampling ends with one of these ids, which is kept as the last token."""
    seed: int | None = None
    """There is no default seed: equal requests give different samples."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    grammar: str | None = None
    """What the text must follow: Lark text in llguidance's dialect, where `%json {...}` is a JSON
    schema. A stop id may come exactly where the text is complete. Log-probabilities are then those
    of the masked distribution, which no trainer can reproduce: constrained generations are context.
    An engine that cannot constrain refuses."""


StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens as they leave the engine. The last piece of a generation has a stop reason."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of `tokens`, under the distribution they were sampled from."""
    versions: tuple[int, ...]
    """Of the weights that sampled each of them."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the likeliest ids with their log-probabilities, if asked for."""
    stop: StopReason | None = None


def join_pieces(pieces: Sequence[Piece]) -> Piece:
    """Pieces that follow each other, of which there is at least one, as one."""
    if len(pieces) == 1:
        return pieces[0]
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    top: list[tuple[tuple[int, float], ...]] = []
    for piece in pieces:  # as many as tokens, perhaps, and faster than any chain of iterators
        tokens += piece.tokens
        logprobs += piece.logprobs
        versions += piece.versions
        if piece.top:
            top += piece.top
    stop = pieces[-1].stop
    return Piece(tuple(tokens), tuple(logprobs), tuple(versions), tuple(top), stop=stop)


class Generation(Value):
    """What one choice of a call sampled: exact tokens, never text encoded again."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of `tokens`, under the distribution they were sampled from."""
    versions: tuple[int, ...]
    """Of the weights that sampled each token."""
    stop: StopReason
    sampling: Sampling
    message: dict[str, JsonValue]
    """The assistant message the agent was given, in canonical form."""

    @model_validator(mode="after")
    def _one_of_each_per_token(self) -> Self:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"{len(self.tokens)} tokens but {len(self.logprobs)} logprobs "
                f"and {len(self.versions)} versions"
            )
        return self


class Fork(StrEnum):
    """Why a call does not simply continue the newest turn of its attempt's conversation."""

    NEW_CONVERSATION = "new_conversation"
    """It begins differently: a sub-agent, a side call."""
    RESAMPLED = "resampled"
    """The same prompt once more."""
    BRANCH = "branch"
    """A turn that was continued before is continued in another way."""
    OTHER_TOOLS = "other_tools"
    """The same messages under other tools or another model name: another prompt from the start."""
    EDITED_HISTORY = "edited_history"
    """An earlier turn came back changed, left out or summed up."""
    THINKING_DROPPED = "thinking_dropped"
    """The template leaves out earlier thinking from here on."""
    TEMPLATE = "template"
    """The template cannot continue this turn: the call is rendered whole."""


class Origin(Value):
    """Where a call came from, and how its prompt came about."""

    dialect: str = "chat"
    """The wire format it came in."""
    model: str = ""
    """The name the agent asked for."""
    agent: str = ""
    """Which of several agents in the attempt asked, if it said so."""
    tools: tuple[str, ...] = ()
    """Names of the tools it was offered."""
    request: str = ""
    """Digest of the request: a retry of it is answered from this call."""
    fork: Fork | None = None
    lossy: bool = False
    """An earlier turn came back without its text or thinking; its sampled tokens stand."""
    shown: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """What the wire format needs to show the call again."""


class Call(Value):
    """One model request of an attempt.

    The prompt the engine saw is the parent generation's whole sequence followed by `context`;
    storing only the difference keeps a conversation of T turns at O(T).
    """

    id: CallId
    attempt: AttemptId
    parent: GenerationId | None
    """The generation this request continues, or None where the conversation begins."""
    root: str
    """Digest of what the whole conversation hangs on: policy, tools, template arguments."""
    messages: tuple[dict[str, JsonValue], ...]
    """The canonical messages after the parent's."""
    context: tuple[int, ...]
    """The tokens after the parent's: rendered, never sampled."""
    prompt_length: int
    prompt_digest: str
    """Of the ids the engine was given; rows are proven against it."""
    generations: tuple[Generation, ...]
    created: float
    """Seconds since the epoch."""
    origin: Origin = Origin()

    def generation_id(self, index: int) -> GenerationId:
        return GenerationId(f"{self.id}.{index}")


_numbers = lru_cache(1024)(Struct)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Four bytes each, little-endian; a larger number is a struct.error."""
    return _numbers(f"<{len(tokens)}i").pack(*tokens)


def digest_tokens(tokens: Sequence[int], after: hashlib.blake2b | None = None) -> hashlib.blake2b:
    """The running digest of `tokens` after those of `after`, which is left as it was."""
    digest = after.copy() if after else hashlib.blake2b(digest_size=16)
    digest.update(pack_tokens(tokens))
    return digest
