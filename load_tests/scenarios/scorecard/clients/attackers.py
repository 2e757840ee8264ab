"""Slow and oversized clients. They run in a separate process, because other clients read their streams at the
same time and the attackers' CPU must not be attributed to the gateway. The process has the lowest priority,
as if it ran on another machine.

    python -m load_tests.scenarios.scorecard.clients.attackers ADDRESS CLIENTS [idle]

prints a line when it is ready, attacks when it receives a line, and prints one JSON object: for each kind,
how long its last client was connected in seconds, or a string that describes the unexpected result. With
`idle` it holds as many connections that do nothing, from then until its input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass

from load_tests.scenarios.scorecard.clients.http_cases import read_answer
from load_tests.scenarios.scorecard.common import NotProven

_PATIENCE_S = 40.0
_TRICKLE_S = 0.5
_BOMB_S = 0.02
_PLAIN = b"GET /health HTTP/1.1\r\nHost: t\r\n\r\n"
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\n"
_LEAST_URGENT = 19


@dataclass(frozen=True, slots=True)
class Attack:
    """The bytes that a client sends first, and the bytes that it repeats twice a second (fifty times for a
    bomb). `status` is the expected answer, or None if the connection is closed without one."""

    name: str
    first: bytes
    more: bytes
    status: int | None
    bomb: bool = False


ATTACKS = (
    Attack("silence", b"", b"", None),
    Attack("empty lines", b"\r\n", b"\r\n", None),
    Attack("slow headers", _HEAD, b"X: y\r\n", 408),
    Attack("a slow body", _HEAD + b"Content-Length: 100000\r\n\r\n", b"a", 408),
    Attack("slow chunks", _HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n", 408),
    Attack("a bomb in one header", _HEAD + b"X: ", b"a" * 16384, 431, bomb=True),
    Attack("a bomb of headers", _HEAD, b"X: y\r\n" * 1000, 431, bomb=True),
    Attack("a bomb in the body", _HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
           b"10000\r\n" + b"a" * 65536 + b"\r\n", 413, bomb=True),
    Attack("a bomb of extensions", _HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
           b"1;" + b"x" * 8000 + b"\r\na\r\n", 413, bomb=True),
)  # fmt: skip


async def _all_cut(address: str, attack: Attack, clients: int) -> float:
    return max(await asyncio.gather(*(_one(address, attack) for _ in range(clients))))


async def _one(address: str, attack: Attack) -> float:
    """Return how long one client was connected. Raise NotProven if it is not disconnected, or not in the
    expected way."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    began = time.monotonic()
    sending = asyncio.ensure_future(_send(writer, attack))
    try:
        async with asyncio.timeout(_PATIENCE_S):
            status: int | None = None
            with contextlib.suppress(EOFError, ConnectionError):
                status = (await read_answer(reader)).status
            took = time.monotonic() - began
            with contextlib.suppress(ConnectionError):
                await reader.read()
    except TimeoutError as error:
        raise NotProven(f"{attack.name}: not cut within {_PATIENCE_S:g} s") from error
    finally:
        sending.cancel()
        writer.transport.abort()
    # A client that keeps sending may lose the answer to the reset that closes its connection.
    if status != attack.status and not (attack.bomb and status is None):
        raise NotProven(f"{attack.name}: answered {status}, and not {attack.status}")
    return took


async def _send(writer: asyncio.StreamWriter, attack: Attack) -> None:
    with contextlib.suppress(ConnectionError):
        writer.write(attack.first)
        while attack.more and not writer.is_closing():
            writer.write(attack.more)
            await writer.drain()
            await asyncio.sleep(_BOMB_S if attack.bomb else _TRICKLE_S)


async def _hold(address: str, connections: int) -> None:
    """Open connections that have made one request, as those of ordinary clients, and hold them."""
    host, _, port = address.rpartition(":")
    held = [await asyncio.open_connection(host, int(port)) for _ in range(connections)]
    for reader, writer in held:
        writer.write(_PLAIN)
        if (status := (await read_answer(reader)).status) != 200:
            raise NotProven(f"a plain request was answered with {status}")
    print("{}", flush=True)
    await asyncio.to_thread(sys.stdin.read)


async def _attack(address: str, clients: int) -> dict[str, float] | str:
    try:
        worst = await asyncio.gather(*(_all_cut(address, attack, clients) for attack in ATTACKS))
    except NotProven as error:
        return str(error)
    return dict(zip((attack.name for attack in ATTACKS), worst, strict=True))


def main() -> None:
    """Run the attacks."""
    address, clients = sys.argv[1], int(sys.argv[2])
    idle = sys.argv[3:] == ["idle"]
    os.nice(_LEAST_URGENT)
    print("ready", flush=True)
    if not sys.stdin.readline():
        return
    if idle:
        asyncio.run(_hold(address, clients * len(ATTACKS)))
    else:
        print(json.dumps(asyncio.run(_attack(address, clients))), flush=True)


if __name__ == "__main__":
    main()
