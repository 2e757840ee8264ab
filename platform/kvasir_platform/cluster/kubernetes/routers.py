"""The routers behind a Kubernetes Service, by its EndpointSlices: for commands that ask each of them.

A router's service account may list EndpointSlices in its namespace, so this works in a router's pod.
"""

from __future__ import annotations

import msgspec

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.api import ApiError, ApiServer
from kvasir_platform.cluster.kubernetes.slices import SERVICE_LABEL, slices_of

_TIMEOUT_S = 10.0
_PORT = "http"


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Ready(msgspec.Struct):
    ready: bool | None = None


class _Pod(msgspec.Struct):
    name: str = ""


class _Address(msgspec.Struct, rename="camel"):
    addresses: list[str]
    conditions: _Ready | None = None
    target_ref: _Pod | None = None


class _Slice(msgspec.Struct):
    endpoints: list[_Address] | None = None
    ports: list[_Port] | None = None


async def router_addresses(access: Access, service: str) -> tuple[str, ...]:
    """Return `host:port` of each ready endpoint of a Service in the pod's namespace, in order. Raises
    ConfigError if there is none, and UpstreamError if the API server does not say."""
    namespace = access.namespace()
    api = ApiServer(access, timeout_s=_TIMEOUT_S)
    try:
        listing = await api.list(slices_of(namespace), {"labelSelector": f"{SERVICE_LABEL}={service}"})
    except ApiError as error:
        hint = "; run this in a router's pod, whose Role allows it" if error.status in (401, 403) else ""
        raise UpstreamError(
            f"--service {service}: EndpointSlices cannot be listed: {error.message}{hint}"
        ) from error
    # A pod with addresses of two families is in two slices.
    found: dict[str, str] = {}
    for _, value in sorted(listing.items.items()):
        for pod, address in _addresses(msgspec.json.decode(value, type=_Slice)):
            found.setdefault(pod, address)
    if not found:
        raise ConfigError(
            f"--service {service}: no router is ready behind a Service of that name in {namespace}; "
            "`kubectl get services` lists the names"
        )
    return tuple(sorted(found.values()))


def _addresses(piece: _Slice) -> list[tuple[str, str]]:
    """Return the pod and the address of each ready endpoint."""
    ports = piece.ports or []
    port = next((each.port for each in ports if each.name == _PORT), ports[0].port if ports else None)
    found = []
    for each in piece.endpoints or []:
        ready = each.conditions is None or each.conditions.ready is not False
        if port is None or not each.addresses or not ready:
            continue
        host = each.addresses[0]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        found.append((address if each.target_ref is None else each.target_ref.name, address))
    return found
