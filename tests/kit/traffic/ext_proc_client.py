"""A gateway's end of external processing, for tests of an endpoint picker."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from tests.kit.clocks import StillClock

from kvasir.wire.ext_proc import ext_proc_pb2 as ext
from kvasir_platform.picker.endpoints import EndpointPicker, PickerLimits
from kvasir_platform.picker.ext_proc_server import SERVICE, ExtProcServer, ServerBounds

END: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # not in its types
FULL_DUPLEX = ext.FULL_DUPLEX_STREAMED


@dataclass
class GatewayCall:
    """One HTTP request of the gateway. `responses` are all that came, in order."""

    call: Any
    responses: list[Any] = field(default_factory=list)

    async def send(self, **message: Any) -> None:
        """Send a ProcessingRequest."""
        await self.call.write(ext.ProcessingRequest(**message).SerializeToString())

    async def receive(self) -> Any:
        """Return the next ProcessingResponse."""
        data = await self.call.read()
        assert data is not END
        self.responses.append(ext.ProcessingResponse.FromString(data))
        return self.responses[-1]

    async def end(self) -> None:
        """The gateway is done with the request."""
        await self.call.done_writing()
        assert await self.call.read() is END

    async def ask(
        self,
        body: Any,
        *,
        mode: Any = FULL_DUPLEX,
        headers: Mapping[str, str] | None = None,
        subset: Sequence[str] | None = None,
    ) -> Any:
        """Send a whole request; return the response that names its endpoint, or refuses it."""
        sent = {":method": "POST", ":path": "/v1/chat/completions", **(headers or {})}
        await self.send(
            request_headers=ext.HttpHeaders(headers=header_map(sent), end_of_stream=False),
            metadata_context=metadata(
                "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset", subset
            ),
            protocol_config=ext.ProtocolConfiguration(request_body_mode=mode, response_body_mode=mode),
        )
        if mode != FULL_DUPLEX:
            assert (await self.receive()).HasField("request_headers")
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        await self.send(request_body=ext.HttpBody(body=data, end_of_stream=True))
        return await self.receive()


def header_map(headers: Mapping[str, str]) -> Any:
    """Headers as Envoy sends them."""
    return ext.HeaderMap(
        headers=[ext.HeaderValue(key=key, raw_value=value.encode()) for key, value in headers.items()]
    )


def metadata(space: str, key: str, value: Any) -> Any:
    """The gateway's metadata with one entry, empty for None."""
    made = ext.Metadata()
    if value is not None:
        made.filter_metadata[space].update({key: value})
    return made


def destination(response: Any) -> list[str]:
    """The endpoints that a response names, after checking that header and metadata agree."""
    kind = response.WhichOneof("response")
    assert kind in ("request_headers", "request_body"), response
    part = getattr(response, kind).response
    found = [each for each in part.header_mutation.set_headers if each.header.key == DESTINATION]
    assert [each.append_action for each in found] == [ext.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD]
    value = found[0].header.raw_value.decode()
    assert response.dynamic_metadata["envoy.lb"][DESTINATION] == value
    return str(value).split(",")


DESTINATION = "x-gateway-destination-endpoint"


def refusal(response: Any) -> tuple[int, str]:
    """Status and code of a response that is sent to the client instead of a model server's."""
    assert response.WhichOneof("response") == "immediate_response", response
    immediate = response.immediate_response
    return immediate.status.code, json.loads(immediate.body)["error"]["code"]


@dataclass
class Picking:
    """A running server of an endpoint picker, and a gateway's channel to it."""

    picker: EndpointPicker
    server: ExtProcServer
    clock: StillClock
    channel: grpc.aio.Channel

    def request(self) -> GatewayCall:
        """Begin an HTTP request."""
        channel: Any = self.channel
        return GatewayCall(channel.stream_stream(f"/{SERVICE}/Process")())


@asynccontextmanager
async def picking(
    *endpoints: str, limits: PickerLimits | None = None, bounds: ServerBounds | None = None, **how: Any
) -> AsyncIterator[Picking]:
    """Serve a pool of `endpoints` until the context ends."""
    clock = StillClock(100.0)
    picker = EndpointPicker(limits or PickerLimits(), random.Random(3))
    picker.update(endpoints, clock.now())
    clock.at += 60.0
    server = ExtProcServer(picker, clock.now, bounds=bounds, **how)
    port = await server.start("127.0.0.1", 0)
    await server.set_ready(ready=bool(endpoints))
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Picking(picker, server, clock, channel)
    finally:
        await server.stop()
