"""Endpoint of a serving agent: its control address and the shape of its KV.

The key behind it in a ticket authenticates pullers, so a ticket is sent only over authenticated sessions and
is never logged.
"""

from __future__ import annotations

import msgspec

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir_workers.transfer.common import ticket

VERSION = 4


class NcclEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One serving agent. `device` is "cpu" or "cuda"; `block_bytes` has one number per region. It holds no
    memory addresses: only the serving side uses them."""

    version: int
    host: str
    port: int
    device: str
    block_bytes: tuple[int, ...]
    layout: KvLayout

    @property
    def name(self) -> str:
        """Name of the agent in error messages."""
        return f"{self.host}:{self.port}"


def encode(endpoint: NcclEndpoint) -> str:
    """Return the text of Offer.endpoint."""
    return ticket.pack_struct(endpoint)


def decode(text: str) -> NcclEndpoint:
    """The inverse of `encode`. Raise TransferError."""
    endpoint = ticket.unpack_struct(text, NcclEndpoint, "NCCL endpoint")
    ticket.require_version(endpoint.version, VERSION)
    if not 0 < endpoint.port < 65536:
        raise TransferError("the NCCL endpoint has an invalid port")
    return endpoint
