"""Discovery through Kubernetes: workers are the endpoints of each pool's Service, from its EndpointSlices.

Only pods that a Service selects are members. Services select pods of rank 0, so an engine on several nodes is
found by its first node, which serves its sessions.

Members stay while the API server does not answer. If a pool loses all its workers and no deletion was seen, a
second list some seconds later has to confirm it: a restarted controller, or a Service that is deleted and
created again, must not end running requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path

from kvasir.config.spec.cluster import DEPLOYMENT_LABEL, POOL_LABEL, KubernetesDiscoverySpec
from kvasir.config.spec.deployment import Deployment
from kvasir.core.errors import ProtocolError
from kvasir.core.membership import STALE_S, MembershipSnapshot
from kvasir.ports.clock import Clock, Rng
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.api import ApiServer
from kvasir_platform.cluster.kubernetes.reflector import Reflector
from kvasir_platform.cluster.kubernetes.slices import Slice, read_slice, slices_of, workers

log = logging.getLogger(__name__)


def selector(deployment: str, pools: Iterable[str] = ()) -> dict[str, str]:
    """Return the parameters that select the slices of a deployment, limited to `pools` if any are given."""
    named = ",".join(sorted(pools))
    only = f",{POOL_LABEL} in ({named})" if named else ""
    return {"labelSelector": f"{DEPLOYMENT_LABEL}={deployment}{only}"}


class KubernetesDiscovery:
    """The Discovery port over EndpointSlices (port: kvasir.ports.discovery). All callers of `watch` share one
    watch of the API server, which the first of them starts."""

    def __init__(
        self,
        api: ApiServer,
        namespace: str,
        deployment: str,
        pools: Iterable[str],
        spec: KubernetesDiscoverySpec,
        *,
        clock: Clock,
        rng: Rng,
    ) -> None:
        self._spec = spec
        self._clock = clock
        self._reflector = Reflector(
            api,
            slices_of(namespace),
            selector(deployment, pools),
            clock=clock,
            rng=rng,
            resync_s=spec.resync_s,
            take=self._take,
        )
        self._following: asyncio.Task[None] | None = None
        self._members: MembershipSnapshot | None = None
        self._empty_since: dict[str, float] = {}
        self._slices: dict[str, tuple[bytes, Slice | None]] = {}
        self._changed = asyncio.Event()
        self._closed = False

    @classmethod
    def in_cluster(cls, deployment: Deployment, clock: Clock, rng: Rng) -> KubernetesDiscovery:
        """Return the discovery of a pod in the cluster. Raises ConfigError outside a cluster."""
        spec = deployment.discovery.kubernetes
        access = Access.in_cluster(Path(spec.credentials_dir), os.environ)
        namespace = spec.namespace or access.namespace()
        pools = [pool.name for pool in deployment.pools]
        api = ApiServer(access, timeout_s=spec.request_timeout_s)
        return cls(api, namespace, deployment.name, pools, spec, clock=clock, rng=rng)

    async def watch(self) -> AsyncIterator[MembershipSnapshot]:
        """See Discovery. Raises the exception that ended the reflector, which is a bug."""
        if self._following is None and not self._closed:
            self._following = asyncio.create_task(self._reflector.run(), name="kubernetes-slices")
            self._following.add_done_callback(lambda _: self._tell())
        seen: MembershipSnapshot | None = None
        while not self._closed:
            if self._members is not None and self._members is not seen:
                seen = self._members
                yield seen
            elif self._following is not None and self._following.done():
                self._following.result()
            else:
                await self._changed.wait()

    def stale_s(self) -> float:
        """See Discovery."""
        return self._reflector.stale_s()

    async def close(self) -> None:
        """See Discovery."""
        self._closed = True
        self._tell()
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait({self._following})

    def _take(self, objects: Mapping[str, bytes]) -> float:
        """Recompute the members from changed slices; see Reflector."""
        slices, now = self._read(objects), self._clock.now()
        found = workers(slices, self._spec.address_family)
        known = self._members.endpoints if self._members is not None else frozenset()
        leaving = {each.pool for each in slices if any(place.terminating for place in each.places)}
        empty = {each.pool for each in known} - {each.pool for each in found} - leaving
        for pool in empty - self._empty_since.keys():
            log.warning("pool %s has no worker in any slice; listing again to confirm", pool)
        self._empty_since = {pool: self._empty_since.get(pool, now) for pool in empty}
        doubt_s = {pool: since + STALE_S - now for pool, since in self._empty_since.items()}
        found |= {each for each in known if doubt_s.get(each.pool, 0.0) > 0}
        if self._members is None or known != found:
            self._members = MembershipSnapshot(self._members.revision + 1 if self._members else 1, found)
            self._tell()
        return max((0.0, *doubt_s.values()))

    def _read(self, objects: Mapping[str, bytes]) -> list[Slice]:
        """Return the parsed slices; only changed objects are parsed."""
        read: dict[str, tuple[bytes, Slice | None]] = {}
        for name, raw in objects.items():
            before = self._slices.get(name)
            if before is not None and before[0] == raw:
                read[name] = before
                continue
            try:
                read[name] = raw, read_slice(raw, self._spec.port)
            except ProtocolError as error:
                read[name] = raw, None
                log.warning("ignoring the slice %s: %s", name, error)
        self._slices = read
        return [found for _, found in read.values() if found is not None]

    def _tell(self) -> None:
        """Wake all watches; each waits for the next change on an event of its own."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
