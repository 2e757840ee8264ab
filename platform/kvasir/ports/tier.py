"""Where KV blocks stay that are neither on the device nor in host memory: a disk, a shared store.

Host memory itself, the CPU tier, is the worker's arena of slots, through which all blocks go to the tiers of
this port and come from them. A tier is a cache of a cache. Whatever goes wrong with it is a miss or a block
that was not kept, said in its status, and never an error of a request. Blocks are kept under the engine's
full chain hash, which covers all tokens before them, the salt and the adapter; the 64-bit names that routers
use choose workers, never bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from kvasir.core.kv import Medium, TierLoad

KEY_BYTES = 32


class TierBlock(NamedTuple):
    """Which block: the engine's chain hash of KEY_BYTES bytes, and what routers call it and the block before
    it (kvasir.native.chain_hashes; a chain's root for the first)."""

    key: bytes
    name: int
    parent: int


class TierWrite(NamedTuple):
    """A block to keep, and its bytes over all layers and tensor-parallel ranks. `data` stays valid and
    unchanged until `put` returns, and no longer."""

    block: TierBlock
    data: memoryview


class TierRead(NamedTuple):
    """A block that is wanted, and the writable buffer, exactly as long as a block, that it goes to."""

    key: bytes
    target: memoryview


class TierChange(NamedTuple):
    """What a call changed of what the tier holds. `removed` may name blocks of earlier calls."""

    stored: tuple[TierBlock, ...] = ()
    removed: tuple[TierBlock, ...] = ()


class KvTier(Protocol):
    """One tier, made for blocks of one size and one fingerprint (model, dtype, layout, ranks).

    Obligations: holds at most what it was given room for; a block comes back byte for byte under its own key
    or not at all, whatever happened to its medium meanwhile; no method raises; no call lasts longer than the
    tier's own deadline by more than scheduling delays. All but `load` are called from one thread, which may
    block; `load` from any.
    """

    @property
    def medium(self) -> Medium:
        """What the router's index calls it."""
        ...

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many of the leading keys are there; a guess, since only `get` looks at their bytes."""
        ...

    def get(self, wanted: Sequence[TierRead]) -> int:
        """Fill the targets of leading blocks; how many of them are whole and verified. What the other
        targets hold afterwards is undefined."""
        ...

    def put(self, blocks: Sequence[TierWrite]) -> TierChange:
        """Keep these; a block that is there already is only marked as used again, and is not in `stored`."""
        ...

    def drop(self, keys: Sequence[bytes]) -> TierChange:
        """Forget these; unknown ones are ignored."""
        ...

    def maintain(self) -> TierChange:
        """What the tier does for itself: reads its index after a start, finds out whether a medium in trouble
        is back, and tells what `lookup` and `get` have found to be gone. To be called when nothing else is
        wanted: soon after the start, again at once while a call returns changes or the tier is still
        `maintenance_pending`, else about every second."""
        ...

    @property
    def maintenance_pending(self) -> bool:
        """Whether the newest `maintain` left off in the middle, whatever it has changed."""
        ...

    def held(self) -> Iterable[TierBlock]:
        """Every block that this instance knows to be there, as after a restart over a disk that was kept."""
        ...

    def load(self) -> TierLoad:
        """Levels and counters."""
        ...

    def close(self) -> None:
        """Free everything; what a durable tier holds stays. Idempotent."""
        ...
