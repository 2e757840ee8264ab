"""The routers behind a Kubernetes Service, by its EndpointSlices: for commands that ask each of them.

A router's service account may list EndpointSlices in its namespace, so this works in a router's pod.
"""

from __future__ import annotations

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.api import ApiError, ApiServer
from kvasir_platform.cluster.kubernetes.slices import SERVICE_LABEL, read_slice, slices_of

_TIMEOUT_S = 10.0
_PORT = "http"


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
        for place in read_slice(value, _PORT).places:
            if place.ready and place.address:
                found.setdefault(place.pod, place.address)
    if not found:
        raise ConfigError(
            f"--service {service}: no router is ready behind a Service of that name in {namespace}; "
            "`kubectl get services` lists the names"
        )
    return tuple(sorted(found.values()))
