"""`memcpy` from private memory of a process to shared memory: the limit of one core."""

from __future__ import annotations

import ctypes
import mmap
import time

from load_tests.scenarios.kv_parts.memory import Case, Memory


class Copy:
    """One process that holds both memories."""

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._shared: mmap.mmap | None = None

    def prepare(self, case: Case, seed: int) -> None:
        """Allocate a case's KV, and its target in shared memory."""
        self._memory = Memory(case, seed)
        self._shared = mmap.mmap(-1, self._memory.layers.nbytes)
        # Touch the pages before the clock starts, as the other contenders do.
        self._shared.write(bytes(len(self._shared)))

    def copy(self, runs: list[tuple[int, int, int]]) -> float:
        """Return the seconds of one memcpy per run, (source, target, blocks), of each layer."""
        if self._memory is None or self._shared is None:
            raise RuntimeError("nothing is prepared")
        case = self._memory.case
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._shared))
        width = case.pool * case.piece
        copies = [
            (base + layer * width + target * case.piece, region.address + source * case.piece, n * case.piece)
            for layer, region in enumerate(self._memory.regions)
            for source, target, n in runs
        ]
        began = time.perf_counter()
        for to, of, length in copies:
            ctypes.memmove(to, of, length)
        return time.perf_counter() - began
