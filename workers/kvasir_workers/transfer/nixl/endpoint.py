"""Endpoint of a serving agent: NIXL's metadata, its KV regions, lease table and lease pages."""

from __future__ import annotations

import re

import msgspec

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion
from kvasir_workers.transfer.common import ticket
from kvasir_workers.transfer.common.checksums import require_parts
from kvasir_workers.transfer.nixl.leases import TABLE_BYTES
from kvasir_workers.transfer.nixl.processes import ProcessId

VERSION = 4
_DEVICE = re.compile(r"cpu|cuda(:\d{1,3})?")
_ADDRESSES = 1 << 63
"""Those of processes are smaller."""


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
    _require_memory(endpoint)
    return endpoint


def _require_memory(endpoint: NixlEndpoint) -> None:
    """Raise TransferError for numbers with which no read could be made."""
    spans = [(each.address, each.block_bytes, each.blocks) for each in endpoint.regions]
    spans += [(endpoint.leases, TABLE_BYTES, 1), (endpoint.pages, endpoint.page_bytes, 1)]
    fit = all(
        min(address, size, count) >= 0 and address + size * count <= _ADDRESSES
        for address, size, count in spans
    )
    if not fit or not all(_DEVICE.fullmatch(each.device) for each in endpoint.regions):
        raise TransferError(f"the endpoint of agent {endpoint.agent} names memory that no process has")
    if endpoint.parts < 0:
        raise TransferError(f"agent {endpoint.agent} has {endpoint.parts} checksums per block")
    require_parts(endpoint.regions, endpoint.parts)
