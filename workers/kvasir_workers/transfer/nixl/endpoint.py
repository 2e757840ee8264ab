"""How a receiving agent finds a serving one: NIXL's metadata, the KV regions and the lease table."""

from __future__ import annotations

from dataclasses import asdict

import msgspec

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion
from kvasir_workers.transfer import ticket

VERSION = 1


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One serving agent. `metadata` is NIXL's own (connection and memory keys); `leases` the address of
    its lease table; `layout` the fields of KvLayout."""

    version: int
    agent: str
    metadata: bytes
    regions: tuple[KvRegion, ...]
    leases: int
    layout: dict[str, int | str]


def encode(agent: str, metadata: bytes, regions: tuple[KvRegion, ...], leases: int, layout: KvLayout) -> str:
    """The text that goes into Offer.endpoint."""
    endpoint = Endpoint(VERSION, agent, metadata, regions, leases, asdict(layout))
    return ticket.pack(msgspec.msgpack.encode(endpoint))


def decode(text: str) -> Endpoint:
    """The inverse of `encode`. Raises TransferError."""
    try:
        endpoint = msgspec.msgpack.decode(ticket.unpack(text), type=Endpoint)
    except msgspec.MsgspecError as error:
        raise TransferError(f"not a NIXL endpoint: {error}") from error
    if endpoint.version != VERSION:
        raise TransferError(f"endpoint version {endpoint.version} is not {VERSION}")
    return endpoint


def layout_differences(mine: KvLayout, theirs: dict[str, int | str]) -> list[str]:
    """Each differing field as `name: mine != theirs`."""
    own = asdict(mine)
    return [
        f"{name}: {own.get(name)} != {theirs.get(name)}"
        for name in sorted(own.keys() | theirs.keys())
        if own.get(name) != theirs.get(name)
    ]
