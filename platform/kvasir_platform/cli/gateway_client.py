"""Asks a running gateway two questions: whether it could serve, and which workers it sees."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Sequence
from typing import Any

from kvasir.core.errors import UpstreamError
from kvasir_platform.cli.progress import reachable

_TIMEOUT_S = 3.0
_BODY_LIMIT = 8 << 20


def get(address: str, path: str) -> tuple[int, bytes]:
    """GET from `host:port`; (status, body). Raises UpstreamError when nobody answers in time."""
    connection = http.client.HTTPConnection(reachable(address), timeout=_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read(_BODY_LIMIT)
    except (OSError, http.client.HTTPException) as error:
        detail = str(error) or type(error).__name__
        raise UpstreamError(f"the gateway at {address} does not answer: {detail}") from error
    finally:
        connection.close()


async def missing_to_serve(address: str) -> str | None:
    """None when the gateway is ready to serve, else what it says is missing."""
    try:
        status, body = await asyncio.to_thread(get, address, "/health/ready")
    except UpstreamError as error:
        return error.message
    return None if status == 200 else reason_in(body)


def reason_in(body: bytes) -> str:
    """The reason in an error's body: its `message` or `reason`, else its text."""
    try:
        value = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip()[:200]
    if isinstance(value, dict):
        inner = value.get("error", value)
        if isinstance(inner, dict):
            value = inner.get("message") or inner.get("reason") or inner
    return str(value)[:200]


def workers(address: str) -> Sequence[dict[str, Any]]:
    """The gateway's view of its workers (`kvasir.ports.router.WorkerView` as JSON). Raises
    UpstreamError when it does not answer or answers something else."""
    status, body = get(address, "/status")
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if isinstance(value, dict):
        value = value.get("workers")
    if status != 200 or not isinstance(value, list):
        raise UpstreamError(f"the gateway at {address} answered {status} to /status: {reason_in(body)}")
    return [worker for worker in value if isinstance(worker, dict)]
