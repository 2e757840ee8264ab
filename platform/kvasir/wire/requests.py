"""Requests to protobuf and back.

Protobuf's own errors pass through; `kvasir.wire.codec` turns them into ProtocolError in one place.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import replace
from typing import Any

from kvasir.core.errors import ProtocolError
from kvasir.core.media.prompts import MediaKind, PromptMedia
from kvasir.core.requests import (
    Constraint,
    Continuation,
    EngineRequest,
    KvHandoff,
    Leg,
    OutputParsing,
    Sampling,
    SloClass,
    StructuredOutput,
)
from kvasir.wire.mapping import Converter, enum, message
from kvasir.wire.v1 import requests_pb2 as pb

NATIVE_ORDER = sys.byteorder == "little"


def _encode_tokens(tokens: array[int]) -> bytes:
    """uint32, little-endian, 4 bytes each."""
    if NATIVE_ORDER:
        return tokens.tobytes()
    swapped = tokens[:]
    swapped.byteswap()
    return swapped.tobytes()


def _decode_tokens(data: bytes) -> array[int]:
    """The inverse of _encode_tokens. Raises ProtocolError unless `data` is a multiple of 4 bytes."""
    if len(data) % 4:
        raise ProtocolError(f"tokens: {len(data)} bytes are not a multiple of 4 bytes (uint32)")
    tokens = array("I")
    tokens.frombytes(data)
    if not NATIVE_ORDER:
        tokens.byteswap()
    return tokens


_LOGIT_BIAS: Converter[tuple[int, float]] = Converter(
    lambda pair: pb.LogitBias(token_id=pair[0], bias=pair[1]), lambda m: (m.token_id, m.bias)
)
_STRUCTURED = message(
    StructuredOutput, pb.Structured, constraint=enum("constraint", Constraint, pb.Constraint)
)
_SAMPLING = message(Sampling, pb.Sampling, logit_bias=_LOGIT_BIAS, structured=_STRUCTURED)
HANDOFF = message(KvHandoff, pb.KvHandoff)
_KNOWN_KIND = enum("kind", MediaKind, pb.MediaKind, unset=True)
# Routers of earlier versions send images, and do not say so.
_MEDIA_KIND = replace(_KNOWN_KIND, decode=lambda value: _KNOWN_KIND.decode(value) or MediaKind.IMAGE)
_REQUEST = message(
    EngineRequest,
    pb.EngineRequest,
    tokens=Converter(_encode_tokens, _decode_tokens),
    sampling=_SAMPLING,
    leg=enum("leg", Leg, pb.Leg),
    handoff=HANDOFF,
    continuation=message(Continuation, pb.Continuation),
    parsing=message(OutputParsing, pb.Parsing),
    media=message(PromptMedia, pb.Media, kind=_MEDIA_KIND),
    slo=message(SloClass, pb.SloClass),
)


def _decode_request(m: Any) -> EngineRequest:
    """Raise ProtocolError for malformed tokens, an unknown leg, missing sampling, or a continuation without
    a prompt."""
    if not m.request_id or not m.HasField("sampling"):
        raise ProtocolError("a request needs request_id and sampling")
    request = _REQUEST.decode(m)
    continuation, tokens = request.continuation, len(request.tokens)
    if continuation is not None and continuation.output_tokens >= tokens:
        raise ProtocolError(
            f"continuation: {continuation.output_tokens} of {tokens} tokens are output, and no prompt is left"
        )
    return request


REQUEST = replace(_REQUEST, decode=_decode_request)
