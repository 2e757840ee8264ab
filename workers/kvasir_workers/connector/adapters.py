"""The adapters of the transfer port, by their names in the deployment spec. Only the selected one is
imported."""

from __future__ import annotations

import time
import uuid

from kvasir.core.errors import ConfigError
from kvasir.ports.transfer import KvTransfer


def make_transfer(kind: str, host: str, checksum_parts: int) -> KvTransfer:
    """Return an agent that serves on `host`, with `checksum_parts` checksums per block, 0 for none. `kind` is
    TransferSpec.kind. Raise ConfigError for any other."""
    match kind:
        case "nixl":
            from kvasir_workers.transfer.nixl.adapter import NixlTransfer

            return NixlTransfer(f"kvasir-{uuid.uuid4().hex}", host, time.monotonic, checksum_parts)
        case "nccl":
            from kvasir_workers.transfer.nccl.adapter import NcclTransfer

            return NcclTransfer(host, time.monotonic, checksum_parts)
    raise ConfigError(f"transfer: {kind!r} is not one of: nixl, nccl")
