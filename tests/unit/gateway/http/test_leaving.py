"""A client that leaves before its answer ends its request, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from tests.kit.suite.loops import new_uvloop

from kvasir.config.spec.deployment import GatewaySpec
from kvasir_platform.gateway.http import output
from kvasir_platform.gateway.http.connection import HttpConnection
from kvasir_platform.gateway.http.exchange import Exchange
from kvasir_platform.gateway.http.listener import Listener

REQUEST = b"GET /x HTTP/1.1\r\nHost: t\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, new_uvloop])
def test_a_client_that_has_left_is_noticed_by_its_reset_alone(
    monkeypatch: pytest.MonkeyPatch, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    interim: list[HttpConnection] = []
    write = HttpConnection._write_continue

    def counted(held: HttpConnection) -> None:
        interim.append(held)
        write(held)

    monkeypatch.setattr(HttpConnection, "_write_continue", counted)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(_leave()) == "client_closed"
    assert len(interim) == 1, "a second one, a second later, would have reported the reset"


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, new_uvloop])
def test_a_client_that_only_sends_no_more_is_answered(
    monkeypatch: pytest.MonkeyPatch, new_loop: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    monkeypatch.setattr(output, "_LAST_LOOK_S", output._FIRST_LOOK_S)
    with asyncio.Runner(loop_factory=new_loop) as runner:
        answer = runner.run(_send_no_more())
    assert answer.startswith(INTERIM * 2 + b"HTTP/1.1 200 OK")


async def _leave() -> str:
    gone: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def keep(exchange: Exchange) -> None:
        exchange.on_gone = gone.set_result
        writer.close()

    listener = _listener(keep)
    host, port = await listener.open(("127.0.0.1", 0))
    _, writer = await asyncio.open_connection(host, port)
    writer.write(REQUEST)
    async with asyncio.timeout(20.0):
        code = await gone
    await listener.close()
    return code


async def _send_no_more() -> bytes:
    """Return all that the client receives; it is answered after both interim responses."""
    kept: list[Exchange] = []
    listener = _listener(kept.append)
    host, port = await listener.open(("127.0.0.1", 0))
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(REQUEST)
    writer.write_eof()
    async with asyncio.timeout(20.0):
        received = await reader.readexactly(2 * len(INTERIM))
        kept[0].respond(200, b"{}")
        received += await reader.read()
    writer.close()
    await listener.close()
    return received


def _listener(handler: Callable[[Exchange], None]) -> Listener:
    return Listener(
        GatewaySpec(port=0),
        handler=handler,
        on_refused=lambda _error: None,
        new_id=lambda: "id",
        now=asyncio.get_running_loop().time,
        wall=lambda: 0.0,
    )
