"""Requests and step batches to protobuf and back.

The step-batch path runs for every token of every stream: it touches only what a running stream carries,
and leaves the rare rest to a message of its own (`DeltaEnd`). Functions here let protobuf's own errors
through; `kvasir.wire.codec` turns them into ProtocolError in one place.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any

from kvasir.core.errors import ProtocolError
from kvasir.core.kv import KvBatch, Medium, TierLoad
from kvasir.core.requests import (
    Continuation,
    Delta,
    EngineLoad,
    EngineRequest,
    FinishReason,
    KvHandoff,
    Leg,
    PositionLogprobs,
    Sampling,
    StepBatch,
    Timings,
    TokenLogprob,
    Usage,
)
from kvasir.wire.v1 import requests_pb2 as pb

_LEG_TO_PB = {Leg.FULL: pb.LEG_FULL, Leg.PREFILL: pb.LEG_PREFILL, Leg.DECODE: pb.LEG_DECODE}
_LEG: dict[int, Leg] = {value: leg for leg, value in _LEG_TO_PB.items()}
_FINISH_TO_PB = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.ERROR: pb.FINISH_REASON_ERROR,
}
_FINISH: dict[int, FinishReason | None] = {value: reason for reason, value in _FINISH_TO_PB.items()}
_FINISH[pb.FINISH_REASON_UNSPECIFIED] = None
_TIER: dict[int, Medium] = {medium: medium for medium in Medium if medium is not Medium.DEVICE}
_NATIVE_ORDER = sys.byteorder == "little"


def decode_enum(table: dict[int, Any], value: int, name: str) -> Any:
    """The value behind a wire number. Raises ProtocolError for one that this version does not know."""
    try:
        return table[value]
    except KeyError:
        raise ProtocolError(f"{name}: unknown value {value}") from None


def encode_tokens(tokens: array[int]) -> bytes:
    """uint32, little-endian, 4 bytes each."""
    if _NATIVE_ORDER:
        return tokens.tobytes()
    swapped = tokens[:]
    swapped.byteswap()
    return swapped.tobytes()


def decode_tokens(data: bytes) -> array[int]:
    """The opposite of encode_tokens. Raises ProtocolError when bytes are left over."""
    if len(data) % 4:
        raise ProtocolError(f"tokens: {len(data)} bytes are no whole number of uint32")
    tokens = array("I")
    tokens.frombytes(data)
    if not _NATIVE_ORDER:
        tokens.byteswap()
    return tokens


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _encode_sampling(s: Sampling) -> Any:
    return pb.Sampling(
        max_tokens=s.max_tokens,
        min_tokens=s.min_tokens,
        temperature=s.temperature,
        top_p=s.top_p,
        top_k=s.top_k,
        min_p=s.min_p,
        n=s.n,
        seed=s.seed,
        stop=s.stop,
        stop_token_ids=s.stop_token_ids,
        include_stop_str_in_output=s.include_stop_str_in_output,
        ignore_eos=s.ignore_eos,
        presence_penalty=s.presence_penalty,
        frequency_penalty=s.frequency_penalty,
        repetition_penalty=s.repetition_penalty,
        logit_bias=[pb.LogitBias(token_id=token, bias=bias) for token, bias in s.logit_bias],
        logprobs=s.logprobs,
        skip_special_tokens=s.skip_special_tokens,
    )


def _decode_sampling(m: Any) -> Sampling:
    return Sampling(
        max_tokens=_optional(m, "max_tokens"),
        min_tokens=m.min_tokens,
        temperature=m.temperature,
        top_p=m.top_p,
        top_k=m.top_k,
        min_p=m.min_p,
        n=m.n,
        seed=_optional(m, "seed"),
        stop=tuple(m.stop),
        stop_token_ids=tuple(m.stop_token_ids),
        include_stop_str_in_output=m.include_stop_str_in_output,
        ignore_eos=m.ignore_eos,
        presence_penalty=m.presence_penalty,
        frequency_penalty=m.frequency_penalty,
        repetition_penalty=m.repetition_penalty,
        logit_bias=tuple((one.token_id, one.bias) for one in m.logit_bias),
        logprobs=_optional(m, "logprobs"),
        skip_special_tokens=m.skip_special_tokens,
    )


def _encode_handoff(handoff: KvHandoff | None) -> Any:
    if handoff is None:
        return None
    return pb.KvHandoff(
        lease_id=handoff.lease_id,
        fence=handoff.fence,
        ttl_s=handoff.ttl_s,
        blocks=handoff.blocks,
        ticket=handoff.ticket,
    )


def _decode_handoff(owner: Any) -> KvHandoff | None:
    if not owner.HasField("handoff"):
        return None
    m = owner.handoff
    return KvHandoff(lease_id=m.lease_id, fence=m.fence, ttl_s=m.ttl_s, blocks=m.blocks, ticket=m.ticket)


def _encode_continuation(continuation: Continuation | None) -> Any:
    if continuation is None:
        return None
    return pb.Continuation(output_tokens=continuation.output_tokens, text_length=continuation.text_length)


def _decode_continuation(owner: Any, tokens: int) -> Continuation | None:
    if not owner.HasField("continuation"):
        return None
    m = owner.continuation
    if m.output_tokens >= tokens:
        raise ProtocolError(
            f"continuation: {m.output_tokens} of {tokens} tokens are output, and no prompt is left"
        )
    return Continuation(m.output_tokens, m.text_length)


def encode_request(request: EngineRequest) -> Any:
    """One leg as `EngineRequest`."""
    return pb.EngineRequest(
        request_id=request.request_id,
        tokens=encode_tokens(request.tokens),
        sampling=_encode_sampling(request.sampling),
        leg=_LEG_TO_PB[request.leg],
        handoff=_encode_handoff(request.handoff),
        adapter=request.adapter,
        salt=request.salt,
        priority=request.priority,
        data_parallel_rank=request.data_parallel_rank,
        trace_context=request.trace_context,
        continuation=_encode_continuation(request.continuation),
        tier_tokens=request.tier_tokens,
    )


def decode_request(m: Any) -> EngineRequest:
    """One leg. Raises ProtocolError for malformed tokens, an unknown leg, missing sampling, or a continuation
    without a prompt."""
    if not m.request_id or not m.HasField("sampling"):
        raise ProtocolError("a request needs request_id and sampling")
    tokens = decode_tokens(m.tokens)
    return EngineRequest(
        request_id=m.request_id,
        tokens=tokens,
        sampling=_decode_sampling(m.sampling),
        leg=decode_enum(_LEG, m.leg, "leg"),
        handoff=_decode_handoff(m),
        adapter=_optional(m, "adapter"),
        salt=m.salt,
        priority=m.priority,
        data_parallel_rank=_optional(m, "data_parallel_rank"),
        trace_context=m.trace_context,
        continuation=_decode_continuation(m, len(tokens)),
        tier_tokens=m.tier_tokens,
    )


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
        target.handoff.CopyFrom(_encode_handoff(delta.handoff))


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
    )


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


def _decode_logprobs(m: Any) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(_decode_logprob(position.sampled), tuple(map(_decode_logprob, position.top)))
        for position in m
    )


def _decode_ending(m: Any) -> Delta:
    end = m.end
    return Delta(
        request_id=m.request_id,
        offset=m.offset,
        token_ids=tuple(m.token_ids),
        text=m.text,
        index=m.index,
        logprobs=_decode_logprobs(m.logprobs),
        finish=decode_enum(_FINISH, end.finish, "finish"),
        stop_reason=_optional(end, "stop_reason"),
        last=end.last,
        usage=_decode_usage(end),
        timings=_decode_timings(end),
        handoff=_decode_handoff(end),
        error=_optional(end, "error"),
        error_message=_optional(end, "error_message"),
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
            m.logprobs.extend(
                pb.PositionLogprobs(
                    sampled=_encode_logprob(position.sampled), top=map(_encode_logprob, position.top)
                )
                for position in d.logprobs
            )
        if _has_end(d):
            _encode_end(m.end, d)
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


def decode_step_batch(m: Any) -> StepBatch:
    """One step."""
    deltas: list[Delta] = []
    append = deltas.append
    for d in m.deltas:
        if d.HasField("end"):
            append(_decode_ending(d))
            continue
        logprobs = d.logprobs
        append(
            Delta(
                d.request_id,
                d.offset,
                tuple(d.token_ids),
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
