"""Routers and workers of two versions: a side that misses a field serves without it, or refuses by name.

The fields are read from the descriptors of the wire, so that a new one is among them. For each, its sender is
of a version that does not know it: the field is removed from every message on the way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from kvasir.core.errors import KvasirError
from kvasir.core.identity import Hardware, KvLayout, WorkerIdentity
from kvasir.core.kv import KvSnapshotPart, TierLoad
from kvasir.core.loads.gpu import GpuLoad
from kvasir.core.media.prompts import PromptMedia
from kvasir.core.messages import Hello, RouterFrame, Welcome, WorkerFrame
from kvasir.core.requests import (
    EngineLoad,
    EngineRequest,
    OutputParsing,
    Request,
    Sampling,
    Timings,
    Usage,
    token_ids,
)
from kvasir.wire import codec
from kvasir.wire.v1 import identity_pb2, kv_pb2, requests_pb2, session_pb2
from kvasir_platform.sim.chaos.checks import broken_streams
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_platform.sim.net.transport import MemoryNetwork, MemoryRouterConnection
from kvasir_platform.sim.stories import small_deployment

Strip = Callable[[Any], Any]
NOBODY: frozenset[str] = frozenset()
SENT_BY_ALL = frozenset(
    [
        "SessionRequest.frame",
        "RouterFrame.seq",
        "RouterFrame.submit",
        "Submit.requests",
        "EngineRequest.request_id",
        "EngineRequest.tokens",
        "EngineRequest.sampling",
        "EngineRequest.leg",
        "EngineRequest.handoff",
        "Sampling.max_tokens",
        "Sampling.n",
        "SessionResponse.frame",
        "WorkerFrame.seq",
        "WorkerFrame.step_batch",
        "StepBatch.deltas",
        "Delta.request_id",
        "Delta.offset",
        "Delta.token_ids",
        "Delta.text",
        "Delta.end",
        "DeltaEnd.finish",
        "DeltaEnd.last",
        "DeltaEnd.usage",
        "DeltaEnd.handoff",
        "Usage.prompt_tokens",
        "Usage.output_tokens",
    ]
)
"""Without these nothing can be served: every version of this protocol sends them. A new field is not among
them, or the protocol gets another version."""
SET_ALWAYS = {
    "EngineRequest.leg",
    "Hardware.devices",
    "Hello.protocol_version",
    "KvLayout.tensor_parallel_size",
    "Parsing.parallel_tool_calls",
    "Parsing.reasoning",
    "Parsing.tool_choice",
    "Sampling.n",
    "Sampling.repetition_penalty",
    "Sampling.skip_special_tokens",
    "Sampling.spaces_between_special_tokens",
    "Sampling.temperature",
    "Sampling.top_p",
    "TierLoad.readable",
    "WorkerIdentity.data_parallel_size",
    "WorkerIdentity.hash_version",
    "WorkerIdentity.protocol_version",
}
"""Senders of every version set these, whose defaults are not zero."""
PAIRS: list[tuple[Any, Any]] = [
    (Hello, session_pb2.Hello),
    (WorkerIdentity, identity_pb2.WorkerIdentity),
    (KvLayout, identity_pb2.KvLayout),
    (Hardware, identity_pb2.Hardware),
    (EngineRequest, requests_pb2.EngineRequest),
    (Sampling, requests_pb2.Sampling),
    (OutputParsing, requests_pb2.Parsing),
    (Usage, requests_pb2.Usage),
    (Timings, requests_pb2.Timings),
    (EngineLoad, requests_pb2.EngineLoad),
    (TierLoad, requests_pb2.TierLoad),
    (GpuLoad, requests_pb2.GpuLoad),
]
"""Classes with defaults, and their messages."""


class Named:
    """Holds what is served, and refusals that say why."""

    def __contains__(self, came: object) -> bool:
        return came == "served" or (str(came).startswith("refused: ") and len(str(came)) > 20)


NAMED = Named()


def fields_below(root: Any) -> Iterator[FieldDescriptor]:
    """Every field of a message and of the messages in it, once."""
    found, left = {root.full_name: root}, [root]
    while left:
        for field in left.pop().fields:
            yield field
            kind = field.message_type
            if kind is not None and kind.full_name not in found:
                found[kind.full_name] = kind
                left.append(kind)


def cleared(message: Any, field: FieldDescriptor) -> Any:
    """Remove a field from a message and from all messages in it."""
    if message.DESCRIPTOR is field.containing_type:
        message.ClearField(field.name)
    for each, value in message.ListFields():
        if each.message_type is not None:
            for inner in value if each.is_repeated else (value,):
                cleared(inner, field)
    return message


class OldPeer(MemoryNetwork):
    """A network of which one side, the routers or the workers, does not know a field."""

    def __init__(self, field: FieldDescriptor, *, router: bool) -> None:
        super().__init__()
        self._field = field
        self._router = router

    def to_worker(self, message: Any) -> Any:
        """What a worker reads of a router's message."""
        data = codec.encode_to_worker(message)
        return codec.decode_to_worker(self._sent(session_pb2.SessionRequest, data) if self._router else data)

    def to_router(self, message: Any) -> Any:
        """What a router reads of a worker's message."""
        data = codec.encode_to_router(message)
        return codec.decode_to_router(data if self._router else self._sent(session_pb2.SessionResponse, data))

    async def dial(self, address: str, hello: Hello) -> Any:
        connection = await super().dial(address, self.to_worker(hello))
        return OldConnection(self, connection, self.to_router(connection.welcome))

    async def snapshot(self, address: str, epoch: int) -> AsyncGenerator[KvSnapshotPart, None]:
        async for part in super().snapshot(address, epoch):
            data = codec.encode_snapshot_part(part)
            sent = data if self._router else self._sent(kv_pb2.SnapshotResponse, data)
            yield codec.decode_snapshot_part(sent)

    def _sent(self, kind: Any, data: bytes) -> bytes:
        made: bytes = cleared(kind.FromString(data), self._field).SerializeToString()
        return made


class OldConnection:
    """A router's connection over such a network."""

    def __init__(self, network: OldPeer, connection: MemoryRouterConnection, welcome: Welcome) -> None:
        self._network = network
        self._connection = connection
        self.welcome = welcome
        self.close = connection.close

    async def send(self, frame: RouterFrame) -> None:
        await self._connection.send(self._network.to_worker(frame))

    async def receive(self) -> WorkerFrame:
        frame: WorkerFrame = self._network.to_router(await self._connection.receive())
        return frame


def served(field: FieldDescriptor, *, router: bool) -> str:
    """Return "served", or what came of requests to workers when one side does not know the field."""
    spec, streams = small_deployment(prefill=1, decode=1, queue_timeout_s=2.0), list[ClientStream]()

    async def story() -> str:
        cluster = Cluster(spec, VirtualClock(), network=OldPeer(field, router=router))
        cluster._start_router("router")
        for pool in spec.pools:
            await cluster.add(pool.name)
        await cluster.clock.sleep(1.0)
        reasons = sorted({view.reason for view in cluster.router.workers() if view.state == "refused"})
        try:
            if reasons:
                return "refused: " + "; ".join(reasons)
            for i in range(3):
                sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=i or None)
                streams.append(cluster.submit(range(i, 80 + i), sampling, deadline_s=20.0))
            for stream in streams:
                await stream.finished()
        except KvasirError as error:
            return f"failed: {error.code}: {error.message}"
        finally:
            await cluster.close()
        return "; ".join(broken_streams(spec, streams, NOBODY)) or "served"

    return run_virtual(story())


def optional_below(root: Any) -> list[FieldDescriptor]:
    """The fields that a sender may not know."""
    return [each for each in fields_below(root) if short(each) not in SENT_BY_ALL]


def short(field: FieldDescriptor) -> str:
    return str(field.full_name).removeprefix("kvasir.wire.v1.")


TO_WORKER = optional_below(session_pb2.SessionRequest.DESCRIPTOR)
TO_ROUTER = optional_below(session_pb2.SessionResponse.DESCRIPTOR)


def test_an_old_router_is_served_or_refused_by_name_whatever_field_it_does_not_send() -> None:
    came = {short(field): served(field, router=True) for field in TO_WORKER}
    assert {name: each for name, each in came.items() if each not in NAMED} == {}


def test_an_old_worker_serves_or_is_refused_by_name_whatever_field_it_does_not_send() -> None:
    came = {short(field): served(field, router=False) for field in TO_ROUTER}
    assert {name: each for name, each in came.items() if each not in NAMED} == {}


def test_images_wait_for_a_worker_that_takes_them_and_then_say_what_is_missing() -> None:
    (field,) = [each for each in TO_ROUTER if short(each) == "WorkerIdentity.images"]
    spec = small_deployment(prefill=1, decode=1, queue_timeout_s=2.0)
    prompt, image = token_ids(range(20)), PromptMedia(3, 4, bytes(32), b"")

    async def story() -> str:
        cluster = Cluster(spec, VirtualClock(), network=OldPeer(field, router=False))
        await cluster.start()
        request = Request("r", spec.model.name, prompt, arrival_s=cluster.clock.now(), media=(image,))
        stream = ClientStream(request)
        cluster.router.submit(request, stream)
        try:
            await stream.finished()
        except KvasirError as error:
            return error.message
        finally:
            await cluster.close()
        return "served"

    assert "no worker of this model takes images" in run_virtual(story())


def test_the_fields_that_all_versions_send_exist() -> None:
    kinds = (session_pb2.SessionRequest, session_pb2.SessionResponse)
    assert {short(field) for kind in kinds for field in fields_below(kind.DESCRIPTOR)} >= SENT_BY_ALL


def test_a_field_that_is_not_sent_has_the_value_that_it_has_by_default() -> None:
    """What an old sender does not know is as if it had not been set."""
    differing = set()
    for ours, kind in PAIRS:
        unset = {field.name: absent(field) for field in kind.DESCRIPTOR.fields}
        for each in dataclasses.fields(ours):
            known = each.default is not dataclasses.MISSING
            if known and not dataclasses.is_dataclass(each.default) and unset[each.name] != each.default:
                differing.add(f"{kind.DESCRIPTOR.name}.{each.name}")
    assert differing == SET_ALWAYS


def absent(field: FieldDescriptor) -> Any:
    """What the codec reads where a field is not there."""
    if field.is_repeated:
        return ()
    return None if field.containing_oneof is not None else field.default_value


@pytest.mark.parametrize("name", ["kv.block_size", "data_parallel_size"])
def test_a_worker_of_no_size_is_refused_by_name(name: str) -> None:
    field = next(each for each in TO_ROUTER if each.full_name.endswith(f".{name.rpartition('.')[2]}"))
    assert served(field, router=False) == f"refused: {name}: 0 != at least 1 (router)"
