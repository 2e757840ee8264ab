"""`KvTransfer` over torch.distributed: NCCL between GPUs, gloo where the KV is in host memory.

Every agent serves and pulls. No call of the port waits for a peer: threads do, one for each peer and
direction. The endpoint of an agent holds the secret that lets peers in.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Sequence

from kvasir.core.errors import TransferError
from kvasir.core.identity import KvLayout
from kvasir.ports.transfer import UNSHARDED, BlockPart, KvRegion, Offer, TransferEvent
from kvasir_workers.transfer.checksums import block_sums, require_parts
from kvasir_workers.transfer.memory import memory_of
from kvasir_workers.transfer.nccl.endpoint import SECRET_BYTES, VERSION, NcclEndpoint, encode
from kvasir_workers.transfer.nccl.group import Fabric
from kvasir_workers.transfer.nccl.local import Local
from kvasir_workers.transfer.nccl.pulls import PullSpec
from kvasir_workers.transfer.nccl.receiving import NcclReceiver
from kvasir_workers.transfer.nccl.serving import NcclSender


class NcclTransfer:
    """See `kvasir.ports.transfer.KvTransfer`.

    `host` is the address to serve on, and the only one that is bound. `now` reads a monotonic clock in
    seconds, from any thread. `checksum_parts` sums are given for each block that is offered, and what
    is pulled is compared with its sender's; 0 for neither. A pull of one of several parts is compared where
    their number divides that of the sums.
    """

    def __init__(self, host: str, now: Callable[[], float], checksum_parts: int = 1) -> None:
        self._host = host
        self._now = now
        self._parts = checksum_parts
        self._endpoint = ""
        self._serving: NcclSender | None = None
        self._receiving: NcclReceiver | None = None
        self._farewell: list[TransferEvent] = []

    def register(self, regions: Sequence[KvRegion], layout: KvLayout) -> str:
        """Make local KV memory known to the fabric; returns this agent's endpoint. Raises TransferError
        when called twice, when regions lie on different devices, or when `host` cannot be bound."""
        if self._endpoint:
            raise TransferError("KV memory is registered already")
        devices = {region.device for region in regions}
        if len(devices) != 1:
            raise TransferError("an agent's KV must lie on one device")
        require_parts(regions, self._parts)
        device = devices.pop()
        local = Local(
            host=self._host,
            device=device.partition(":")[0],
            layout=layout,
            block_bytes=tuple(region.block_bytes for region in regions),
            blocks=min(region.blocks for region in regions),
            memory=memory_of(regions),
            sums=block_sums(regions, after_compute=False),
            compares=self._parts > 0,
            fabric=Fabric(self._host, device),
            now=self._now,
        )
        secret = os.urandom(SECRET_BYTES)
        offered = block_sums(regions, after_compute=True)
        self._serving = NcclSender(local, secret, offered, self._parts)
        self._receiving = NcclReceiver(local)
        self._endpoint = encode(
            NcclEndpoint(
                VERSION, local.host, self._serving.port, secret, local.device, local.block_bytes, layout
            )
        )
        # Threads that wait in torch's own code must not outlive the interpreter.
        atexit.register(self.close)
        return self._endpoint

    def offer(
        self, lease_id: str, fence: int, blocks: Sequence[int], ttl_s: float, total: int | None = None
    ) -> Offer:
        """See the port. Raises TransferError for blocks that are not in the registered memory."""
        if self._serving is None:
            raise TransferError("no KV memory is registered")
        total = len(blocks) if total is None else total
        self._serving.offer(lease_id, fence, blocks, total=total, ttl_s=ttl_s)
        return Offer(lease_id, fence, ttl_s, tuple(blocks), total, self._endpoint)

    def extend(self, lease_id: str, blocks: Sequence[int]) -> None:
        """See the port. Raises TransferError for blocks that are not in the registered memory."""
        if self._serving is not None:
            self._serving.extend(lease_id, blocks)

    def pull(
        self,
        pull_id: str,
        offer: Offer,
        first: int,
        target_blocks: Sequence[int],
        timeout_s: float,
        *,
        source: BlockPart = UNSHARDED,
        target: BlockPart = UNSHARDED,
    ) -> None:
        """See the port."""
        if self._receiving is None:
            raise TransferError("no KV memory is registered")
        wanted = PullSpec(pull_id, offer, first, tuple(target_blocks), source, target, timeout_s)
        self._receiving.pull(wanted)

    def release(self, lease_id: str) -> None:
        """See the port."""
        if self._serving is not None:
            self._serving.release(lease_id)

    def poll(self) -> list[TransferEvent]:
        """See the port."""
        events, self._farewell = self._farewell, []
        if self._serving is not None:
            events += self._serving.poll()
        if self._receiving is not None:
            events += self._receiving.poll()
        return events

    def close(self) -> None:
        """See the port. What was under way ends as closed or released, in the next poll()."""
        if self._serving is None or self._receiving is None:
            return
        atexit.unregister(self.close)
        self._farewell += self._receiving.close()
        self._farewell += self._serving.close()
        self._serving = self._receiving = None
