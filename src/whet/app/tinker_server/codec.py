"""Protocol buffers of Tinker's API, as defined in the pinned `tinker` package."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import zstandard
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tinker.proto import tinker_public_pb2 as pb

from whet.app.tinker_server.backend import Sampled
from whet.app.tinker_server.schemas import LARGEST_BODY, build_too_large
from whet.engines.scorer import TokenScores
from whet.errors import RequestError
from whet.trainers.tinker_datums import Datum, DatumResult, Floats

N = TypeVar("N", bound=np.generic)

Ids = NDArray[np.int64]

MEDIA_TYPE = "application/x-protobuf"
MASKED = -99999.0
"""Log-probability of an unused position among the top k."""
TARGETS = "target_tokens"
LARGEST_SPARSE = 2**26
"""Most entries of a sparse tensor, which a small body could make huge."""

_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}


def parse_pass(body: bytes, encoding: str) -> pb.ForwardBackwardRequest:
    """Parse a forward_backward request. Raises RequestError if it is invalid."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(_decompress(body, encoding))
    except (DecodeError, zstandard.ZstdError) as error:
        raise RequestError(f"the body is not a ForwardBackwardRequest: {error}") from error
    if message.seq_id < 1:
        raise RequestError(f"invalid seq_id {message.seq_id}: the first is 1")
    return message


def _decompress(body: bytes, encoding: str) -> bytes:
    if encoding not in ("", "identity", "zstd"):
        raise RequestError(f"unknown content-encoding {encoding!r:.40}: expected zstd")
    if encoding != "zstd":
        return body
    # The decompressor allocates what the frame declares before it applies its limit.
    if zstandard.frame_content_size(body) > LARGEST_BODY:
        raise build_too_large()
    return zstandard.ZstdDecompressor().decompress(body, max_output_size=LARGEST_BODY)


def decode_data(message: pb.ForwardBackwardRequest) -> list[Datum]:
    """Decode the data of a request. Raises RequestError if it is invalid."""
    return [_decode_datum(datum, index) for index, datum in enumerate(message.data)]


def decode_settings(message: pb.ForwardBackwardRequest) -> dict[str, float]:
    """Decode the settings of the loss. Raises RequestError for a text value."""
    found = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        if value.WhichOneof("value") == "text":
            raise RequestError(f"the loss setting {name!r} is text: expected a number")
        found[name] = value.number
    return found


def encode_pass(passed: DatumResult) -> bytes:
    """Encode the result of a pass, grouping arrays of one trailing shape."""
    output = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    output.metrics["loss:sum"] = passed.loss
    groups: list[list[Floats]] = []
    for logprobs in passed.logprobs:
        if not groups or groups[-1][0].shape[1:] != logprobs.shape[1:]:
            groups.append([])
        groups[-1].append(logprobs)
    for group in groups:
        ends = np.cumsum([0, *(logprobs.nbytes for logprobs in group)], dtype=np.int64)
        record = output.loss_fn_outputs.add(num_datums=len(group))
        record.fields["logprobs"].CopyFrom(
            pb.BatchedTensor(
                data=b"".join(logprobs.tobytes() for logprobs in group),
                offsets=ends.tobytes(),
                dtype=pb.DTYPE_FLOAT32,
                trailing_shape=group[0].shape[1:],
            )
        )
    return output.SerializeToString()


class PromptReply(NamedTuple):
    """Scores of a prompt, and which of them go into the reply."""

    scores: TokenScores
    logprobs: bool
    last: int | None
    """Number of tokens at the end that get log-probabilities; all if None."""
    wanted: NDArray[np.bool_] | None
    """Mask of the requested targets."""
    is_sparse: bool = False
    """Whether the targets were requested as a sparse tensor; the reply has the same layout."""


def encode_sample(sampled: Sequence[Sampled], top: int, prompt: PromptReply | None) -> bytes:
    """Encode sampled sequences with the requested scores of their prompt."""
    output = pb.SampleResponse()
    for one in sampled:
        sequence = output.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if one.stop == "stop" else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(one.tokens, np.int32).tobytes(),
            logprobs=np.asarray(one.logprobs, np.float32).tobytes(),
        )
        if top:
            sequence.topk_sampled_logprobs.CopyFrom(_encode_top_lists(one.top, top))
    if prompt is not None:
        _add_prompt(output, prompt)
    return output.SerializeToString()


def _add_prompt(output: pb.SampleResponse, prompt: PromptReply) -> None:
    scores = prompt.scores
    hidden = 1 if prompt.last is None else len(scores.chosen) + 1 - prompt.last
    if prompt.logprobs:
        chosen = np.concatenate([[math.nan], scores.chosen]).astype(np.float32)
        chosen[:hidden] = math.nan
        output.prompt_logprobs = chosen.tobytes()
    ids, values = scores.top
    if ids.shape[1]:
        ids = np.pad(ids, ((1, 0), (0, 0)))
        values = np.pad(values, ((1, 0), (0, 0)))
        ids[:hidden], values[:hidden] = 0, MASKED
        output.topk_prompt_logprobs.CopyFrom(_encode_top(ids, values))
    if prompt.wanted is not None:
        found = np.where(prompt.wanted, scores.targets, np.float32(0))
        if prompt.is_sparse:
            tensor = _encode_sparse(found, prompt.wanted)
        else:
            tensor = _encode_tensor(found, pb.DTYPE_FLOAT32)
        output.target_prompt_logprobs.CopyFrom(tensor)
    drawn, logprobs = scores.sampled
    if drawn.shape[1]:
        output.prompt_alt_tokens.tokens.CopyFrom(_encode_tensor(drawn, pb.DTYPE_INT64))
        output.prompt_alt_tokens.logprobs.CopyFrom(_encode_tensor(logprobs, pb.DTYPE_FLOAT32))


def _encode_top_lists(tops: Sequence[Sequence[tuple[int, float]]], k: int) -> pb.TopkLogprobs:
    ids = np.zeros((len(tops), k), np.int64)
    values = np.full((len(tops), k), MASKED, np.float32)
    for index, top in enumerate(tops):
        for rank, (token, logprob) in enumerate(top[:k]):
            ids[index, rank], values[index, rank] = token, logprob
    return _encode_top(ids, values)


def _encode_top(ids: Ids, values: Floats) -> pb.TopkLogprobs:
    return pb.TopkLogprobs(
        token_ids=ids.astype(np.int32).tobytes(),
        logprobs=values.astype(np.float32).tobytes(),
        k=ids.shape[1],
        length=len(ids),
    )


def _encode_tensor(values: Floats | Ids, dtype: pb.DType.ValueType) -> pb.Tensor:
    return pb.Tensor(dense=values.tobytes(), dtype=dtype, shape=values.shape)


def _encode_sparse(values: Floats, listed: NDArray[np.bool_]) -> pb.Tensor:
    """Encode the listed cells as CSR."""
    ends = np.concatenate([[0], np.cumsum(listed.sum(1))]).astype(np.int64)
    csr = pb.SparseCsr(
        values=values[listed].astype(np.float32).tobytes(),
        crow_indices=ends.tobytes(),
        col_indices=np.nonzero(listed)[1].astype(np.int64).tobytes(),
    )
    return pb.Tensor(sparse_csr=csr, dtype=pb.DTYPE_FLOAT32, shape=values.shape)


def _decode_datum(datum: pb.Datum, index: int) -> Datum:
    tokens: list[int] = []
    for chunk in datum.model_input:
        if chunk.WhichOneof("chunk") != "encoded_text":
            raise RequestError(f"datum {index} has images or audio: only text is supported")
        packed = chunk.encoded_text.tokens
        if len(packed) % 4:
            raise RequestError(f"datum {index} has invalid tokens: {len(packed)} bytes")
        tokens += _decode_array(packed, pb.DTYPE_INT32).tolist()
    inputs = {name: _decode_tensor(tensor, index) for name, tensor in datum.loss_fn_inputs.items()}
    if TARGETS not in inputs:
        raise RequestError(f"datum {index} has no {TARGETS}")
    targets = inputs.pop(TARGETS)
    if not np.issubdtype(targets.dtype, np.integer):
        raise RequestError(f"datum {index} has {TARGETS} of {targets.dtype}; expected int64")
    return Datum(
        tuple(tokens),
        targets.astype(np.int64),
        {name: one.astype(np.float32) for name, one in inputs.items()},
    )


def _decode_tensor(tensor: pb.Tensor, index: int) -> NDArray[np.generic]:
    shape = tuple(tensor.shape)
    try:
        if tensor.WhichOneof("encoding") == "sparse_csr":
            return _decode_sparse(tensor, shape)
        values = _decode_array(tensor.dense, tensor.dtype)
        return values.reshape(shape) if shape else values
    except (ValueError, IndexError, KeyError) as error:
        raise RequestError(f"datum {index} has an invalid tensor: {error}") from error


def _decode_sparse(tensor: pb.Tensor, shape: tuple[int, ...]) -> NDArray[np.generic]:
    values = _decode_array(tensor.sparse_csr.values, tensor.dtype)
    ends = _decode_array(tensor.sparse_csr.crow_indices, pb.DTYPE_INT64).astype(np.int64)
    columns = _decode_array(tensor.sparse_csr.col_indices, pb.DTYPE_INT64).astype(np.int64)
    return expand_sparse(shape, ends, columns, values, fill=0)


def expand_sparse(
    shape: Sequence[int], ends: Ids, columns: Ids, values: NDArray[N], *, fill: int
) -> NDArray[N]:
    """Expand a CSR matrix. Raises ValueError or IndexError if it is invalid or too large."""
    rows, width = shape
    if rows * width > LARGEST_SPARSE:
        raise ValueError(f"{rows} by {width} entries are more than {LARGEST_SPARSE}")
    dense = np.full((rows, width), fill, values.dtype)
    dense[np.repeat(np.arange(rows), np.diff(ends)), columns] = values
    return dense


def _decode_array(data: bytes, dtype: pb.DType.ValueType) -> NDArray[np.generic]:
    return np.frombuffer(data, _DTYPES[dtype])
