"""Changes of the tiers' contents, sent to routers as logs of block hashes (kvasir.core.kv.KvEventKind), in
pieces of bounded size."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from kvasir.core.kv import KvEventKind, Medium
from kvasir.native._twin import record
from kvasir.ports.tier import TierBlock, TierChange

PIECE_BLOCKS = 4096
_NO_NAMES = array("Q")


class ChangeLog:
    """Changes of one engine's tiers in order, until they are taken.

    The rank in every record is 0: the receiver knows which rank sent it.
    """

    def __init__(self) -> None:
        self._pieces: deque[bytes] = deque()

    def __len__(self) -> int:
        """Number of pending pieces."""
        return len(self._pieces)

    def add(self, medium: Medium, change: TierChange) -> None:
        """Record the changes of one call on one tier; its removals precede its additions."""
        for start in range(0, len(change.removed), PIECE_BLOCKS):
            names = array("Q", (block.name for block in change.removed[start : start + PIECE_BLOCKS]))
            self._pieces.append(record(KvEventKind.REMOVED, medium, 0, 0, names))
        for start in range(0, len(change.stored), PIECE_BLOCKS):
            self._pieces.append(b"".join(_stored(medium, change.stored[start : start + PIECE_BLOCKS])))

    def restart(self) -> None:
        """Record that all tiers are empty."""
        self._pieces.clear()
        below = [medium for medium in Medium if medium is not Medium.DEVICE]
        self._pieces.append(
            b"".join(record(KvEventKind.CLEARED, medium, 0, 0, _NO_NAMES) for medium in below)
        )

    def take(self, most: int) -> list[bytes]:
        """Return up to `most` of the oldest pieces."""
        return [self._pieces.popleft() for _ in range(min(most, len(self._pieces)))]


def in_chains(blocks: Iterable[TierBlock]) -> list[TierBlock]:
    """Return the blocks with each after its parent if that is among them, which shortens their log."""
    held = {block.name: block for block in blocks}
    children: dict[int, list[TierBlock]] = {}
    roots: list[TierBlock] = []
    for block in held.values():
        (children.setdefault(block.parent, []) if block.parent in held else roots).append(block)
    ordered: list[TierBlock] = []
    waiting = roots[::-1]
    while waiting:
        block = waiting.pop()
        ordered.append(block)
        waiting.extend(children.pop(block.name, ()))
    return ordered


def _stored(medium: Medium, blocks: Sequence[TierBlock]) -> Iterator[bytes]:
    run = array("Q")
    parent = 0
    for block in blocks:
        if run and run[-1] != block.parent:
            yield record(KvEventKind.STORED, medium, 0, parent, run)
            run = array("Q")
        if not run:
            parent = block.parent
        run.append(block.name)
    if run:
        yield record(KvEventKind.STORED, medium, 0, parent, run)
