"""The adapters of the transfer port by their names in the deployment spec. Only the one that is chosen is
imported."""

from __future__ import annotations

import time
import uuid

from kvasir.core.errors import ConfigError
from kvasir.ports.transfer import KvTransfer


def make_transfer(kind: str, host: str, checksum_parts: int) -> KvTransfer:
    """An agent that serves on `host` and gives `checksum_parts` sums for each block, 0 for none. `kind` is
    TransferSpec.kind. Raises ConfigError for any other."""
    match kind:
        case "nixl":
            from kvasir_workers.transfer.nixl.adapter import NixlTransfer

            return NixlTransfer(f"kvasir-{uuid.uuid4().hex}", host, time.monotonic, checksum_parts)
        case "nccl":
            from kvasir_workers.transfer.nccl.adapter import NcclTransfer

            return NcclTransfer(host, time.monotonic, checksum_parts)
    raise ConfigError(f"transfer: {kind!r} is not one of: nixl, nccl")
