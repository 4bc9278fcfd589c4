"""Schemas of JSON requests. Unknown fields are ignored: newer clients may send more."""

import asyncio
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from starlette.requests import ClientDisconnect, Request

from whet.config import AdamStep, explain
from whet.errors import RequestError

B = TypeVar("B", bound="Body")

NO_CLIPPING = 1e30
LARGEST_BODY = 512 * 2**20
"""Largest request body after decompression; the client splits its requests far below it."""
BODY_TIMEOUT_S = 300.0
TEN_YEARS_S = 10 * 365 * 24 * 3600

SequenceNumber = Annotated[int, Field(ge=0, lt=2**63)]
"""Sequence number of a request, counted by the client."""
TokenId = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""Token id; the model checks it against the vocabulary."""
TtlSeconds = Annotated[int, Field(ge=1, le=TEN_YEARS_S)]
"""Time to live of a checkpoint."""


class TooLarge(RequestError):
    """The request body exceeds the limit."""


class Body(BaseModel):
    """A request body; the API uses the prefix `model_`, which pydantic reserves."""

    model_config = ConfigDict(protected_namespaces=(), frozen=True)


class ClientConfig(Body):
    """Client configuration."""

    sdk_version: str = ""


class CreateSession(Body):
    """Create a session."""

    user_metadata: dict[str, JsonValue] | None = None
    display_name: str | None = None


class SessionRequest(Body):
    """A request within a session."""

    session_id: str


class Optimizer(Body):
    """Optimizer family."""

    type: str = "adamw"


class LoraShape(Body):
    """Shape of new adapters."""

    rank: Annotated[int, Field(ge=1, le=1024)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModel(SessionRequest):
    """Create a training run."""

    model_seq_id: SequenceNumber
    base_model: str
    user_metadata: dict[str, JsonValue] | None = None
    lora_config: LoraShape | None = None
    optimizer_config: Optimizer = Optimizer()


class RunRequest(Body):
    """A request of a training run, executed in the order of `seq_id`."""

    model_id: str
    seq_id: Annotated[SequenceNumber, Field(ge=1)] = 1


class AdamParams(Body):
    """Adam settings of one step."""

    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    grad_clip_norm: Annotated[float, Field(allow_inf_nan=False)] = 0.0

    def to_adam(self) -> AdamStep:
        """Convert to our config, whose own limits are narrower."""
        clip = self.grad_clip_norm if self.grad_clip_norm > 0 else NO_CLIPPING
        return AdamStep().model_copy(
            update={
                "lr": self.learning_rate,
                "beta1": self.beta1,
                "beta2": self.beta2,
                "eps": self.eps,
                "weight_decay": self.weight_decay,
                "max_grad_norm": clip,
            }
        )


class OptimStep(RunRequest):
    """Apply the accumulated gradient."""

    adam_params: AdamParams | None = None
    optimizer_params: dict[str, JsonValue] | None = None


class Save(RunRequest):
    """Save weights under a name, or unnamed for a sampler."""

    path: str | None = None
    sampling_session_seq_id: int | None = None
    ttl_seconds: TtlSeconds | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None
    age_encryption_recipients: list[str] | None = None


class Load(RunRequest):
    """Load weights into a run."""

    path: str
    optimizer: bool


class CreateSampler(SessionRequest):
    """Create a sampling client."""

    sampling_session_seq_id: SequenceNumber
    base_model: str | None = None
    model_path: str | None = None


class SamplingParams(Body):
    """Sampling parameters."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[TokenId] | list[str] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class Chunk(Body):
    """A part of a prompt."""

    type: str = "encoded_text"
    tokens: list[TokenId] = []


class Prompt(Body):
    """A prompt in parts."""

    chunks: list[Chunk]


class Tensor(Body):
    """An array; sparse if it has indices."""

    data: list[TokenId]
    shape: list[int]
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Sample(Body):
    """Sample from a prompt."""

    sampling_session_id: str
    seq_id: SequenceNumber
    num_samples: Annotated[int, Field(ge=1, le=4096)] = 1
    prompt: Prompt
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1000)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    target_prompt_logprobs: Tensor | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=1000)] = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    record_stability_info: bool | None = None


class FutureRequest(Body):
    """Retrieve or cancel a future."""

    request_id: str


class CheckpointRequest(Body):
    """A request about a checkpoint."""

    tinker_path: str


class Lifetime(Body):
    """Set the time to live of a checkpoint, from now on."""

    ttl_seconds: TtlSeconds | None = None


async def read_json(request: Request, kind: type[B]) -> B:
    """Read and validate a JSON body. Raises RequestError with the first error."""
    return parse(await read_body(request), kind)


def parse(body: bytes, kind: type[B]) -> B:
    """Validate a JSON body. Raises RequestError with the first error."""
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        raise RequestError(_explain(error)) from error


async def read_body(request: Request) -> bytes:
    """Read a body. Raises RequestError if it is too large, too slow or truncated."""
    declared = request.headers.get("content-length", "0")
    if len(declared) > 18 or int(declared) > LARGEST_BODY:
        raise build_too_large()
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > LARGEST_BODY:
                    raise build_too_large()
    except TimeoutError as error:
        raise RequestError(f"the body was not complete after {BODY_TIMEOUT_S:.0f} s") from error
    except ClientDisconnect as error:
        raise RequestError("the client disconnected before its request was complete") from error
    return b"".join(parts)


def build_too_large() -> TooLarge:
    """Build the error for a body beyond the limit, compressed or not."""
    return TooLarge(f"the body is larger than {LARGEST_BODY // 2**20} MiB")


def _explain(error: ValidationError) -> str:
    first: dict[str, Any] = dict(error.errors()[0])
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first['msg']}"
    return explain(error).replace("config key", "field", 1).replace("config section", "field", 1)
