"""Asks a running gateway: whether it could serve, which workers it sees, why a request ran where it ran.

Where the gateway asks for an API key, it is taken from $KVASIR_API_KEY.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from kvasir.core.errors import RequestError, UpstreamError
from kvasir_platform.cli.progress import reachable

_TIMEOUT_S = 3.0
_BODY_LIMIT = 8 << 20
_REASON_LIMIT = 1000
KEY_VARIABLE = "KVASIR_API_KEY"


def get(address: str, path: str) -> tuple[int, bytes]:
    """GET from `host:port`; (status, body). Raises UpstreamError when nobody answers in time."""
    connection = http.client.HTTPConnection(reachable(address), timeout=_TIMEOUT_S)
    try:
        key = os.environ.get(KEY_VARIABLE)
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
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
        return body.decode("utf-8", "replace").strip()[:_REASON_LIMIT]
    if isinstance(value, dict):
        inner = value.get("error", value)
        if isinstance(inner, dict):
            value = inner.get("message") or inner.get("reason") or inner
    return str(value)[:_REASON_LIMIT]


def workers(address: str) -> Sequence[dict[str, Any]]:
    """The gateway's view of its workers (`kvasir.ports.router.WorkerView` as JSON). Raises
    UpstreamError when it does not answer or answers something else."""
    found = _asked(address, "/status").get("workers")
    if not isinstance(found, list):
        raise UpstreamError(
            f"the gateway at {address} told of no workers at /status; is it a Kvasir gateway?"
        )
    return [worker for worker in found if isinstance(worker, dict)]


def decisions(address: str, request_id: str) -> dict[str, Any]:
    """`{"request_id", "decisions"}`, the latter as kvasir.ports.router.DecisionRecord in JSON. Raises
    RequestError for an id of which nothing is kept, and UpstreamError as above."""
    return _asked(address, f"/decisions/{quote(request_id, safe='')}")


def _asked(address: str, path: str) -> dict[str, Any]:
    status, body = get(address, path)
    if status == 401:
        sent = (
            f"refuses the key in ${KEY_VARIABLE}" if os.environ.get(KEY_VARIABLE) else "asks for an API key"
        )
        raise UpstreamError(
            f"the gateway at {address} {sent}; set {KEY_VARIABLE} to one of its keys", code="invalid_api_key"
        )
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    if status == 404 and isinstance(value, dict) and _code(value) == "decision_not_found":
        raise RequestError(reason_in(body), status=404, code="decision_not_found")
    if status != 200 or not isinstance(value, dict):
        raise UpstreamError(f"the gateway at {address} answered {status} to {path}: {reason_in(body)}")
    return value


def _code(value: dict[str, Any]) -> object:
    error = value.get("error")
    return error.get("code") if isinstance(error, dict) else None
