"""Step batches to protobuf and back.

This runs for every token of every stream: it touches only what a running stream carries, and leaves the rare
rest to messages of their own (`DeltaEnd`, `DeltaParts`). As in `kvasir.wire.requests`, protobuf's own errors
pass through.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from kvasir.core.errors import ProtocolError
from kvasir.core.kv import KvBatch, Medium, TierLoad
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
from kvasir.wire.requests import (
    NATIVE_ORDER,
    decode_enum,
    decode_handoff,
    encode_handoff,
    optional,
)
from kvasir.wire.v1 import requests_pb2 as pb

_FINISH_TO_PB = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH: dict[int, FinishReason | None] = {value: reason for reason, value in _FINISH_TO_PB.items()}
_FINISH[pb.FINISH_REASON_UNSPECIFIED] = None
_TIER: dict[int, Medium] = {medium: medium for medium in Medium if medium is not Medium.DEVICE}


def _encode_logprob(one: TokenLogprob) -> Any:
    return pb.TokenLogprob(token_id=one.token_id, token=one.token, logprob=one.logprob)


def _decode_logprob(m: Any) -> TokenLogprob:
    return TokenLogprob(m.token_id, m.token, m.logprob)


def _encode_end(target: Any, delta: Delta) -> None:
    target.SetInParent()
    target.last = delta.last
    if delta.finish is not None:
        target.finish = _FINISH_TO_PB[delta.finish]
    for field in ("stop_reason", "error", "error_message"):
        value = getattr(delta, field)
        if value is not None:
            setattr(target, field, value)
    if (usage := delta.usage) is not None:
        target.usage.CopyFrom(
            pb.Usage(
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                transferred_tokens=usage.transferred_tokens,
                transferred_bytes=usage.transferred_bytes,
                output_tokens=usage.output_tokens,
                tier_tokens=usage.tier_tokens,
            )
        )
    if (timings := delta.timings) is not None:
        target.timings.CopyFrom(
            pb.Timings(
                queue_s=timings.queue_s,
                prefill_s=timings.prefill_s,
                transfer_s=timings.transfer_s,
                decode_s=timings.decode_s,
                tier_s=timings.tier_s,
            )
        )
    if delta.handoff is not None:
        target.handoff.CopyFrom(encode_handoff(delta.handoff))
    target.reasoning_tokens = delta.reasoning_tokens


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


def _encode_parts(target: Any, d: Delta) -> None:
    target.SetInParent()
    target.reasoning = d.reasoning
    for call in d.tool_calls:
        target.tool_calls.add(
            index=call.index, call_id=call.call_id, name=call.name, arguments=call.arguments
        )
    if d.raw_length is not None:
        target.raw_length = d.raw_length
    for position in d.prompt_logprobs:
        added = target.prompt_logprobs.add()
        if position is not None:
            added.CopyFrom(_encode_position(position))
    if d.embedding is not None:
        target.embedding = _floats(d.embedding).tobytes()


def _parts(m: Any) -> dict[str, Any]:
    """The fields of a delta that `parts` carries."""
    vector = None
    if m.embedding:
        if len(m.embedding) % 4:
            raise ProtocolError(f"embedding: {len(m.embedding)} bytes are no whole number of float32")
        vector = array("f")
        vector.frombytes(m.embedding)
        vector = _floats(vector)
    return {
        "reasoning": m.reasoning,
        "tool_calls": tuple(
            ToolCallDelta(call.index, call.call_id, call.name, call.arguments) for call in m.tool_calls
        ),
        "raw_length": optional(m, "raw_length"),
        "prompt_logprobs": tuple(
            _decode_position(position) if position.HasField("sampled") else None
            for position in m.prompt_logprobs
        ),
        "embedding": vector,
    }


def _floats(vector: array[float]) -> array[float]:
    """From this machine's order of bytes to the wire's, or back."""
    if NATIVE_ORDER:
        return vector
    swapped = vector[:]
    swapped.byteswap()
    return swapped


def _decode_usage(end: Any) -> Usage | None:
    if not end.HasField("usage"):
        return None
    m = end.usage
    return Usage(
        prompt_tokens=m.prompt_tokens,
        cached_tokens=m.cached_tokens,
        transferred_tokens=m.transferred_tokens,
        transferred_bytes=m.transferred_bytes,
        output_tokens=m.output_tokens,
        tier_tokens=m.tier_tokens,
    )


def _decode_timings(end: Any) -> Timings | None:
    if not end.HasField("timings"):
        return None
    m = end.timings
    return Timings(
        queue_s=m.queue_s,
        prefill_s=m.prefill_s,
        transfer_s=m.transfer_s,
        decode_s=m.decode_s,
        tier_s=m.tier_s,
    )


def _encode_position(position: PositionLogprobs) -> Any:
    return pb.PositionLogprobs(
        sampled=_encode_logprob(position.sampled), top=map(_encode_logprob, position.top)
    )


def _decode_position(m: Any) -> PositionLogprobs:
    return PositionLogprobs(_decode_logprob(m.sampled), tuple(map(_decode_logprob, m.top)))


def _decode_logprobs(m: Sequence[Any]) -> tuple[PositionLogprobs, ...]:
    return tuple(map(_decode_position, m))


def _decode_rare(m: Any) -> Delta:
    """A delta that is more than content of a running stream."""
    end = m.end
    return Delta(
        request_id=m.request_id,
        offset=m.offset,
        token_ids=tuple(m.token_ids),
        text=m.text,
        index=m.index,
        logprobs=_decode_logprobs(m.logprobs),
        finish=decode_enum(_FINISH, end.finish, "finish"),
        stop_reason=optional(end, "stop_reason"),
        last=end.last,
        usage=_decode_usage(end),
        timings=_decode_timings(end),
        handoff=decode_handoff(end),
        error=optional(end, "error"),
        error_message=optional(end, "error_message"),
        reasoning_tokens=end.reasoning_tokens,
        **(_parts(m.parts) if m.HasField("parts") else {}),
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
            m.logprobs.extend(map(_encode_position, d.logprobs))
        if _has_end(d):
            _encode_end(m.end, d)
        if _has_parts(d):
            _encode_parts(m.parts, d)
    if (kv := batch.kv) is not None:
        target.kv.SetInParent()
        target.kv.epoch, target.kv.sequence, target.kv.log = kv.epoch, kv.sequence, kv.log
    if (load := batch.load) is not None:
        target.load.CopyFrom(
            pb.EngineLoad(
                running=load.running,
                waiting=load.waiting,
                kv_usage=load.kv_usage,
                kv_blocks_total=load.kv_blocks_total,
                kv_blocks_leased=load.kv_blocks_leased,
                prefix_queries_tokens=load.prefix_queries_tokens,
                prefix_hits_tokens=load.prefix_hits_tokens,
                transfer_bytes_received=load.transfer_bytes_received,
                transfers_received=load.transfers_received,
                transfers_failed=load.transfers_failed,
                preemptions=load.preemptions,
                speculated_tokens=load.speculated_tokens,
                accepted_tokens=load.accepted_tokens,
                swapped_in=load.swapped_in,
                recomputed=load.recomputed,
                tiers=map(_encode_tier, load.tiers),
            )
        )


def _encode_tier(tier: TierLoad) -> Any:
    return pb.TierLoad(
        medium=tier.medium,
        blocks=tier.blocks,
        bytes_used=tier.bytes_used,
        bytes_capacity=tier.bytes_capacity,
        loads=tier.loads,
        loaded_blocks=tier.loaded_blocks,
        loaded_bytes=tier.loaded_bytes,
        load_s=tier.load_s,
        stored_blocks=tier.stored_blocks,
        stored_bytes=tier.stored_bytes,
        evicted_blocks=tier.evicted_blocks,
        corrupt_blocks=tier.corrupt_blocks,
        dropped_blocks=tier.dropped_blocks,
        failures=tier.failures,
        trouble=tier.trouble,
        readable=tier.readable,
    )


def decode_step_batch(m: Any, positions: Sequence[int] | None = None) -> StepBatch:
    """One step; of its deltas only those at `positions`, unless None."""
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
                # As a slice they come in one call.
                tuple(d.token_ids[:]),
                d.text,
                d.index,
                _decode_logprobs(logprobs) if logprobs else (),
            )
        )
    return StepBatch(
        tuple(deltas),
        _decode_load(m.load) if m.HasField("load") else None,
        KvBatch(m.kv.epoch, m.kv.sequence, m.kv.log) if m.HasField("kv") else None,
    )


def _decode_load(m: Any) -> EngineLoad:
    return EngineLoad(
        running=m.running,
        waiting=m.waiting,
        kv_usage=m.kv_usage,
        kv_blocks_total=m.kv_blocks_total,
        kv_blocks_leased=m.kv_blocks_leased,
        prefix_queries_tokens=m.prefix_queries_tokens,
        prefix_hits_tokens=m.prefix_hits_tokens,
        transfer_bytes_received=m.transfer_bytes_received,
        transfers_received=m.transfers_received,
        transfers_failed=m.transfers_failed,
        preemptions=m.preemptions,
        speculated_tokens=m.speculated_tokens,
        accepted_tokens=m.accepted_tokens,
        swapped_in=m.swapped_in,
        recomputed=m.recomputed,
        tiers=_decode_tiers(m.tiers) if m.tiers else (),
    )


def _decode_tiers(m: Any) -> tuple[TierLoad, ...]:
    tiers = tuple(map(_decode_tier, m))
    if len({tier.medium for tier in tiers}) < len(tiers):
        raise ProtocolError("a load with two tiers of one medium")
    return tiers


def _decode_tier(m: Any) -> TierLoad:
    return TierLoad(
        medium=decode_enum(_TIER, m.medium, "tier"),
        blocks=m.blocks,
        bytes_used=m.bytes_used,
        bytes_capacity=m.bytes_capacity,
        loads=m.loads,
        loaded_blocks=m.loaded_blocks,
        loaded_bytes=m.loaded_bytes,
        load_s=m.load_s,
        stored_blocks=m.stored_blocks,
        stored_bytes=m.stored_bytes,
        evicted_blocks=m.evicted_blocks,
        corrupt_blocks=m.corrupt_blocks,
        dropped_blocks=m.dropped_blocks,
        failures=m.failures,
        trouble=m.trouble,
        readable=m.readable,
    )
