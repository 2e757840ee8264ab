"""`KvTransfer` by sending: over NCCL between GPUs, over sockets for KV in host memory.

Every agent serves and pulls. No call of the port waits for a peer: that is done by one thread per peer and
direction.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence

from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import KvRegion
from kvasir_workers.transfer.common.adapter import AgentTransfer
from kvasir_workers.transfer.common.checksums import block_sums
from kvasir_workers.transfer.common.lease_keys import make_secret, seal
from kvasir_workers.transfer.common.memory import memory_of
from kvasir_workers.transfer.common.pulls import shape_of
from kvasir_workers.transfer.nccl.endpoint import VERSION, NcclEndpoint, encode
from kvasir_workers.transfer.nccl.group import Fabric
from kvasir_workers.transfer.nccl.local import Local
from kvasir_workers.transfer.nccl.receiving import NcclReceiver
from kvasir_workers.transfer.nccl.serving import NcclSender


class NcclTransfer(AgentTransfer):
    """See AgentTransfer. `host` is the only address that is bound. A pull of one of several parts is compared
    only where their number divides that of the checksums."""

    def __init__(self, host: str, now: Callable[[], float], checksum_parts: int = 1) -> None:
        super().__init__(now, checksum_parts)
        self._host = host

    def close(self) -> None:
        """See the port."""
        super().close()
        atexit.unregister(self.close)

    def _start(self, regions: Sequence[KvRegion], layout: KvLayout) -> tuple[NcclSender, NcclReceiver, str]:
        device = regions[0].device
        local = Local(
            host=self._host,
            device=device.partition(":")[0],
            shape=shape_of(regions, layout),
            memory=memory_of(regions),
            sums=block_sums(regions, after_compute=False, waits=True),
            compares=self._parts > 0,
            fabric=Fabric(self._host, device),
            now=self._now,
        )
        secret = make_secret()
        sender = NcclSender(local, secret, block_sums(regions, after_compute=True), self._parts)
        sizes = local.shape.block_bytes
        endpoint = NcclEndpoint(VERSION, local.host, sender.port, local.device, sizes, layout)
        # Threads that wait in torch's own code must not outlive the interpreter.
        atexit.register(self.close)
        return sender, NcclReceiver(local), seal(encode(endpoint), [secret])
