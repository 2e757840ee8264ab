"""Endpoint of a serving agent: NIXL's metadata, its KV regions, lease table and lease pages."""

from __future__ import annotations

import msgspec

from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion
from kvasir_workers.transfer.common import ticket
from kvasir_workers.transfer.nixl.processes import ProcessId

VERSION = 4


class NixlEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One serving agent. `metadata` is NIXL's own (connection and memory keys); `leases` and `pages` are the
    addresses of the lease table and of the memory of lease pages, which has `page_bytes` bytes; `parts` is
    the number of checksums per block, 0 for none. `process` is whose memory it is, if others of its machine
    may read it by the kernel."""

    version: int
    agent: str
    metadata: bytes
    regions: tuple[KvRegion, ...]
    leases: int
    pages: int
    page_bytes: int
    parts: int
    layout: KvLayout
    process: ProcessId | None = None


def encode(endpoint: NixlEndpoint) -> str:
    """Return the text of Offer.endpoint."""
    return ticket.pack_struct(endpoint)


def decode(text: str) -> NixlEndpoint:
    """The inverse of `encode`. Raise TransferError."""
    endpoint = ticket.unpack_struct(text, NixlEndpoint, "NIXL endpoint")
    ticket.require_version(endpoint.version, VERSION)
    return endpoint
