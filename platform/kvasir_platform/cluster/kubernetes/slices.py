"""Members from EndpointSlices: a pure function of the slices, independent of their order.

A pod can be in several slices: one for each address family, and briefly in two of one family while the
controller moves it. It is one worker. Readiness is ignored: a pod that fails its probes, or whose node has
lost the API server, may still serve, and its session detects failures. Pods that are being deleted are left
out, so that they get no new requests and complete those they have.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import quote

import msgspec

from kvasir.config.spec.cluster import DEPLOYMENT_LABEL, POOL_LABEL
from kvasir.core.errors import ProtocolError
from kvasir.core.locality import NOWHERE, Locality
from kvasir.core.membership import Endpoint, host_port

GROUP = "discovery.k8s.io"
VERSION = "v1"
RESOURCE = "endpointslices"
SERVICE_LABEL = "kubernetes.io/service-name"

Family = Literal["ipv4", "ipv6"]


def slices_of(namespace: str) -> str:
    """Return the path of a namespace's EndpointSlices."""
    return f"/apis/{GROUP}/{VERSION}/namespaces/{quote(namespace, safe='')}/{RESOURCE}"


class _Meta(msgspec.Struct):
    name: str
    labels: dict[str, str] | None = None


class _Conditions(msgspec.Struct):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class _Ref(msgspec.Struct):
    name: str = ""
    uid: str = ""


class _Endpoint(msgspec.Struct, rename="camel"):
    addresses: list[str]
    conditions: _Conditions | None = None
    target_ref: _Ref | None = None
    node_name: str | None = None
    zone: str | None = None


class _Port(msgspec.Struct):
    name: str | None = None
    port: int | None = None


class _Slice(msgspec.Struct, rename="camel"):
    metadata: _Meta
    address_type: str
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


@dataclass(frozen=True, slots=True)
class SliceEndpoint:
    """One endpoint of one slice. `pod` identifies the pod across slices; `address` is `host:port`, with
    brackets for IPv6, or "" if the slice has no port of the requested name. `locality` has its node and the
    node's zone."""

    pod: str
    name: str
    family: Family
    address: str
    ready: bool
    terminating: bool
    locality: Locality = NOWHERE


@dataclass(frozen=True, slots=True)
class Slice:
    """The fields of an EndpointSlice that discovery uses. `ports` are the names of all its ports."""

    name: str
    deployment: str
    pool: str
    service: str
    ports: tuple[str, ...]
    places: tuple[SliceEndpoint, ...]


def read_slice(raw: bytes, port: str) -> Slice:
    """Parse the JSON of an EndpointSlice; addresses use the port named `port`. Raises ProtocolError for
    anything else."""
    try:
        found = msgspec.json.decode(raw, type=_Slice)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not an EndpointSlice: {error}") from error
    labels = found.metadata.labels or {}
    pool = labels.get(POOL_LABEL, "")
    numbers = {each.name or "": each.port for each in found.ports or ()}
    places = (_place(each, pool, numbers.get(port)) for each in found.endpoints or ())
    return Slice(
        name=found.metadata.name,
        deployment=labels.get(DEPLOYMENT_LABEL, ""),
        pool=pool,
        service=labels.get(SERVICE_LABEL, ""),
        ports=tuple(numbers),
        places=tuple(place for place in places if place is not None),
    )


def workers(slices: Iterable[Slice], family: Family) -> frozenset[Endpoint]:
    """Return the expected workers: one for each pod that is not being deleted, at its address of `family` if
    it has one."""
    best: dict[str, tuple[tuple[bool, str, str], SliceEndpoint]] = {}
    deleted: set[str] = set()
    for each in slices:
        for place in each.places:
            if place.terminating:
                # Termination is never reversed, so a slice that reports it is the newer one.
                deleted.add(place.pod)
            elif place.address and each.pool:
                rank = (place.family != family, place.address, each.pool)
                if place.pod not in best or rank < best[place.pod][0]:
                    best[place.pod] = rank, place
    return frozenset(
        Endpoint(f"{place.name}@{place.address}", place.address, pool, place.locality)
        for pod, ((_, _, pool), place) in best.items()
        if pod not in deleted
    )


def _place(endpoint: _Endpoint, pool: str, port: int | None) -> SliceEndpoint | None:
    """Return None for an endpoint without an IP address, such as a DNS name."""
    try:
        # For pods, the API guarantees one address; the meaning of several is undefined.
        host = ipaddress.ip_address(endpoint.addresses[0])
    except (IndexError, ValueError):
        return None
    ipv6 = host.version == 6
    ref, conditions = endpoint.target_ref or _Ref(), endpoint.conditions or _Conditions()
    return SliceEndpoint(
        pod=ref.uid or ref.name or str(host),
        name=ref.name or pool,
        family="ipv6" if ipv6 else "ipv4",
        address="" if port is None else host_port(str(host), port),
        ready=conditions.ready is not False,
        terminating=bool(conditions.terminating),
        locality=_locality(endpoint),
    )


def _locality(endpoint: _Endpoint) -> Locality:
    try:
        return Locality(node=endpoint.node_name or "", zone=endpoint.zone or "")
    except ValueError:
        # No name of the API is as long: the place is unknown, and the worker serves.
        return NOWHERE
