"""Corrupt requests over real sockets, in random pieces: the gateway neither fails nor leaks."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import psutil
import pytest
from load_tests.scenarios.scorecard.clients.http_cases import CASES, Case, send
from tests.kit.gateway.http_edge import Edge, serving

CLIENTS = 200
AT_ONCE = 20
NOTHING = Case("nothing", b"", (), closes=False)


def spoil(rng: random.Random) -> bytes:
    """A few cases, joined, with bytes flipped, put in, taken out or repeated."""
    data = bytearray(b"".join(rng.choice(CASES).data[:5000] for _ in range(rng.randint(1, 3))))
    for _ in range(rng.randint(0, 4)):
        at = rng.randrange(len(data))
        kind = rng.randrange(4)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randint(1, 5))
        elif kind == 2:
            del data[at : at + rng.randint(1, 5)]
        else:
            data[at:at] = data[at : at + rng.randint(1, 200)]
        data = data or bytearray(b"\r\n")
    return bytes(data)


async def attack(edge: Edge, rng: random.Random) -> None:
    """One client: sends in pieces, reads what comes, then leaves, in good order or not."""
    reader, writer = await asyncio.open_connection(edge.host, edge.port)
    data = spoil(rng)
    try:
        while data and not writer.is_closing():
            size = rng.randint(1, len(data))
            writer.write(data[:size])
            data = data[size:]
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            writer.write_eof()
            async with asyncio.timeout(10.0):
                await reader.read()
    except OSError:
        pass  # the gateway may reset a client that goes on sending
    finally:
        writer.transport.abort()


def held(edge: Edge) -> int:
    """The gateway's ends of connections."""
    found = psutil.Process().net_connections("tcp")
    return sum(c.laddr.port == edge.port and c.status in {"ESTABLISHED", "CLOSE_WAIT"} for c in found)


@pytest.mark.parametrize("seed", range(3))
async def test_the_gateway_outlives_spoilt_requests_and_keeps_nothing_of_them(seed: int) -> None:
    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    rng = random.Random(seed)
    async with serving() as edge:
        edge.router.script = lambda stream: stream.finish()
        for _ in range(CLIENTS // AT_ONCE):
            clients = (random.Random(rng.random()) for _ in range(AT_ONCE))
            await asyncio.gather(*(attack(edge, client) for client in clients))
        for canary in range(5):
            assert (await send(edge.host, edge.port, NOTHING, f"canary-{canary}")).canary
        async with asyncio.timeout(10.0):
            while held(edge):
                await asyncio.sleep(0.05)
        shown = edge.metrics.render()
    assert faults == []
    assert b'outcome="internal_error"' not in shown
    assert b'outcome="malformed_http"' in shown
