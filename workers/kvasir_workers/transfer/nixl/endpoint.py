"""How a receiving agent finds a serving one: NIXL's metadata, the KV regions, lease table and lease pages."""

from __future__ import annotations

import msgspec

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion
from kvasir_workers.transfer import ticket

VERSION = 2


class NixlEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One serving agent. `metadata` is NIXL's own (connection and memory keys); `leases` and `pages` are the
    addresses of its lease table and of its lease pages, `page_bytes` bytes of them; `parts` is how many sums
    it gives for a block, 0 for none."""

    version: int
    agent: str
    metadata: bytes
    regions: tuple[KvRegion, ...]
    leases: int
    pages: int
    page_bytes: int
    parts: int
    layout: KvLayout


def encode(endpoint: NixlEndpoint) -> str:
    """The text that goes into Offer.endpoint."""
    return ticket.pack(msgspec.msgpack.encode(endpoint))


def decode(text: str) -> NixlEndpoint:
    """The inverse of `encode`. Raises TransferError."""
    try:
        endpoint = msgspec.msgpack.decode(ticket.unpack(text), type=NixlEndpoint)
    except msgspec.MsgspecError as error:
        raise TransferError(f"not a NIXL endpoint: {error}") from error
    if endpoint.version != VERSION:
        raise TransferError(f"endpoint version {endpoint.version} is not {VERSION}")
    return endpoint
