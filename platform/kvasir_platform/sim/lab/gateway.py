"""A gateway's pages, as tests of faults read them: /status as a value, /metrics as sums."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from kvasir.core.errors import UpstreamError
from kvasir.ports.clock import Clock

_ANSWER_S = 5.0
_BODY_BYTES = 16 << 20


async def get(address: str, path: str, key: str = "") -> bytes:
    """The body of a page at `host:port`, with an operator's API key where one is asked for. Raises
    UpstreamError for an answer other than 200, or for none."""
    shown = f"Authorization: Bearer {key}\r\n" if key else ""
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(_ANSWER_S):
            reader, writer = await asyncio.open_connection(host, int(port), limit=_BODY_BYTES)
            try:
                head_lines = f"GET {path} HTTP/1.1\r\nHost: {address}\r\n{shown}Connection: close\r\n\r\n"
                writer.write(head_lines.encode())
                head = await reader.readuntil(b"\r\n\r\n")
                body = await reader.read(-1)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise UpstreamError(f"the gateway at {address} does not answer {path}: {error!r}") from error
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise UpstreamError(f"the gateway at {address} answered {path} with {body[:200]!r}")
    return body


async def status(address: str, key: str = "") -> dict[str, Any]:
    """GET /status."""
    page: dict[str, Any] = msgspec.json.decode(await get(address, "/status", key))
    return page


async def workers(address: str, key: str = "") -> dict[str, dict[str, Any]]:
    """The workers of /status by their address."""
    return {worker["address"]: worker for worker in (await status(address, key))["workers"]}


async def decision(address: str, request_id: str) -> dict[str, Any]:
    """The record of why a request ran where it ran."""
    page: dict[str, Any] = msgspec.json.decode(await get(address, f"/decisions/{request_id}"))
    return page


def metric(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that carry all of `labels`; 0 when there are none."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    total = 0.0
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == name and all(label in series for label in wanted):
            total += float(value)
    return total


async def metrics(address: str, key: str = "") -> str:
    """GET /metrics."""
    return (await get(address, "/metrics", key)).decode()


async def until(
    condition: Callable[[], Awaitable[bool]], within_s: float, what: str, clock: Clock, poll_s: float = 0.01
) -> float:
    """Ask until it is true; returns how long that took in seconds. Raises TimeoutError with `what`."""
    began = clock.now()
    while True:
        if await condition():
            return clock.now() - began
        if clock.now() - began > within_s:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        await clock.sleep(poll_s)
