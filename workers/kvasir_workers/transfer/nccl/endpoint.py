"""How a puller finds a serving agent: its control address, the secret that opens it, and what its KV is like.

The secret is what lets a peer in, so an endpoint must travel over authenticated sessions alone and is never
logged.
"""

from __future__ import annotations

import msgspec

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir_workers.transfer import ticket

VERSION = 1
SECRET_BYTES = 32


class NcclEndpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One serving agent. `device` is "cpu" or "cuda"; `block_bytes` one number per region; of its
    addresses nobody is told, since the serving side looks them up itself."""

    version: int
    host: str
    port: int
    secret: bytes
    device: str
    block_bytes: tuple[int, ...]
    layout: KvLayout

    @property
    def name(self) -> str:
        """What to call the agent in messages."""
        return f"{self.host}:{self.port}"


def encode(endpoint: NcclEndpoint) -> str:
    """The text that goes into Offer.endpoint."""
    return ticket.pack(msgspec.msgpack.encode(endpoint))


def decode(text: str) -> NcclEndpoint:
    """The inverse of `encode`. Raises TransferError."""
    try:
        endpoint = msgspec.msgpack.decode(ticket.unpack(text), type=NcclEndpoint)
    except msgspec.MsgspecError as error:
        raise TransferError(f"not an NCCL endpoint: {error}") from error
    if endpoint.version != VERSION:
        raise TransferError(f"endpoint version {endpoint.version} is not {VERSION}")
    if len(endpoint.secret) != SECRET_BYTES or not 0 < endpoint.port < 65536:
        raise TransferError("an NCCL endpoint with an impossible port or secret")
    return endpoint
