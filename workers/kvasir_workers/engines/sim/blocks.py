"""Paged KV memory: blocks, their holders, and the prefix cache over free blocks.

A block is free when no request and no lease holds it. A free block with a known prefix is kept as long as
possible: the least recently freed is evicted first, and blocks without a known prefix before all others. As
in vLLM, prompts that were computed concurrently leave copies of a block.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence


def root_hash(salt: str, adapter: str | None) -> bytes:
    """Return the root of a hash chain: KV under another salt or adapter is never shared."""
    return hashlib.blake2b(f"{len(salt)}/{salt}/{adapter or ''}".encode(), digest_size=16).digest()


def chain_hash(parent: bytes, tokens: array[int]) -> bytes:
    """Return the hash of one block's KV: of its tokens and, through `parent`, all tokens before them."""
    return hashlib.blake2b(parent + tokens.tobytes(), digest_size=16).digest()


def hash_prompt(root: bytes, tokens: array[int], block_size: int) -> list[bytes]:
    """Return one chained hash per block of `tokens`, including a last partial block."""
    hashes: list[bytes] = []
    parent = root
    for begin in range(0, len(tokens), block_size):
        parent = chain_hash(parent, tokens[begin : begin + block_size])
        hashes.append(parent)
    return hashes


class BlockPool:
    """`total` blocks with reference counts by requests and by leases. All methods are O(blocks given).

    With `caching` False no block is ever found. `evicted` is called with the hashes of reused blocks.
    """

    def __init__(
        self, total: int, *, caching: bool, evicted: Callable[[list[bytes]], None] | None = None
    ) -> None:
        self.total = total
        self._caching = caching
        self._evicted = evicted
        self._requests = [0] * total
        self._leases = [0] * total
        self._active = 0
        self._leased = 0
        self._hash_of: list[bytes | None] = [None] * total
        # Hash -> its copies, the oldest first.
        self._blocks_of: dict[bytes, dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(total))

    @property
    def free(self) -> int:
        """Number of blocks that could be taken at once."""
        return len(self._free)

    @property
    def active(self) -> int:
        """Number of blocks held by at least one request."""
        return self._active

    @property
    def leased(self) -> int:
        """Number of blocks held by at least one lease."""
        return self._leased

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix of `hashes`, without holding them."""
        found: list[int] = []
        for digest in hashes:
            copies = self._blocks_of.get(digest)
            if copies is None:
                break
            found.append(next(iter(copies)))
        return found

    def can_take(self, count: int, keeping: Sequence[int] = ()) -> bool:
        """Return whether `count` blocks can be taken without reusing `keeping`."""
        return count <= len(self._free) - sum(1 for block in keeping if block in self._free)

    def take(self, count: int) -> list[int]:
        """Hold `count` free blocks for a request; check `can_take` first."""
        taken: list[int] = []
        evicted: list[bytes] = []
        for _ in range(count):
            block, _none = self._free.popitem(last=False)
            digest = self._hash_of[block]
            if digest is not None:
                self._forget(block, digest)
                evicted.append(digest)
            self._requests[block] = 1
            taken.append(block)
        self._active += count
        if evicted and self._evicted is not None:
            self._evicted(evicted)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Hold these blocks for one more request."""
        for block in blocks:
            self._free.pop(block, None)
            if self._requests[block] == 0:
                self._active += 1
            self._requests[block] += 1

    def drop(self, blocks: Sequence[int]) -> None:
        """Release a request's blocks, in the prompt's order; the tail is evicted before the head."""
        for block in reversed(blocks):
            self._requests[block] -= 1
            if self._requests[block] == 0:
                self._active -= 1
                self._free_if_unheld(block)

    def lease(self, blocks: Sequence[int]) -> None:
        """Hold these blocks for a lease."""
        for block in blocks:
            self._free.pop(block, None)
            if self._leases[block] == 0:
                self._leased += 1
            self._leases[block] += 1

    def unlease(self, blocks: Sequence[int]) -> None:
        """Release a lease's blocks."""
        for block in reversed(blocks):
            self._leases[block] -= 1
            if self._leases[block] == 0:
                self._leased -= 1
                self._free_if_unheld(block)

    def store(self, block: int, digest: bytes) -> None:
        """Record the hash of a held block without one, so that it can be found."""
        if self._caching:
            self._blocks_of.setdefault(digest, {})[block] = None
            self._hash_of[block] = digest

    def _forget(self, block: int, digest: bytes) -> None:
        copies = self._blocks_of[digest]
        del copies[block]
        if not copies:
            del self._blocks_of[digest]
        self._hash_of[block] = None

    def _free_if_unheld(self, block: int) -> None:
        if self._requests[block] == 0 and self._leases[block] == 0:
            self._free[block] = None
            if self._hash_of[block] is None:
                self._free.move_to_end(block, last=False)

    def check_integrity(self, held: Iterable[Sequence[int]], leased: Iterable[Sequence[int]]) -> None:
        """Compare with the blocks that requests and leases hold. Raise AssertionError with the difference."""
        by_requests = Counter(block for blocks in held for block in blocks)
        by_leases = Counter(block for blocks in leased for block in blocks)
        for block in range(self.total):
            counted = (self._requests[block], self._leases[block])
            expected = (by_requests[block], by_leases[block])
            if counted != expected:
                raise AssertionError(f"block {block}: (requests, leases) {counted} != {expected}")
            if (block in self._free) != (expected == (0, 0)):
                raise AssertionError(f"block {block}: free is {block in self._free}, held {expected}")
        if (self._active, self._leased) != (len(by_requests), len(by_leases)):
            raise AssertionError(
                f"active, leased: {self._active}, {self._leased} != {len(by_requests)}, {len(by_leases)}"
            )
        if len(self._free) + len(by_requests | by_leases) != self.total:
            raise AssertionError("free + used blocks are not all blocks")
        for digest, copies in self._blocks_of.items():
            if not copies or any(self._hash_of[block] != digest for block in copies):
                raise AssertionError(f"blocks {list(copies)} are found under a hash that one does not carry")
        if sum(map(len, self._blocks_of.values())) != sum(digest is not None for digest in self._hash_of):
            raise AssertionError("a block carries a hash under which it is not found")

    def known(self) -> set[bytes]:
        """Return every hash under which a block is found."""
        return set(self._blocks_of)
