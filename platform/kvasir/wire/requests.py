"""Requests to protobuf and back.

Functions here let protobuf's own errors through; `kvasir.wire.codec` turns them into ProtocolError in one
place.
"""

from __future__ import annotations

import sys
from array import array
from typing import Any

from kvasir.core.errors import ProtocolError
from kvasir.core.requests import (
    Constraint,
    Continuation,
    EngineRequest,
    KvHandoff,
    Leg,
    OutputParsing,
    Sampling,
    StructuredOutput,
)
from kvasir.wire.v1 import requests_pb2 as pb

_LEG_TO_PB = {
    Leg.FULL: pb.LEG_FULL,
    Leg.PREFILL: pb.LEG_PREFILL,
    Leg.DECODE: pb.LEG_DECODE,
    Leg.EMBED: pb.LEG_EMBED,
}
_LEG: dict[int, Leg] = {value: leg for leg, value in _LEG_TO_PB.items()}
_CONSTRAINT_TO_PB = {
    Constraint.JSON_OBJECT: pb.CONSTRAINT_JSON_OBJECT,
    Constraint.JSON_SCHEMA: pb.CONSTRAINT_JSON_SCHEMA,
    Constraint.REGEX: pb.CONSTRAINT_REGEX,
    Constraint.CHOICE: pb.CONSTRAINT_CHOICE,
    Constraint.GRAMMAR: pb.CONSTRAINT_GRAMMAR,
    Constraint.STRUCTURAL_TAG: pb.CONSTRAINT_STRUCTURAL_TAG,
}
_CONSTRAINT: dict[int, Constraint] = {value: one for one, value in _CONSTRAINT_TO_PB.items()}
NATIVE_ORDER = sys.byteorder == "little"


def decode_enum(table: dict[int, Any], value: int, name: str) -> Any:
    """The value behind a wire number. Raises ProtocolError for one that this version does not know."""
    try:
        return table[value]
    except KeyError:
        raise ProtocolError(f"{name}: unknown value {value}") from None


def encode_tokens(tokens: array[int]) -> bytes:
    """uint32, little-endian, 4 bytes each."""
    if NATIVE_ORDER:
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
    if not NATIVE_ORDER:
        tokens.byteswap()
    return tokens


def optional(message: Any, field: str) -> Any:
    """A field that may be unset: None then."""
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
        spaces_between_special_tokens=s.spaces_between_special_tokens,
        allowed_token_ids=s.allowed_token_ids,
        bad_words=s.bad_words,
        prompt_logprobs=s.prompt_logprobs,
        thinking_tokens=s.thinking_tokens,
        structured=_encode_structured(s.structured),
    )


def _decode_sampling(m: Any) -> Sampling:
    return Sampling(
        max_tokens=optional(m, "max_tokens"),
        min_tokens=m.min_tokens,
        temperature=m.temperature,
        top_p=m.top_p,
        top_k=m.top_k,
        min_p=m.min_p,
        n=m.n,
        seed=optional(m, "seed"),
        stop=tuple(m.stop),
        stop_token_ids=tuple(m.stop_token_ids),
        include_stop_str_in_output=m.include_stop_str_in_output,
        ignore_eos=m.ignore_eos,
        presence_penalty=m.presence_penalty,
        frequency_penalty=m.frequency_penalty,
        repetition_penalty=m.repetition_penalty,
        logit_bias=tuple((one.token_id, one.bias) for one in m.logit_bias),
        logprobs=optional(m, "logprobs"),
        skip_special_tokens=m.skip_special_tokens,
        spaces_between_special_tokens=m.spaces_between_special_tokens,
        allowed_token_ids=tuple(m.allowed_token_ids),
        bad_words=tuple(m.bad_words),
        prompt_logprobs=optional(m, "prompt_logprobs"),
        thinking_tokens=optional(m, "thinking_tokens"),
        structured=_decode_structured(m),
    )


def _encode_structured(structured: StructuredOutput | None) -> Any:
    if structured is None:
        return None
    return pb.Structured(constraint=_CONSTRAINT_TO_PB[structured.constraint], spec=structured.spec)


def _decode_structured(owner: Any) -> StructuredOutput | None:
    if not owner.HasField("structured"):
        return None
    m = owner.structured
    return StructuredOutput(decode_enum(_CONSTRAINT, m.constraint, "constraint"), m.spec)


def _encode_parsing(parsing: OutputParsing | None) -> Any:
    if parsing is None:
        return None
    return pb.Parsing(
        tools=parsing.tools,
        tool_choice=parsing.tool_choice,
        function=parsing.function,
        parallel_tool_calls=parsing.parallel_tool_calls,
        reasoning=parsing.reasoning,
        template_kwargs=parsing.template_kwargs,
    )


def _decode_parsing(owner: Any) -> OutputParsing | None:
    if not owner.HasField("parsing"):
        return None
    m = owner.parsing
    return OutputParsing(
        tools=m.tools,
        tool_choice=m.tool_choice,
        function=m.function,
        parallel_tool_calls=m.parallel_tool_calls,
        reasoning=m.reasoning,
        template_kwargs=m.template_kwargs,
    )


def encode_handoff(handoff: KvHandoff | None) -> Any:
    """A hand-off as `KvHandoff`, None for none."""
    if handoff is None:
        return None
    return pb.KvHandoff(
        lease_id=handoff.lease_id,
        fence=handoff.fence,
        ttl_s=handoff.ttl_s,
        blocks=handoff.blocks,
        ticket=handoff.ticket,
    )


def decode_handoff(owner: Any) -> KvHandoff | None:
    """The hand-off in the field `handoff` of a message."""
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
        handoff=encode_handoff(request.handoff),
        adapter=request.adapter,
        salt=request.salt,
        priority=request.priority,
        data_parallel_rank=request.data_parallel_rank,
        trace_context=request.trace_context,
        continuation=_encode_continuation(request.continuation),
        tier_tokens=request.tier_tokens,
        parsing=_encode_parsing(request.parsing),
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
        handoff=decode_handoff(m),
        adapter=optional(m, "adapter"),
        salt=m.salt,
        priority=m.priority,
        data_parallel_rank=optional(m, "data_parallel_rank"),
        trace_context=m.trace_context,
        continuation=_decode_continuation(m, len(tokens)),
        tier_tokens=m.tier_tokens,
        parsing=_decode_parsing(m),
    )
