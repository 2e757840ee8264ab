"""Checks whether a router in this pod can find its workers through the API server, and how to fix it if not.

The probe makes the router's requests, with the same credentials and bounds, and changes nothing.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvasir.config.spec.cluster import DEPLOYMENT_LABEL, POOL_LABEL, KubernetesDiscoverySpec
from kvasir.config.spec.deployment import Deployment, is_loopback
from kvasir.core.errors import ConfigError, ProtocolError
from kvasir_platform.cluster.kubernetes.access import Access
from kvasir_platform.cluster.kubernetes.slices import GROUP, RESOURCE, read_slice, slices_of
from kvasir_platform.cluster.preflight.finding import Finding, Level

_NAMED = 8
"""Maximum number of items of a kind that a finding lists."""


@dataclass(frozen=True, slots=True)
class ApiRefusal:
    """The API server's refusal of a verb; `status` is 0 if there was no response."""

    verb: Literal["list", "watch"]
    status: int
    message: str


@dataclass(frozen=True, slots=True)
class PoolSighting:
    """The contents of one pool's slices. `ports` are the port names of slices with pods; each pod is counted
    in one state, and `leaving` ones are being deleted."""

    services: tuple[str, ...] = ()
    ports: tuple[str, ...] = ()
    ready: int = 0
    waiting: tuple[str, ...] = ()
    leaving: int = 0


@dataclass(frozen=True, slots=True)
class KubernetesProbe:
    """The result of the probe. `outside`: why this is not a pod with access; `unreadable`: why its
    credentials cannot be used. `pools` are those of this deployment that have labelled Services, and
    `deployments` all that have any in the namespace."""

    outside: str = ""
    unreadable: str = ""
    server: str = ""
    namespace: str = ""
    account: str = ""
    refusals: tuple[ApiRefusal, ...] = ()
    pools: dict[str, PoolSighting] = field(default_factory=dict)
    deployments: tuple[str, ...] = ()


def probe_kubernetes(deployment: Deployment, environ: Mapping[str, str]) -> KubernetesProbe | None:
    """Query the API server; None for another kind of discovery. Call where no event loop runs."""
    spec = deployment.discovery.kubernetes
    if deployment.discovery.kind != "kubernetes":
        return None
    try:
        access = Access.in_cluster(Path(spec.credentials_dir), environ)
    except ConfigError as error:
        return KubernetesProbe(outside=error.message.partition("; ")[0])
    try:
        namespace, token = spec.namespace or access.namespace(), access.token()
        access.context()
    except (ConfigError, OSError) as error:
        return KubernetesProbe(unreadable=str(error).partition("; ")[0])
    refusals, sightings = asyncio.run(_ask(access, spec, slices_of(namespace)))
    return KubernetesProbe(
        server=f"{access.host}:{access.port}",
        namespace=namespace,
        account=_account(token),
        refusals=tuple(refusals),
        pools={pool: seen for (name, pool), seen in sightings.items() if name == deployment.name},
        deployments=tuple(sorted({name for name, _ in sightings})),
    )


def kubernetes_findings(deployment: Deployment, probe: KubernetesProbe) -> Iterator[Finding]:
    """Yield what keeps the router from its workers, in the order in which to fix it."""
    if is_loopback(deployment.worker.host):
        yield Finding(
            "workers",
            "error",
            f"worker.host is {deployment.worker.host}: workers can be reached from their own pods only",
            "set worker.host to 0.0.0.0 (or ::)",
        )
    if trouble := _no_access(deployment, probe):
        yield trouble
    elif probe.refusals:
        yield from (_refused(probe, refusal) for refusal in probe.refusals)
    else:
        yield Finding("cluster", "ok", f"{RESOURCE} of namespace {probe.namespace} can be listed and watched")
    if not any(refusal.verb == "list" for refusal in probe.refusals) and probe.server:
        for pool in deployment.pools:
            yield _pool(deployment, pool.name, probe)
        yield from _strangers(deployment, probe)


async def _ask(
    access: Access, spec: KubernetesDiscoverySpec, collection: str
) -> tuple[list[ApiRefusal], dict[tuple[str, str], PoolSighting]]:
    """Return the refused verbs, and what the slices of each (deployment, pool) hold."""
    # The Kubernetes client takes long to import, and the command line imports this module for every check.
    from kvasir_platform.cluster.kubernetes.api import GONE, ApiError, ApiServer, probe_watch

    api = ApiServer(access, timeout_s=spec.request_timeout_s)
    params = {"labelSelector": POOL_LABEL}
    refusals: list[ApiRefusal] = []
    version, objects = "0", dict[str, bytes]()
    try:
        listing = await api.list(collection, params)
        version, objects = listing.version, listing.items
    except ApiError as error:
        refusals.append(ApiRefusal("list", error.status, error.message))
    if not refusals or refusals[0].status == 403:
        try:
            await probe_watch(api, collection, params, version)
        except ApiError as error:
            # An expired version does not matter: the watch was permitted.
            if error.status != GONE:
                refusals.append(ApiRefusal("watch", error.status, error.message))
    return refusals, _sightings(objects, spec.port)


def _sightings(objects: Mapping[str, bytes], port: str) -> dict[tuple[str, str], PoolSighting]:
    states: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    services: dict[tuple[str, str], set[str]] = {}
    ports: dict[tuple[str, str], set[str]] = {}
    for raw in objects.values():
        try:
            found = read_slice(raw, port)
        except ProtocolError:
            continue
        key = (found.deployment, found.pool)
        pods = states.setdefault(key, {})
        services.setdefault(key, set()).add(found.service)
        if found.places:
            ports.setdefault(key, set()).update(found.ports)
        for place in found.places:
            state = "leaving" if place.terminating else "ready" if place.ready else "waiting"
            pods[place.pod] = (state, place.name)
    return {
        key: PoolSighting(
            services=tuple(sorted(services[key])),
            ports=tuple(sorted(ports.get(key, ()))),
            ready=sum(state == "ready" for state, _ in pods.values()),
            waiting=tuple(sorted(name for state, name in pods.values() if state == "waiting")),
            leaving=sum(state == "leaving" for state, _ in pods.values()),
        )
        for key, pods in states.items()
    }


def _no_access(deployment: Deployment, probe: KubernetesProbe) -> Finding | None:
    if probe.outside:
        return Finding(
            "cluster",
            "error",
            probe.outside,
            "run this in the router's pod: `kubectl exec deploy/ROUTER -- kvasir check`",
        )
    if probe.unreadable:
        return Finding(
            "cluster",
            "error",
            f"the service account cannot be used: {probe.unreadable}",
            "set automountServiceAccountToken: true for the router's pod, or mount a projected volume with "
            f"token, ca.crt and namespace at {deployment.discovery.kubernetes.credentials_dir}",
        )
    return None


def _refused(probe: KubernetesProbe, refusal: ApiRefusal) -> Finding:
    who = probe.account or "the router's service account"
    what = f"{refusal.verb} {RESOURCE} in namespace {probe.namespace}"
    if refusal.status == 403:
        rule = f'{{apiGroups: ["{GROUP}"], resources: ["{RESOURCE}"], verbs: ["list", "watch"]}}'
        return Finding(
            "cluster",
            "error",
            f"{who} may not {what}",
            f"add to a Role of namespace {probe.namespace} the rule {rule}, and bind it to {who}",
        )
    if refusal.status == 401:
        return Finding(
            "cluster",
            "error",
            f"the API server at {probe.server} does not accept the token of {who}",
            "it has expired, or is for another cluster or audience: mount the service account's own, which "
            "the kubelet renews",
        )
    if refusal.status == 404:
        return Finding(
            "cluster", "error", f"the API server does not serve {GROUP}/v1", "use Kubernetes 1.30 or newer"
        )
    if refusal.status:
        return Finding(
            "cluster",
            "warning",
            f"the API server refused to {what} (status {refusal.status}): {refusal.message}",
            "try again; a router keeps its known workers, and retries",
        )
    return Finding(
        "cluster",
        "error",
        f"the API server at {probe.server} does not respond to {what}: {refusal.message}",
        "if it names a certificate, mount the service account's own ca.crt; otherwise let NetworkPolicies "
        f"allow TCP from the router's pods to {probe.server}",
    )


def _pool(deployment: Deployment, pool: str, probe: KubernetesProbe) -> Finding:
    seen, port = probe.pools.get(pool), deployment.discovery.kubernetes.port
    check = "workers"
    if seen is None:
        others = [name for name in probe.deployments if name and name != deployment.name]
        hint = f" (there are Services of {', '.join(others[:_NAMED])})" if others else ""
        return Finding(
            check,
            "error",
            f"pool {pool}: namespace {probe.namespace} has no Service labelled "
            f"{DEPLOYMENT_LABEL}: {deployment.name} and {POOL_LABEL}: {pool}{hint}",
            f"create a headless Service with these labels and a port named {port}, whose selector matches "
            "the pool's pods of rank 0; if the names differ, correct the deployment's `name`",
        )
    service = ", ".join(seen.services)
    if seen.ports and port not in seen.ports:
        return Finding(
            check,
            "error",
            f"pool {pool}: Service {service} has no port named {port}; it has: {', '.join(seen.ports)}",
            f"name the sessions' port {port}, or set discovery.kubernetes.port",
        )
    pods = seen.ready + len(seen.waiting)
    if seen.ready:
        return Finding(check, "ok", f"pool {pool}: {seen.ready} of {pods} pods are ready (Service {service})")
    if pods:
        return Finding(
            check,
            "warning",
            f"pool {pool}: none of {pods} pods is ready: {', '.join(seen.waiting[:_NAMED])}",
            f"they may still load weights; else see `kubectl describe pod {seen.waiting[0]}` and its logs",
        )
    leaving = f" but {seen.leaving} that are being deleted" if seen.leaving else ""
    level: Level = "warning" if deployment.pool(pool).replicas else "ok"
    return Finding(
        check,
        level,
        f"pool {pool}: Service {service} selects no pod{leaving}",
        f"compare its selector with `kubectl get pods --show-labels -l {POOL_LABEL}={pool}`"
        if level == "warning"
        else "",
    )


def _strangers(deployment: Deployment, probe: KubernetesProbe) -> Iterator[Finding]:
    if strange := sorted(probe.pools.keys() - {pool.name for pool in deployment.pools}):
        yield Finding(
            "workers",
            "warning",
            f"Services of namespace {probe.namespace} are labelled for pools that this deployment does not "
            f"have: {', '.join(strange[:_NAMED])}",
            "add the pools to the spec, or correct the label: their workers get no requests",
        )


def _account(token: str) -> str:
    """Return the subject that a token claims, "" if it has none. Not verified, for messages only."""
    try:
        payload = token.split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        return str(claims.get("sub", ""))[:256]
    except (IndexError, binascii.Error, ValueError, AttributeError):
        return ""
