"""The port of KV tiers below host memory: disk, or a shared store.

Host memory itself, the CPU tier, is the worker's arena, through which all blocks are written to and read from
the tiers of this port. A tier is a cache: its failures are misses or blocks that are not stored, shown in its
status, and never errors of requests. Blocks are keyed by the engine's full chain hash, which covers all
preceding tokens, the salt and the adapter; the 64-bit names that routers use select workers, never bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvasir.core.kv import Medium, TierLoad

KEY_BYTES = 32


class TierBlock(NamedTuple):
    """Identifies a block: the engine's chain hash of KEY_BYTES bytes, and the router's names of the block and
    of its parent (kvasir.native.chain_hashes; the root of the chain for the first block)."""

    key: bytes
    name: int
    parent: int


class TierWrite(NamedTuple):
    """A block to store, and its bytes over all layers and tensor-parallel ranks. `data` is valid and
    unchanged only until `put` returns."""

    block: TierBlock
    data: memoryview


class TierRead(NamedTuple):
    """A block to read, and the writable target buffer with exactly the size of a block."""

    key: bytes
    target: memoryview


class TierChange(NamedTuple):
    """Changes of the tier's contents by a call. `removed` can include blocks of earlier calls."""

    stored: tuple[TierBlock, ...] = ()
    removed: tuple[TierBlock, ...] = ()


class KvTier(Protocol):
    """One tier, for blocks of one size and one fingerprint (model, dtype, layout, ranks).

    Obligations: stays within its capacity; returns a block byte for byte under its own key or not at all,
    whatever happens to its medium; no method raises; no call exceeds the tier's deadline by more than
    scheduling delays. All methods but `load` are called from one thread, which may block; `load` from any.
    """

    @property
    def medium(self) -> Medium:
        """The medium of the tier in the router's index."""
        ...

    def lookup(self, keys: Sequence[bytes]) -> int:
        """Return how many of the leading keys are present. An estimate, since only `get` reads the bytes."""
        ...

    def get(self, wanted: Sequence[TierRead]) -> int:
        """Fill the targets of the leading blocks and return how many are complete and verified. The contents
        of the other targets are undefined afterwards."""
        ...

    def put(self, blocks: Sequence[TierWrite]) -> TierChange:
        """Store the blocks. A block that is present is only marked as used, and is not in `stored`."""
        ...

    def drop(self, keys: Sequence[bytes]) -> TierChange:
        """Remove the blocks; unknown keys are ignored."""
        ...

    def maintain(self) -> TierChange:
        """Run maintenance: read the index after a start, check whether a failed medium has recovered, and
        report blocks that `lookup` and `get` found missing. Called when idle: soon after the start, again at
        once while a call returns changes or `maintenance_pending` is set, else about every second."""
        ...

    @property
    def maintenance_pending(self) -> bool:
        """Whether the last `maintain` did not finish its work."""
        ...

    def held(self) -> Iterable[TierBlock]:
        """Return every block that this instance knows, for example after a restart with a persistent disk."""
        ...

    def load(self) -> TierLoad:
        """Return levels and counters."""
        ...

    def close(self) -> None:
        """Free all resources; the contents of a durable tier are kept. Idempotent."""
        ...
