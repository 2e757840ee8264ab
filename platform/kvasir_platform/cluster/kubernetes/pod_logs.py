"""The log of a worker's or a router's pod, as the API server streams it.

A worker's name in Kubernetes is that of its pod and its address, so its pod needs no look-up; a pool's pods
are found by its EndpointSlices, which a router's service account may list."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from kvasir.config.spec.cluster import POOL_LABEL
from kvasir.core.errors import ConfigError, UpstreamError
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.api import ApiError, ApiServer
from kvasir_platform.cluster.kubernetes.slices import read_slice, slices_of

_TIMEOUT_S = 10.0
_PORT = "session"


@dataclass(frozen=True, slots=True)
class PodLogQuery:
    """Whose log, and how much of it: `source` is a worker, a pool, or `router` for the pod that asks. `lines`
    None: all of it, or all since `since_s` seconds ago."""

    source: str
    follow: bool = False
    since_s: float | None = None
    lines: int | None = None

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters of the request, without the container."""
        found = {"follow": "true"} if self.follow else {}
        if self.since_s is not None:
            found["sinceSeconds"] = str(max(1, math.ceil(self.since_s)))
        if self.lines is not None:
            found["tailLines"] = str(self.lines)
        return found


async def pod_log(access: Access, query: PodLogQuery, own_pod: str) -> AsyncGenerator[str, None]:
    """Yield the lines of a pod's log, with `follow` until the pod ends. `own_pod` is the pod of this process.
    Raises ConfigError for a pool without pods, and UpstreamError if the API server does not answer or does
    not allow it, with the command that reads the log elsewhere."""
    namespace = access.namespace()
    api = ApiServer(access, timeout_s=_TIMEOUT_S)
    container = "router" if query.source == "router" else "worker"
    pod = own_pod if container == "router" else query.source
    try:
        if container == "worker":
            pod = await _worker_pod(api, namespace, query.source)
        parameters = query.parameters | {"container": container}
        async with aclosing(api.log(namespace, pod, parameters, follow=query.follow)) as lines:
            async for line in lines:
                yield line
    except ApiError as error:
        follow = " -f" if query.follow else ""
        hint = f"; read it with: kubectl logs -n {namespace} {pod} -c {container}{follow}"
        raise UpstreamError(f"the log of {query.source} cannot be read: {error.message}{hint}") from error


async def _worker_pod(api: ApiServer, namespace: str, source: str) -> str:
    pod, at, _ = source.partition("@")
    if at:
        return pod
    listing = await api.list(slices_of(namespace), {"labelSelector": f"{POOL_LABEL}={source}"})
    places = [place for raw in listing.items.values() for place in read_slice(raw, _PORT).places]
    names = sorted(place.name for place in places if not place.terminating)
    if names:
        return names[-1]
    raise ConfigError(
        f"no pool {source!r} has pods in {namespace}; `kvasir get workers` lists workers and pools"
    )
