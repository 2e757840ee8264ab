"""Step batches to protobuf and back.

This runs for every token of every stream: plain deltas are written out field by field, and everything else
is in messages of its own (`DeltaEnd`, `DeltaParts`). As in `kvasir.wire.requests`, protobuf's own errors pass
through.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kvasir.core.errors import ProtocolError
from kvasir.core.kv import KvBatch, Medium, TierLoad
from kvasir.core.loads.gpu import MOST_GPUS, GpuLoad
from kvasir.core.requests import (
    Delta,
    EngineLoad,
    FinishReason,
    PositionLogprobs,
    StepBatch,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from kvasir.wire.mapping import Converter, enum, lookup, message, part
from kvasir.wire.requests import HANDOFF, NATIVE_ORDER
from kvasir.wire.v1 import kv_pb2
from kvasir.wire.v1 import requests_pb2 as pb

_TIER_MEDIA = {int(each): each for each in Medium if each is not Medium.DEVICE}


def _decode_vector(data: bytes) -> array[float] | None:
    """float32, little-endian; None for no bytes. Raises ProtocolError unless a multiple of 4 bytes."""
    if not data:
        return None
    if len(data) % 4:
        raise ProtocolError(f"embedding: {len(data)} bytes are not a multiple of 4 bytes (float32)")
    vector = array("f")
    vector.frombytes(data)
    return _swapped(vector)


def _swapped(vector: array[float]) -> array[float]:
    """Convert between this machine's byte order and the wire's."""
    if NATIVE_ORDER:
        return vector
    swapped = vector[:]
    swapped.byteswap()
    return swapped


_LOGPROB = message(TokenLogprob, pb.TokenLogprob)
_POSITION = message(PositionLogprobs, pb.PositionLogprobs, sampled=_LOGPROB, top=_LOGPROB)
_PROMPT_POSITION: Converter[PositionLogprobs | None] = Converter(
    lambda position: pb.PositionLogprobs() if position is None else _POSITION.encode(position),
    lambda m: _POSITION.decode(m) if m.HasField("sampled") else None,
)
_END = part(
    Delta,
    pb.DeltaEnd,
    finish=enum("finish", FinishReason, pb.FinishReason, unset=True),
    usage=message(Usage, pb.Usage),
    timings=message(Timings, pb.Timings),
    handoff=HANDOFF,
)
_PARTS = part(
    Delta,
    pb.DeltaParts,
    tool_calls=message(ToolCallDelta, pb.ToolCallDelta),
    prompt_logprobs=_PROMPT_POSITION,
    embedding=Converter(lambda vector: _swapped(vector).tobytes(), _decode_vector),
)
_KV = message(KvBatch, kv_pb2.KvBatch)
_TIER = message(TierLoad, pb.TierLoad, medium=Converter(int, lookup("tier", _TIER_MEDIA)))
_GPU = message(GpuLoad, pb.GpuLoad)
_LOAD = message(EngineLoad, pb.EngineLoad, tiers=_TIER, gpus=_GPU)


def _has_end(d: Delta) -> bool:
    return (
        d.last
        or d.finish is not None
        or d.usage is not None
        or d.timings is not None
        or d.handoff is not None
        or d.stop_reason is not None
        or d.error is not None
        or d.error_message is not None
        or d.reasoning_tokens > 0
    )


def _has_parts(d: Delta) -> bool:
    return bool(
        d.raw_length is not None
        or d.reasoning
        or d.tool_calls
        or d.prompt_logprobs
        or d.embedding is not None
    )


def _decode_rare(m: Any) -> Delta:
    """A delta with an end or parts."""
    return Delta(
        request_id=m.request_id,
        offset=m.offset,
        token_ids=tuple(m.token_ids),
        text=m.text,
        index=m.index,
        logprobs=tuple(map(_POSITION.decode, m.logprobs)),
        **(_END.decode(m.end) if m.HasField("end") else {}),
        **(_PARTS.decode(m.parts) if m.HasField("parts") else {}),
    )


def encode_step_batch(batch: StepBatch, target: Any) -> None:
    """Fill in an empty `StepBatch` message."""
    target.SetInParent()
    add = target.deltas.add
    for d in batch.deltas:
        m = add(request_id=d.request_id, offset=d.offset, token_ids=d.token_ids, text=d.text)
        if d.index:
            m.index = d.index
        if d.logprobs:
            for position in d.logprobs:
                _POSITION.add(m.logprobs, position)
        if _has_end(d):
            _END.fill(m.end, d)
        if _has_parts(d):
            _PARTS.fill(m.parts, d)
    if batch.kv is not None:
        _KV.fill(target.kv, batch.kv)
    if batch.load is not None:
        _LOAD.fill(target.load, batch.load)


def decode_step_batch(m: Any, positions: Sequence[int] | None = None) -> StepBatch:
    """Return one step with the deltas at `positions`, or with all deltas if None."""
    deltas: list[Delta] = []
    append = deltas.append
    for d in m.deltas if positions is None else map(m.deltas.__getitem__, positions):
        if d.HasField("end") or d.HasField("parts"):
            append(_decode_rare(d))
            continue
        logprobs = d.logprobs
        append(
            Delta(
                d.request_id,
                d.offset,
                # A slice is read in one call.
                tuple(d.token_ids[:]),
                d.text,
                d.index,
                tuple(map(_POSITION.decode, logprobs)) if logprobs else (),
            )
        )
    return StepBatch(
        tuple(deltas),
        _decode_load(m.load) if m.HasField("load") else None,
        _KV.decode(m.kv) if m.HasField("kv") else None,
    )


def _decode_load(m: Any) -> EngineLoad:
    load = _LOAD.decode(m)
    if len({tier.medium for tier in load.tiers}) < len(load.tiers):
        raise ProtocolError("a load with two tiers of one medium")
    gpus = load.gpus
    if gpus and (len(gpus) > MOST_GPUS or len({gpu.index for gpu in gpus}) < len(gpus)):
        raise ProtocolError(f"a load with two GPUs of one index, or with more than {MOST_GPUS}")
    return load
