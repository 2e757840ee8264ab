"""A gateway's pages for fault tests: /status as a value, /metrics as sums."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException
from typing import Any

import msgspec

from kvasir.core.errors import UpstreamError
from kvasir.ports.clock import Clock

_ANSWER_S = 5.0


async def get(address: str, path: str, key: str = "") -> bytes:
    """The body of a page at `host:port`, with an operator's API key if one is required. Raise UpstreamError
    for an answer other than 200, or for none."""
    # In a thread: other streams on this loop would otherwise delay the request and count against the gateway.
    return await asyncio.to_thread(_get, address, path, key)


def _get(address: str, path: str, key: str) -> bytes:
    shown = {"Authorization": f"Bearer {key}"} if key else {}
    connection = HTTPConnection(address, timeout=_ANSWER_S)
    try:
        connection.request("GET", path, headers={"Connection": "close", **shown})
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, HTTPException) as error:
        raise UpstreamError(f"the gateway at {address} does not answer {path}: {error!r}") from error
    finally:
        connection.close()
    if answer.status != HTTPStatus.OK:
        raise UpstreamError(f"the gateway at {address} answered {path} with {body[:200]!r}")
    return body


async def status(address: str, key: str = "") -> dict[str, Any]:
    """GET /status."""
    page: dict[str, Any] = msgspec.json.decode(await get(address, "/status", key))
    return page


async def workers(address: str, key: str = "") -> dict[str, dict[str, Any]]:
    """The workers of /status by address."""
    return {worker["address"]: worker for worker in (await status(address, key))["workers"]}


async def decision(address: str, request_id: str) -> dict[str, Any]:
    """The decision record of a request."""
    page: dict[str, Any] = msgspec.json.decode(await get(address, f"/decisions/{request_id}"))
    return page


def metric(text: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have all of `labels`; 0 without any."""
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
    """Poll until the condition is true; return the seconds it took. Raise TimeoutError with `what`."""
    began = clock.now()
    while True:
        if await condition():
            return clock.now() - began
        if clock.now() - began > within_s:
            raise TimeoutError(f"not within {within_s:g} s: {what}")
        await clock.sleep(poll_s)
