"""Converters are declared per message: a field without a counterpart is refused at declaration."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import StrEnum

import pytest

from kvasir.core.errors import ProtocolError
from kvasir.core.kv import KvBatch
from kvasir.core.requests import Delta, EngineRequest, FinishReason, KvHandoff, Leg, Sampling, Usage
from kvasir.wire.mapping import enum, message, part
from kvasir.wire.requests import HANDOFF, REQUEST
from kvasir.wire.v1 import kv_pb2, session_pb2
from kvasir.wire.v1 import requests_pb2 as pb


@dataclass(frozen=True)
class Sequenced:
    epoch: int


def test_a_message_and_its_class_have_the_same_fields() -> None:
    assert message(KvBatch, kv_pb2.KvBatch).decode(kv_pb2.KvBatch(epoch=1, log=b"x")) == KvBatch(1, 0, b"x")
    with pytest.raises(TypeError, match="Sequenced and of message KvBatch differ"):
        message(Sequenced, kv_pb2.KvBatch)


def test_a_part_holds_fields_of_its_owner_only() -> None:
    with pytest.raises(TypeError, match="message Usage has a field that Delta has not"):
        part(Delta, pb.Usage)


def test_a_part_is_present_even_if_all_its_fields_are_at_their_defaults() -> None:
    delta = pb.Delta()
    part(Usage, pb.Usage).fill(delta.end.usage, Usage())
    assert delta.end.HasField("usage")


@pytest.mark.parametrize(
    "value",
    [
        KvHandoff("lease", 2, 30.0, 4, b"ticket"),
        KvHandoff("lease", 0, 0.0, 0, b""),
    ],
)
def test_a_message_is_the_same_encoded_filled_in_and_added(value: KvHandoff) -> None:
    encoded = HANDOFF.encode(value)
    filled = pb.KvHandoff()
    HANDOFF.fill(filled, value)
    assert filled == encoded
    nested = EngineRequest("r", array("I", [1, 2]), Sampling(), Leg.DECODE, handoff=value)
    submit = session_pb2.Submit()
    REQUEST.add(submit.requests, nested)
    assert submit.requests[0] == REQUEST.encode(nested)
    assert submit.requests[0].handoff == encoded


def test_enum_members_are_matched_by_name() -> None:
    finish = enum("finish", FinishReason, pb.FinishReason, unset=True)
    assert finish.encode(FinishReason.LENGTH) == pb.FINISH_REASON_LENGTH
    assert finish.decode(pb.FINISH_REASON_UNSPECIFIED) is None
    with pytest.raises(ProtocolError, match="finish: unknown value content_filter"):
        finish.encode(FinishReason.CONTENT_FILTER)
    with pytest.raises(ProtocolError, match="finish: unknown value 99"):
        finish.decode(99)


def test_an_enum_without_a_counterpart_maps_nothing() -> None:
    class Other(StrEnum):
        STRANGE = "strange"

    with pytest.raises(ProtocolError, match="other: unknown value 1"):
        enum("other", Other, pb.FinishReason).decode(1)
