"""Messages round-trip over the wire, and the codec refuses malformed ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir.core.adapters import HeldAdapter
from kvasir.core.errors import ProtocolError
from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.kv import KvBatch, Medium, TierLoad
from kvasir.core.loads.gpu import GpuLoad
from kvasir.core.locality import MAX_NAME, MAX_NICS, Locality, Nic, NicProtocol
from kvasir.core.media.prompts import MediaKind, PromptMedia
from kvasir.core.messages import (
    Abort,
    AdapterAnswer,
    AdaptersHeld,
    Draining,
    EncodedStep,
    Goodbye,
    Hello,
    LoadAdapter,
    ReleaseLeases,
    RouterFrame,
    Serving,
    SetDraining,
    Submit,
    UnloadAdapter,
    Welcome,
    WorkerFrame,
)
from kvasir.core.requests import (
    Constraint,
    Continuation,
    Delta,
    EngineLoad,
    EngineRequest,
    FinishReason,
    KvHandoff,
    Leg,
    OutputParsing,
    PositionLogprobs,
    Role,
    Sampling,
    SloClass,
    StepBatch,
    StructuredOutput,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
    token_ids,
)
from kvasir.core.session_link import payload_bytes
from kvasir.wire.codec import decode_to_router, decode_to_worker, encode_to_router, encode_to_worker
from kvasir.wire.v1 import identity_pb2, requests_pb2, session_pb2

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
REAL = st.floats(allow_nan=False)
# Lone surrogates are no text: UTF-8 has no spelling for them.
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
IDENT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


def tuples(of: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(of, max_size=3).map(tuple)


HANDOFF = st.builds(
    KvHandoff, lease_id=TEXT, fence=U64, ttl_s=REAL, blocks=U32, ticket=st.binary(max_size=20)
)
LOGPROB = st.builds(TokenLogprob, token_id=U32, token=TEXT, logprob=REAL)
SAMPLING = st.builds(
    Sampling,
    max_tokens=st.none() | U32,
    min_tokens=U32,
    temperature=REAL,
    top_p=REAL,
    top_k=st.integers(-1, 2**31 - 1),
    min_p=REAL,
    n=U32,
    seed=st.none() | I64,
    stop=tuples(TEXT),
    stop_token_ids=tuples(U32),
    include_stop_str_in_output=st.booleans(),
    ignore_eos=st.booleans(),
    presence_penalty=REAL,
    frequency_penalty=REAL,
    repetition_penalty=REAL,
    logit_bias=tuples(st.tuples(U32, REAL)),
    logprobs=st.none() | U32,
    skip_special_tokens=st.booleans(),
    spaces_between_special_tokens=st.booleans(),
    allowed_token_ids=tuples(U32),
    bad_words=tuples(TEXT),
    prompt_logprobs=st.none() | U32,
    thinking_tokens=st.none() | U32,
    structured=st.none() | st.builds(StructuredOutput, constraint=st.sampled_from(Constraint), spec=TEXT),
)
PARSING = st.builds(
    OutputParsing,
    tools=TEXT,
    tool_choice=TEXT,
    function=TEXT,
    parallel_tool_calls=st.booleans(),
    reasoning=st.booleans(),
    template_kwargs=TEXT,
)
MEDIA = st.builds(
    PromptMedia,
    offset=U32,
    length=U32,
    digest=st.binary(max_size=4),
    data=st.binary(max_size=4),
    kind=st.sampled_from(MediaKind),
    extent=U32,
)
REQUEST = st.builds(
    EngineRequest,
    request_id=IDENT,
    tokens=st.lists(U32, max_size=8).map(token_ids),
    sampling=SAMPLING,
    leg=st.sampled_from(Leg),
    handoff=st.none() | HANDOFF,
    adapter=st.none() | TEXT,
    salt=TEXT,
    priority=I64,
    data_parallel_rank=st.none() | U32,
    trace_context=TEXT,
    tier_tokens=U32,
    parsing=st.none() | PARSING,
    media=tuples(MEDIA),
    slo=st.none() | st.builds(SloClass, name=TEXT, ttft_s=REAL, itl_s=REAL),
) | st.builds(
    EngineRequest,
    request_id=IDENT,
    tokens=st.lists(U32, min_size=3, max_size=8).map(token_ids),
    sampling=SAMPLING,
    continuation=st.builds(Continuation, output_tokens=st.integers(0, 2), text_length=U32),
)
POSITION = st.builds(PositionLogprobs, sampled=LOGPROB, top=tuples(LOGPROB))
PARTS = st.fixed_dictionaries(
    {
        "reasoning": TEXT,
        "tool_calls": tuples(st.builds(ToolCallDelta, index=U32, call_id=TEXT, name=TEXT, arguments=TEXT)),
        "raw_length": U32,
        "reasoning_tokens": U32,
        "prompt_logprobs": tuples(st.none() | POSITION),
        "embedding": st.none()
        | st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=4).map(lambda v: array("f", v)),
    }
)
PLAIN_DELTA = st.builds(
    Delta,
    request_id=TEXT,
    offset=U32,
    token_ids=tuples(U32),
    text=TEXT,
    index=U32,
    logprobs=tuples(POSITION),
    finish=st.none()
    | st.sampled_from([one for one in FinishReason if one is not FinishReason.CONTENT_FILTER]),
    stop_reason=st.none() | TEXT,
    last=st.booleans(),
    usage=st.none()
    | st.builds(
        Usage,
        prompt_tokens=U32,
        cached_tokens=U32,
        transferred_tokens=U32,
        transferred_bytes=U64,
        output_tokens=U32,
        tier_tokens=U32,
    ),
    timings=st.none() | st.builds(Timings, **{f.name: REAL for f in fields(Timings)}),
    handoff=st.none() | HANDOFF,
    error=st.none() | TEXT,
    error_message=st.none() | TEXT,
)
DELTA = PLAIN_DELTA | st.builds(lambda delta, parts: replace(delta, **parts), PLAIN_DELTA, PARTS)
LOWER = [medium for medium in Medium if medium is not Medium.DEVICE]


def tier(medium: st.SearchStrategy[Medium]) -> st.SearchStrategy[TierLoad]:
    special = {"medium": medium, "load_s": REAL, "trouble": TEXT, "readable": st.booleans()}
    return st.builds(TierLoad, **{f.name: special.get(f.name, U64) for f in fields(TierLoad)})


TIERS = st.lists(tier(st.sampled_from(LOWER)), max_size=3, unique_by=lambda one: one.medium).map(tuple)
GPU = st.builds(GpuLoad, U32, REAL, U64, U64, REAL, st.none() | REAL, st.none() | REAL)
GPUS = st.lists(GPU, max_size=3, unique_by=lambda one: one.index).map(tuple)
SPECIAL = {"running": U32, "waiting": U32, "kv_usage": REAL, "tiers": TIERS, "gpus": GPUS}
LOAD = st.builds(EngineLoad, **{f.name: SPECIAL.get(f.name, U64) for f in fields(EngineLoad)})
KV = st.builds(KvBatch, epoch=U64, sequence=U64, log=st.binary(max_size=40))
BATCH = st.builds(StepBatch, deltas=tuples(DELTA), load=st.none() | LOAD, kv=st.none() | KV)
HELD = st.builds(HeldAdapter, TEXT, TEXT, U32, TEXT, U32, U64, st.booleans())
ROUTER_FRAME = st.builds(
    RouterFrame,
    seq=U64,
    ack=U64,
    payload=st.none()
    | st.builds(Submit, tuples(REQUEST))
    | st.builds(Abort, tuples(TEXT))
    | st.builds(ReleaseLeases, tuples(TEXT))
    | st.builds(Goodbye)
    | st.builds(SetDraining, st.booleans(), TEXT, REAL)
    | st.builds(LoadAdapter, U64, TEXT, TEXT, U32, TEXT)
    | st.builds(UnloadAdapter, U64, TEXT),
)
WORKER_FRAME = st.builds(
    WorkerFrame,
    seq=U64,
    ack=U64,
    payload=st.none()
    | BATCH
    | st.builds(Draining, TEXT, REAL)
    | st.builds(Serving)
    | st.builds(AdaptersHeld, tuples(HELD))
    | st.builds(AdapterAnswer, U64, TEXT, TEXT, U32),
)
HELLO = st.builds(Hello, router_id=TEXT, session_id=TEXT, received_seq=U64, protocol_version=U32)
LAYOUT = st.builds(
    KvLayout,
    block_size=U32,
    dtype=TEXT,
    layout=TEXT,
    layers=U32,
    kv_heads=U32,
    head_size=U32,
    bytes_per_block=U64,
    tensor_parallel_size=U32,
)
PLACE = st.text(st.characters(exclude_categories=["Cs"]), max_size=MAX_NAME)
LOCALITY = st.builds(
    Locality,
    node=PLACE,
    zone=PLACE,
    rack=PLACE,
    nvlink_domain=PLACE,
    nics=tuples(st.builds(Nic, name=PLACE, protocol=st.sampled_from(NicProtocol), bits_per_s=U64)),
)
IDENTITY = st.builds(
    WorkerIdentity,
    worker_id=TEXT,
    epoch=U64,
    pool=TEXT,
    role=st.sampled_from(Role),
    model=TEXT,
    revision=TEXT,
    tokenizer_digest=TEXT,
    max_model_len=U32,
    kv=LAYOUT,
    kv_blocks=U64,
    engine=TEXT,
    engine_version=TEXT,
    transfer=TEXT,
    adapters=tuples(TEXT),
    data_parallel_size=U32,
    protocol_version=U32,
    hash_version=U32,
    reports_kv=st.booleans(),
    model_parameters=U64,
    model_bytes=U64,
    shared_tier=TEXT,
    locality=LOCALITY,
)
WELCOME = st.builds(Welcome, session_id=TEXT, resumed=st.booleans(), received_seq=U64, identity=IDENTITY)


def whole(data: bytes) -> Welcome | WorkerFrame:
    """A message to a router, with all that is in a step."""
    message = decode_to_router(data)
    if isinstance(message, WorkerFrame) and isinstance(message.payload, EncodedStep):
        assert message.payload.frame == data
        return replace(message, payload=message.payload.decode(None))
    return message


@given(HELLO | ROUTER_FRAME)
def test_what_a_router_says_comes_back_equal(message: Hello | RouterFrame) -> None:
    data = encode_to_worker(message)
    assert decode_to_worker(data) == message
    if isinstance(message, RouterFrame) and message.payload is not None:
        assert len(data) <= payload_bytes(message.payload) + 40


@given(WELCOME | WORKER_FRAME)
def test_what_a_worker_says_comes_back_equal(message: Welcome | WorkerFrame) -> None:
    data = encode_to_router(message)
    assert whole(data) == message
    if isinstance(message, WorkerFrame) and message.payload is not None:
        assert len(data) <= payload_bytes(message.payload) + 40


@given(st.binary(max_size=200))
def test_bytes_of_noise_give_a_message_or_a_protocol_error(noise: bytes) -> None:
    for decode in (decode_to_worker, whole):
        try:
            decode(noise)
        except ProtocolError:
            continue


def submit(**changed: object) -> bytes:
    request = requests_pb2.EngineRequest(
        request_id="r", tokens=b"\1\0\0\0", sampling=requests_pb2.Sampling(), leg=requests_pb2.LEG_FULL
    )
    for name, value in changed.items():
        setattr(request, name, value)
    frame = session_pb2.RouterFrame(seq=1, submit=session_pb2.Submit(requests=[request]))
    return bytes(session_pb2.SessionRequest(frame=frame).SerializeToString())


def test_token_bytes_are_little_endian_uint32() -> None:
    frame = decode_to_worker(submit(tokens=b"\1\0\0\0\0\0\0\x80"))
    assert isinstance(frame, RouterFrame)
    assert isinstance(frame.payload, Submit)
    assert list(frame.payload.requests[0].tokens) == [1, 2**31]


def test_token_bytes_that_are_no_whole_uint32_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="5 bytes"):
        decode_to_worker(submit(tokens=b"\1\0\0\0\2"))


@pytest.mark.parametrize("leg", [0, 99])
def test_an_unknown_leg_is_a_protocol_error(leg: int) -> None:
    with pytest.raises(ProtocolError, match=f"leg: unknown value {leg}"):
        decode_to_worker(submit(leg=leg))


def test_an_item_whose_router_names_no_kind_is_an_image() -> None:
    sent = session_pb2.SessionRequest.FromString(submit())
    sent.frame.submit.requests[0].media.add(length=1)
    decoded = decode_to_worker(sent.SerializeToString())
    assert isinstance(decoded, RouterFrame)
    assert isinstance(decoded.payload, Submit)
    assert [item.kind for item in decoded.payload.requests[0].media] == [MediaKind.IMAGE]


def test_an_unknown_finish_reason_is_a_protocol_error() -> None:
    end = requests_pb2.DeltaEnd(finish=99)  # type: ignore[arg-type, unused-ignore]  # only with types for it
    batch = requests_pb2.StepBatch(deltas=[requests_pb2.Delta(request_id="r", end=end)])
    message = session_pb2.SessionResponse(frame=session_pb2.WorkerFrame(seq=1, step_batch=batch))
    with pytest.raises(ProtocolError, match="finish: unknown value 99"):
        whole(message.SerializeToString())


def test_a_welcome_with_an_unknown_role_is_a_protocol_error() -> None:
    message = session_pb2.SessionResponse(welcome=session_pb2.Welcome(session_id="s"))
    with pytest.raises(ProtocolError, match="role: unknown value 0"):
        decode_to_router(message.SerializeToString())


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (WorkerIdentity, identity_pb2.WorkerIdentity),
        (KvLayout, identity_pb2.KvLayout),
        (EngineRequest, requests_pb2.EngineRequest),
        (Sampling, requests_pb2.Sampling),
        (KvHandoff, requests_pb2.KvHandoff),
        (Usage, requests_pb2.Usage),
        (Timings, requests_pb2.Timings),
        (EngineLoad, requests_pb2.EngineLoad),
        (TierLoad, requests_pb2.TierLoad),
        (GpuLoad, requests_pb2.GpuLoad),
    ],
)
def test_what_is_said_has_a_field_on_the_wire_for_all_of_it(ours: Any, message: Any) -> None:
    assert {one.name for one in fields(ours)} == {one.name for one in message.DESCRIPTOR.fields}


def batch_with(load: requests_pb2.EngineLoad) -> bytes:
    frame = session_pb2.WorkerFrame(seq=1, step_batch=requests_pb2.StepBatch(load=load))
    return bytes(session_pb2.SessionResponse(frame=frame).SerializeToString())


@pytest.mark.parametrize("medium", [0, 4])
def test_a_tier_that_is_no_medium_below_the_device_is_a_protocol_error(medium: int) -> None:
    load = requests_pb2.EngineLoad(tiers=[requests_pb2.TierLoad(medium=medium)])
    with pytest.raises(ProtocolError, match=f"tier: unknown value {medium}"):
        whole(batch_with(load))


def test_two_tiers_of_one_medium_are_a_protocol_error() -> None:
    load = requests_pb2.EngineLoad(tiers=[requests_pb2.TierLoad(medium=2)] * 2)
    with pytest.raises(ProtocolError, match="two tiers of one medium"):
        whole(batch_with(load))


@pytest.mark.parametrize("indexes", [(1, 1), range(65)])
def test_gpus_of_one_index_and_more_than_a_machine_has_are_a_protocol_error(indexes: Sequence[int]) -> None:
    load = requests_pb2.EngineLoad(gpus=[requests_pb2.GpuLoad(index=index) for index in indexes])
    with pytest.raises(ProtocolError, match="two GPUs of one index, or with more than 64"):
        whole(batch_with(load))


def test_a_message_of_no_known_kind_is_a_protocol_error() -> None:
    for decode in (decode_to_worker, decode_to_router):
        with pytest.raises(ProtocolError, match="no known kind"):
            decode(b"")


@pytest.mark.parametrize("changed", [{"top_k": 2**40}, {"seed": 2**63}, {"stop": ("\ud800",)}])
def test_a_value_of_ours_that_does_not_fit_is_a_protocol_error(changed: dict[str, object]) -> None:
    sampling = replace(Sampling(), **changed)  # type: ignore[arg-type]  # any field, by name
    request = EngineRequest("r", token_ids([1]), sampling)
    with pytest.raises(ProtocolError):
        encode_to_worker(RouterFrame(1, 0, Submit((request,))))


def test_a_worker_whose_place_has_too_long_a_name_or_too_many_nics_is_refused() -> None:
    message = session_pb2.SessionResponse()
    identity = message.welcome.identity
    identity.role = identity_pb2.ROLE_BOTH
    identity.locality.zone = "z" * MAX_NAME
    assert decode_to_router(message.SerializeToString())
    identity.locality.zone = "z" * (MAX_NAME + 1)
    with pytest.raises(ProtocolError, match="more than 253 characters"):
        decode_to_router(message.SerializeToString())
    identity.locality.zone = ""
    for _ in range(MAX_NICS + 1):
        identity.locality.nics.add(name="eth0", protocol=identity_pb2.NIC_PROTOCOL_ETHERNET)
    with pytest.raises(ProtocolError, match="33 NICs are more than 32"):
        decode_to_router(message.SerializeToString())
