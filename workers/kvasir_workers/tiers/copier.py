"""Copies of blocks between the engine's KV cache and the arena, on one rank.

A slot holds a block over all layers and all ranks: the parts of the tensor-parallel ranks in order, each with
the layers in order, which pipeline stages divide. In host memory this is a copy of pieces, complete when the
call returns. On a device, blocks are gathered into a bounded device buffer and cross the bus in one piece
each, on a stream separate from the computation.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kvasir.core.errors import ConfigError
from kvasir.native import copy_pieces
from kvasir.ports.transfer import KvRegion
from kvasir_workers.tiers.blob import LANE_BYTES
from kvasir_workers.tiers.memory import SharedMemory

if TYPE_CHECKING:
    import torch

STAGING_BYTES = 64 << 20


class Copied(NamedTuple):
    """A copy that has ended, `seconds` after it began."""

    ticket: int
    seconds: float


class BlockCopier(Protocol):
    """Copies between blocks and slots. All calls come from the step loop's thread, and none waits for the
    device."""

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> int:
        """Start to copy blocks, as they are after the work queued so far, into slots. Return the copy's
        ticket."""
        ...

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> int:
        """Start to copy slots into blocks that no queued work reads before the copy has ended. Return the
        copy's ticket."""
        ...

    def fence(self) -> None:
        """Make all work queued after this call wait for the reads of earlier `store`s."""
        ...

    def poll(self) -> list[Copied]:
        """Return copies that have ended since the last call."""
        ...


@dataclass(frozen=True, slots=True)
class SlotPart:
    """One rank's part of each slot, which begins `offset` bytes after the slot."""

    memory: SharedMemory
    offset: int


class HostCopier:
    """`BlockCopier` for KV in host memory. `regions` are the layers in order."""

    def __init__(self, regions: Sequence[KvRegion], part: SlotPart, now: Callable[[], float]) -> None:
        self._lengths = array("Q", (region.block_bytes for region in regions))
        self._regions = [(region.address, region.block_bytes) for region in regions]
        self._part = part
        self._now = now
        self._tickets = 0
        self._ended: list[Copied] = []

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> int:
        """See BlockCopier."""
        return self._copy(self._of_blocks(blocks), self._of_slots(slots), len(blocks))

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> int:
        """See BlockCopier."""
        return self._copy(self._of_slots(slots), self._of_blocks(blocks), len(blocks))

    def fence(self) -> None:
        """See BlockCopier. Every copy is already complete."""

    def poll(self) -> list[Copied]:
        """See BlockCopier."""
        ended, self._ended = self._ended, []
        return ended

    def _copy(self, sources: array[int], targets: array[int], blocks: int) -> int:
        began = self._now()
        copy_pieces(sources, targets, self._lengths * blocks)
        self._tickets += 1
        self._ended.append(Copied(self._tickets, self._now() - began))
        return self._tickets

    def _of_blocks(self, blocks: Sequence[int]) -> array[int]:
        return array("Q", (address + block * size for block in blocks for address, size in self._regions))

    def _of_slots(self, slots: Sequence[int]) -> array[int]:
        addresses = array("Q")
        for slot in slots:
            at = self._part.memory.address + slot * self._part.memory.slot_bytes + self._part.offset
            for length in self._lengths:
                addresses.append(at)
                at += length
        return addresses


class DeviceCopier:
    """`BlockCopier` for KV on a device, with at most `staging_bytes` of device buffer.

    `layers` are the KV tensors, one per region in order, each with `blocks` blocks as the outermost
    dimension. On the CPU, which has no streams, the same copies are made synchronously.
    """

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        blocks: int,
        part: SlotPart,
        now: Callable[[], float],
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        import torch

        self._torch: Any = torch
        self._now = now
        self._layers = [_by_blocks(layer, blocks) for layer in layers]
        self._widths = [layer.shape[1] for layer in self._layers]
        width = sum(self._widths)
        arena = torch.frombuffer(part.memory.view, dtype=torch.int32).view(part.memory.slots, -1)
        first = part.offset // LANE_BYTES
        self._slots = arena[:, first : first + width]
        # A copy across the bus is of contiguous memory: neighbouring slots only if the whole of each slot is
        # this rank's.
        self._runs = runs_of if width == arena.shape[1] else _one_by_one
        device = layers[0].device
        depth = max(1, staging_bytes // (width * LANE_BYTES))
        self._staging = torch.empty((depth, width), dtype=arena.dtype, device=device)
        self._device = device
        self._stream: Any = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._read: Any = None
        self._tickets = 0
        self._running: deque[tuple[int, float, Any]] = deque()

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> int:
        """See BlockCopier."""
        return self._run(blocks, slots, self._store_chunk)

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> int:
        """See BlockCopier."""
        return self._run(blocks, slots, self._load_chunk)

    def fence(self) -> None:
        """See BlockCopier."""
        if self._read is not None:
            self._torch.cuda.current_stream(self._device).wait_event(self._read)
            self._read = None

    def poll(self) -> list[Copied]:
        """See BlockCopier."""
        ended = []
        while self._running:
            ticket, began, event = self._running[0]
            if event is not None and not event.query():
                break
            self._running.popleft()
            ended.append(Copied(ticket, self._now() - began))
        return ended

    def _run(
        self, blocks: Sequence[int], slots: Sequence[int], chunk: Callable[[Any, Sequence[int]], None]
    ) -> int:
        began = self._now()
        event = None
        if self._stream is None:
            self._in_chunks(blocks, slots, chunk)
        else:
            # The work queued so far fills the blocks of a store, and may still use those of a load.
            self._stream.wait_stream(self._torch.cuda.current_stream(self._device))
            with self._torch.cuda.stream(self._stream):
                self._in_chunks(blocks, slots, chunk)
                event = self._torch.cuda.Event()
                event.record(self._stream)
        self._tickets += 1
        self._running.append((self._tickets, began, event))
        return self._tickets

    def _in_chunks(
        self, blocks: Sequence[int], slots: Sequence[int], chunk: Callable[[Any, Sequence[int]], None]
    ) -> None:
        depth = self._staging.shape[0]
        for start in range(0, len(blocks), depth):
            index = self._torch.tensor(blocks[start : start + depth], dtype=self._torch.int64)
            if self._stream is not None:
                index = index.pin_memory().to(self._device, non_blocking=True)
            chunk(index, slots[start : start + depth])

    def _store_chunk(self, index: Any, slots: Sequence[int]) -> None:
        staging = self._staging[: len(slots)]
        at = 0
        for layer, width in zip(self._layers, self._widths, strict=True):
            self._torch.index_select(layer, 0, index, out=staging[:, at : at + width])
            at += width
        if self._stream is not None:
            self._read = self._torch.cuda.Event()
            self._read.record(self._stream)
        for first, slot, count in self._runs(slots):
            self._slots[slot : slot + count].copy_(staging[first : first + count], non_blocking=True)

    def _load_chunk(self, index: Any, slots: Sequence[int]) -> None:
        staging = self._staging[: len(slots)]
        for first, slot, count in self._runs(slots):
            staging[first : first + count].copy_(self._slots[slot : slot + count], non_blocking=True)
        at = 0
        for layer, width in zip(self._layers, self._widths, strict=True):
            layer.index_copy_(0, index, staging[:, at : at + width])
            at += width


def page_lock(memory: SharedMemory) -> None:
    """Page-lock the memory, so that devices can access it directly. Raise ConfigError if the driver
    refuses."""
    import torch

    failed = int(torch.cuda.cudart().cudaHostRegister(memory.address, memory.view.nbytes, 0))
    if failed:
        raise ConfigError(
            f"tiers.cpu.bytes: {memory.view.nbytes} B cannot be page-locked (CUDA error {failed}); lower it"
        )


def runs_of(slots: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return consecutive slots as (index of the first, its slot, count)."""
    breaks = [at for at, (one, other) in enumerate(pairwise(slots), start=1) if other != one + 1]
    starts = [0, *breaks] if slots else []
    return [
        (start, slots[start], end - start) for start, end in zip(starts, [*breaks, len(slots)], strict=False)
    ]


def _one_by_one(slots: Sequence[int]) -> list[tuple[int, int, int]]:
    return [(at, slot, 1) for at, slot in enumerate(slots)]


def _by_blocks(layer: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return a layer's memory as `blocks` rows of 4-byte lanes, regardless of its axes."""
    import torch

    flat = layer.as_strided((layer.numel(),), (1,))
    return flat.view(torch.uint8).view(blocks, -1).view(torch.int32)
