"""Our adapters of the transfer port: one process offers, another pulls."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvasir.core.errors import TransferError
from kvasir.ports.transfer import KvTransfer, LeaseEnded, Offer, PullSucceeded
from load_tests.scenarios.kv_parts.memory import Case, Memory

PATIENCE_S = 60.0


def make(name: str, kind: str, checksum: bool) -> KvTransfer:
    """An agent on the loopback interface. `kind` as in TransferSpec."""
    parts = 1 if checksum else 0
    if kind == "nccl":
        from kvasir_workers.transfer.nccl.adapter import NcclTransfer

        return NcclTransfer("127.0.0.1", time.monotonic, parts)
    from kvasir_workers.transfer.nixl.adapter import NixlTransfer

    return NixlTransfer(name, "127.0.0.1", time.monotonic, parts)


class _Side:
    def __init__(self, name: str, kind: str, checksum: bool) -> None:
        self._make: Callable[[int], KvTransfer] = lambda n: make(f"{name}-{n}", kind, checksum)
        self._count = 0
        self._transfer: KvTransfer | None = None
        self._memory: Memory | None = None

    def _renew(self, case: Case, seed: int | None) -> str:
        if self._transfer is not None:
            self._transfer.close()
        self._count += 1
        self._memory = Memory(case, seed)
        self._transfer = self._make(self._count)
        return self._transfer.register(self._memory.regions, self._memory.layout)

    @property
    def transfer(self) -> KvTransfer:
        if self._transfer is None:
            raise TransferError("nothing is prepared")
        return self._transfer

    def digest(self, blocks: list[int]) -> str:
        """Checksum of these blocks' contents."""
        if self._memory is None:
            raise TransferError("nothing is prepared")
        return self._memory.digest(blocks)


class Source(_Side):
    """The sending side."""

    def prepare(self, case: Case, seed: int) -> str:
        """Allocate a case's KV; return its endpoint."""
        return self._renew(case, seed)

    def offer(self, lease_id: str, blocks: list[int]) -> tuple[Offer, float]:
        """Return the offer, and the seconds that it took: with checksums, the sums of all blocks are made in
        it."""
        began = time.perf_counter()
        offer = self.transfer.offer(lease_id, 1, blocks, PATIENCE_S)
        return offer, time.perf_counter() - began

    def settle(self, lease_id: str, nap_s: float) -> None:
        """Poll until the lease was pulled."""
        deadline = time.monotonic() + PATIENCE_S
        while LeaseEnded(lease_id, "pulled") not in self.transfer.poll():
            if time.monotonic() > deadline:
                raise TransferError(f"lease {lease_id} does not end in time")
            time.sleep(nap_s)


class Sink(_Side):
    """The receiving side."""

    def prepare(self, case: Case) -> None:
        """Allocate the target of a case's KV."""
        self._renew(case, None)

    def pull(self, offer: Offer, targets: list[int], nap_s: float) -> float:
        """Return the seconds from `pull` to its event, polled in a busy loop or every `nap_s`."""
        transfer = self.transfer
        began = time.perf_counter()
        transfer.pull(offer.lease_id, offer, 0, targets, PATIENCE_S)
        while not (events := transfer.poll()):
            if nap_s:
                time.sleep(nap_s)
        seconds = time.perf_counter() - began
        if not isinstance(events[0], PullSucceeded):
            raise TransferError(str(events[0]))
        return seconds
