"""Model calls: sampling parameters, sampled tokens, and the origin of each call."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from struct import Struct
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from whet.types.rollouts import AttemptId, CallId, GenerationId, Value


class Sampling(Value):
    """Sampling parameters of one generation."""

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
    """Grammar that constrains the text: Lark in llguidance's dialect, where `%json {...}` is a JSON
    schema; a stop id is allowed only where the text is complete. Log-probabilities are then those
    of the masked distribution, which no trainer can reproduce, so constrained generations are
    context, never trained. An engine without grammar support raises RequestError."""


StopReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Tokens as the engine yields them. The last chunk of a generation has a stop reason."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token under the distribution it was sampled from."""
    versions: tuple[int, ...]
    """Policy version that sampled each token."""
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the most likely ids with their log-probabilities, if requested."""
    stop: StopReason | None = None


def join_chunks(chunks: Sequence[TokenChunk]) -> TokenChunk:
    """Concatenate consecutive chunks, at least one, into one."""
    if len(chunks) == 1:
        return chunks[0]
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[int] = []
    top: list[tuple[tuple[int, float], ...]] = []
    for chunk in chunks:  # up to one per token: faster than chained iterators
        tokens += chunk.tokens
        logprobs += chunk.logprobs
        versions += chunk.versions
        if chunk.top:
            top += chunk.top
    stop = chunks[-1].stop
    return TokenChunk(tuple(tokens), tuple(logprobs), tuple(versions), tuple(top), stop=stop)


class Generation(Value):
    """The exact tokens that one choice of a call sampled; never re-encoded text."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each token under the distribution it was sampled from."""
    versions: tuple[int, ...]
    """Policy version that sampled each token."""
    stop: StopReason
    sampling: Sampling
    message: dict[str, JsonValue]
    """The assistant message returned to the agent, in canonical form."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if not len(self.tokens) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"{len(self.tokens)} tokens but {len(self.logprobs)} logprobs "
                f"and {len(self.versions)} versions"
            )
        return self


class Fork(StrEnum):
    """Reason why a call does not continue the newest turn of its attempt's conversation."""

    NEW_CONVERSATION = "new_conversation"
    """A prompt with another beginning: a sub-agent, a side call."""
    RESAMPLED = "resampled"
    """The same prompt again."""
    BRANCH = "branch"
    """A turn that was continued before is continued differently."""
    OTHER_TOOLS = "other_tools"
    """The same messages with other tools or another model name, hence another prompt."""
    EDITED_HISTORY = "edited_history"
    """An earlier turn was changed, omitted or summarized."""
    THINKING_DROPPED = "thinking_dropped"
    """The template drops earlier thinking from this turn on."""
    TEMPLATE = "template"
    """The template cannot continue this turn: the prompt is rendered from the beginning."""


class Omission(StrEnum):
    """A part of requests that a chat template leaves out of the prompt, or of a reply."""

    SYSTEM = "system message"
    LATE_SYSTEM = "late system message"
    USER = "user message before another"
    CALL_TEXT = "text beside a tool call"
    SECOND_CALL = "second tool call of a turn"
    LONE_RESULT = "tool result without its call"
    NAME = "name of a message"
    HIDDEN_CALL = "tool call beyond the one that the agent allowed"


class Origin(Value):
    """Source of a call: wire format, agent, request digest, and how its prompt was built."""

    dialect: str = "chat"
    """Wire format of the request."""
    model: str = ""
    """Model name in the request."""
    policy: str = ""
    """Name of the policy that sampled it, in a run of several."""
    agent: str = ""
    """Name of the agent within the attempt, if the request names one."""
    tools: tuple[str, ...] = ()
    """Names of the tools offered."""
    request: str = ""
    """Digest of the request body: a retry of it is answered from this call."""
    fork: Fork | None = None
    lossy: bool = False
    """An echoed turn lacked its text or thinking, whose sampled tokens are kept in the prompt; or a
    tool result had an image, which the prompt lacks."""
    omitted: tuple[Omission, ...] = ()
    """What the chat template leaves out of the request's own messages."""
    shown: dict[str, JsonValue] = Field(default_factory=dict[str, JsonValue])
    """Fields that the wire format needs to return the call again."""


class Call(Value):
    """One model request of an attempt.

    The prompt the engine saw is the parent generation's whole sequence followed by
    `prompt_suffix`; storing only that keeps a conversation of T turns at O(T).
    """

    id: CallId
    attempt: AttemptId
    parent: GenerationId | None
    """The generation this request continues, or None where the conversation begins."""
    root: str
    """Digest of what the whole conversation depends on: policy, tools, template arguments."""
    messages: tuple[dict[str, JsonValue], ...]
    """The canonical messages after the parent's."""
    prompt_suffix: tuple[int, ...]
    """The tokens after the parent's: rendered, never sampled."""
    prompt_length: int
    prompt_digest: str
    """Digest of the prompt ids sent to the engine; rows are proven against it."""
    generations: tuple[Generation, ...]
    created: float
    """Seconds since the epoch."""
    origin: Origin = Origin()

    def generation_id(self, index: int) -> GenerationId:
        return GenerationId(f"{self.id}.{index}")

    @property
    def generations_by_id(self) -> dict[GenerationId, Generation]:
        """The generations in order, by their ids."""
        return {self.generation_id(index): each for index, each in enumerate(self.generations)}


_struct = lru_cache(1024)(Struct)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Pack ids as little-endian int32; a larger number raises struct.error."""
    return _struct(f"<{len(tokens)}i").pack(*tokens)


def digest_tokens(tokens: Sequence[int], after: hashlib.blake2b | None = None) -> hashlib.blake2b:
    """Return the digest of `tokens` appended to those of `after`, which is not modified."""
    digest = after.copy() if after else hashlib.blake2b(digest_size=16)
    digest.update(pack_tokens(tokens))
    return digest
