"""The adapters of the transfer port, by their names in the deployment spec. Only the selected one is
imported."""

from __future__ import annotations

import time
import uuid

from kvasir.core.errors import ConfigError
from kvasir.ports.transfer import KvTransfer


def make_transfer(kind: str, host: str, checksum_parts: int, *, ucx_tcp: bool = False) -> KvTransfer:
    """Return an agent that serves on `host`, with `checksum_parts` checksums per block, 0 for none. `kind` is
    TransferSpec.kind without `auto`. Raise ConfigError for any other. `ucx_tcp`: UCX may use TCP between
    machines."""
    match kind:
        case "nixl":
            from kvasir_workers.transfer.nixl.adapter import NixlTransfer

            name = f"kvasir-{uuid.uuid4().hex}"
            return NixlTransfer(name, host, time.monotonic, checksum_parts, tcp=ucx_tcp)
        case "nccl":
            from kvasir_workers.transfer.nccl.adapter import NcclTransfer

            return NcclTransfer(host, time.monotonic, checksum_parts)
    raise ConfigError(f"transfer: {kind!r} is not one of: nixl, nccl")
