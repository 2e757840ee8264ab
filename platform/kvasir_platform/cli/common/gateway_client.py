"""Requests to a running gateway: readiness, workers, decisions, and drains.

If the gateway requires an API key, it is $KVASIR_API_KEY, or in the file $KVASIR_API_KEY_FILE.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from kvasir.core.errors import ConfigError, RequestError, UpstreamError
from kvasir_platform.cli.common.gateway_site import AnotherCertificateError, Site

_TIMEOUT_S = 3.0
_RECORDING_TIMEOUT_S = 15.0
_COSTS_TIMEOUT_S = 60.0
_RENEWAL_S = 1.5
"""Seconds within which a gateway uses a replaced certificate."""
_BODY_LIMIT = 16 << 20
_REASON_LIMIT = 1000
KEY_VARIABLE = "KVASIR_API_KEY"
KEY_FILE_VARIABLE = "KVASIR_API_KEY_FILE"


def key_headers() -> dict[str, str]:
    """Return the header with the API key, empty without a key. Raises ConfigError if its file cannot be
    read."""
    key = os.environ.get(KEY_VARIABLE)
    if not key and (name := os.environ.get(KEY_FILE_VARIABLE)):
        try:
            key = Path(name).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{KEY_FILE_VARIABLE}: {name} cannot be read: {error}") from error
    return {"Authorization": f"Bearer {key}"} if key else {}


def get(site: Site, path: str, pause: Callable[[float], None] = time.sleep) -> tuple[int, bytes]:
    """Send a GET. Return (status, body). Raises UpstreamError if the gateway does not answer in time or is
    not the expected one, and ConfigError for certificates that cannot be used."""
    return _call("GET", site, path, None, pause)


def _call(
    method: str,
    site: Site,
    path: str,
    body: dict[str, Any] | None = None,
    pause: Callable[[float], None] = time.sleep,
    *,
    timeout_s: float = _TIMEOUT_S,
) -> tuple[int, bytes]:
    try:
        return _try(method, site, path, body, timeout_s)
    except AnotherCertificateError:
        pause(_RENEWAL_S)
        return _try(method, site, path, body, timeout_s)


def _try(
    method: str, site: Site, path: str, body: dict[str, Any] | None, timeout_s: float
) -> tuple[int, bytes]:
    connection: http.client.HTTPConnection | None = None
    try:
        connection = site.connect(timeout_s)
        headers = key_headers()
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read(_BODY_LIMIT)
    except (OSError, http.client.HTTPException) as error:
        raise UpstreamError(f"the gateway at {site.authority} {site.explain(error)}") from error
    finally:
        if connection is not None:
            connection.close()


async def missing_to_serve(site: Site) -> str | None:
    """Return None if the gateway is ready to serve, else what it reports as missing."""
    try:
        status, body = await asyncio.to_thread(get, site, "/health/ready")
    except (UpstreamError, ConfigError) as error:
        return error.message
    return None if status == 200 else reason_in(body)


def reason_in(body: bytes) -> str:
    """Return the reason in an error's body: its `message` or `reason`, else its text."""
    try:
        value = json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace").strip()[:_REASON_LIMIT]
    if isinstance(value, dict):
        inner = value.get("error", value)
        if isinstance(inner, dict):
            value = inner.get("message") or inner.get("reason") or inner
    return str(value)[:_REASON_LIMIT]


def status_of(site: Site) -> dict[str, Any]:
    """Return the gateway's /status. Raises UpstreamError if it does not answer, or the response is not
    that."""
    return _asked(site, "/status", "workers")


def workers(site: Site) -> Sequence[dict[str, Any]]:
    """Return the gateway's view of its workers (`kvasir.ports.router.WorkerView` as JSON). Raises
    UpstreamError as above."""
    return [worker for worker in status_of(site)["workers"] if isinstance(worker, dict)]


def decisions(site: Site, request_id: str) -> dict[str, Any]:
    """Return `{"request_id", "decisions"}`, the latter as kvasir.ports.router.DecisionRecord in JSON. Raises
    RequestError for an id without a record, and UpstreamError as above."""
    return _asked(site, f"/decisions/{quote(request_id, safe='')}", "decisions")


def requests_of(site: Site) -> dict[str, Any]:
    """Return the requests of a router (see GET /requests). Raises UpstreamError as above."""
    return _asked(site, "/requests", "running", "latest", "slowest")


def metrics_of(site: Site) -> bytes:
    """Return the metrics in Prometheus' text format. Raises UpstreamError as above."""
    status, body = get(site, "/metrics")
    if status != 200:
        _checked(site, "/metrics", status, body)
    return body


def regrets(site: Site) -> dict[str, Any]:
    """Return the regret of the router's decisions by model (see GET /decisions). Raises UpstreamError as
    above."""
    models = _asked(site, "/decisions").get("models")
    return models if isinstance(models, dict) else {}


def read_recording(site: Site, reader: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the next records of a router (kvasir.ports.recordings.RecordingBatch as JSON). Raises
    UpstreamError as above."""
    path = f"/recordings/{quote(reader, safe='')}"
    status, answer = _call("POST", site, path, body, timeout_s=_RECORDING_TIMEOUT_S)
    if status == 403:
        raise UpstreamError(
            f"the gateway at {site.authority} lets operators record, and the key in ${KEY_VARIABLE} is of a "
            "tenant; set it to an operator's key",
            code="operator_only",
        )
    if status == 404:
        raise UpstreamError(
            f"the gateway at {site.authority} cannot record: it is older than this command; update it",
            code="not_found",
        )
    return _with_lists(site, path, _checked(site, path, status, answer), "records")


def costs_of(site: Site, asked: dict[str, Any]) -> dict[str, Any]:
    """Return a statement of costs (see POST /costs). Raises RequestError with the gateway's reason, and
    UpstreamError as above."""
    path = "/costs"
    status, answer = _call("POST", site, path, asked, timeout_s=_COSTS_TIMEOUT_S)
    if status in (400, 404):
        raise RequestError(reason_in(answer), status=status, code="invalid_value")
    return _with_lists(site, path, _checked(site, path, status, answer), "lines", "budgets")


def ask_drain(site: Site, worker_id: str, draining: bool, reason: str) -> None:
    """Drain a worker, or undo that. Raises RequestError for a worker that the router does not know (the
    message lists those that it does), and UpstreamError as above."""
    path = f"/workers/{quote(worker_id, safe='')}/{'drain' if draining else 'undrain'}"
    _checked(site, path, *_call("POST", site, path, {"reason": reason} if reason else {}))


def load_adapter(site: Site, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Load an adapter; return the gateway's response. Raises RequestError with the gateway's reason, and
    UpstreamError as above."""
    return _ordered(site, "/v1/load_lora_adapter", body, timeout_s)


def unload_adapter(site: Site, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Unload an adapter; as `load_adapter`."""
    return _ordered(site, "/v1/unload_lora_adapter", body, timeout_s)


def rollouts(site: Site) -> list[dict[str, Any]]:
    """Return the rollouts of canaries (see GET /rollouts). Raises UpstreamError as above."""
    found = _asked(site, "/rollouts", "rollouts")["rollouts"]
    return [each for each in found if isinstance(each, dict)]


def order_rollout(site: Site, route: str, action: str) -> dict[str, Any]:
    """Order a rollout; return it after that. Raises as `load_adapter`."""
    return _ordered(site, f"/rollouts/{quote(route, safe='')}/{action}", {}, _TIMEOUT_S)


def _ordered(site: Site, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    status, answer = _call("POST", site, path, body, timeout_s=timeout_s)
    if status not in (200, 401):
        try:
            code = _code(json.loads(answer))
        except (ValueError, AttributeError):
            code = None
        if code is not None:
            raise RequestError(reason_in(answer), status=status, code=str(code))
    return _checked(site, path, status, answer)


def _asked(site: Site, path: str, *lists: str) -> dict[str, Any]:
    return _with_lists(site, path, _checked(site, path, *get(site, path)), *lists)


def _with_lists(site: Site, path: str, found: dict[str, Any], *names: str) -> dict[str, Any]:
    for name in names:
        if not isinstance(found.get(name), list):
            raise UpstreamError(
                f"the gateway at {site.authority} returned no {name} at {path}; is it a Kvasir gateway?"
            )
    return found


def _checked(site: Site, path: str, status: int, body: bytes) -> dict[str, Any]:
    if status == 401:
        sent = f"refuses the key in ${KEY_VARIABLE}" if key_headers() else "asks for an API key"
        raise UpstreamError(
            f"the gateway at {site.authority} {sent}; set {KEY_VARIABLE} to one of its keys",
            code="invalid_api_key",
        )
    try:
        value = json.loads(body)
    except ValueError:
        value = None
    code = _code(value) if isinstance(value, dict) else None
    if status == 404 and code in ("decision_not_found", "worker_not_found"):
        raise RequestError(reason_in(body), status=404, code=str(code))
    if status not in (200, 202) or not isinstance(value, dict):
        raise UpstreamError(f"the gateway at {site.authority} answered {status} to {path}: {reason_in(body)}")
    return value


def _code(value: dict[str, Any]) -> object:
    error = value.get("error")
    return error.get("code") if isinstance(error, dict) else None
