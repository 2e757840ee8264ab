"""A router that is refused learns the worker's reason, also where gRPC has replaced it."""

from __future__ import annotations

from typing import Any

import grpc.aio
import pytest

from kvasir.core.errors import ProtocolError
from kvasir.core.messages import Hello
from kvasir.ports.session import ConnectionLost
from kvasir_router.sessions import grpc_transport
from kvasir_router.sessions.grpc_transport import GrpcDialer, GrpcRouterConnection

HELLO = Hello("router", "s", 7, 4)
NO_REASON = ConnectionLost("INTERNAL: Internal error from Core")
REFUSED = ProtocolError("the worker refused: the token is missing or wrong", code="unauthenticated")
LOST = ConnectionLost("UNAVAILABLE: connection refused")


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ([NO_REASON, REFUSED], "token is missing or wrong"),
        ([NO_REASON, NO_REASON, LOST], "connection refused"),
        ([NO_REASON, NO_REASON, NO_REASON], "INTERNAL"),
        ([LOST], "connection refused"),
        ([REFUSED], "token is missing or wrong"),
    ],
)
async def test_a_router_asks_again_for_a_reason_that_grpc_has_replaced_and_for_no_other(
    monkeypatch: pytest.MonkeyPatch, ends: list[Exception], said: str
) -> None:
    coming = iter(ends)

    async def ended(_connection: GrpcRouterConnection, _hello: Hello) -> None:
        raise next(coming)

    monkeypatch.setattr(GrpcRouterConnection, "handshake", ended)
    with pytest.raises((ProtocolError, ConnectionLost), match=said):
        await GrpcDialer("wrong").dial("127.0.0.1:9", HELLO)
    assert next(coming, None) is None, "it asked for each"


async def test_these_are_the_details_that_grpc_gives_a_call_whose_write_failed() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:9") as channel:
        method = channel.stream_stream("/s/Session", request_serializer=None, response_deserializer=None)
        call: Any = method(None)
        call._cython_call.set_internal_error("a write failed")
        assert await call.details() == grpc_transport._NO_REASON
        call.cancel()
