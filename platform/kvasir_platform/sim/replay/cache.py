"""The KV blocks of a simulated worker: blocks of running requests, cached blocks, and the changes to report.

As in vLLM, a block is cached once it is computed, is not evicted while a request uses it, and is evicted in
the order in which requests released it, the last blocks of a prompt first. Blocks evicted from the device go
to CPU memory, if there is any, and are loaded from there on a hit.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvasir.core.kv import KvEventKind, Medium
from kvasir.native._twin import record


class Hit(NamedTuple):
    """The prefix hit of a prompt in blocks: in total, and of these the part in CPU memory."""

    blocks: int
    from_cpu: int


class BlockCache:
    """`parents` gives the block before each; 0 for none."""

    def __init__(self, device_blocks: int, cpu_blocks: int, parents: Mapping[int, int]) -> None:
        self._device_blocks = device_blocks
        self._cpu_blocks = cpu_blocks
        self._parents = parents
        self._used: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict()
        self._cpu: OrderedDict[int, None] = OrderedDict()
        self._private = 0
        self._log = bytearray()

    @property
    def usage(self) -> float:
        """The fraction of the device's blocks that running requests use."""
        return (len(self._used) + self._private) / self._device_blocks

    @property
    def device_names(self) -> set[int]:
        """Blocks on the device."""
        return {*self._used, *self._free}

    @property
    def cpu_names(self) -> set[int]:
        """Blocks in CPU memory."""
        return set(self._cpu)

    def lookup(self, names: Sequence[int], most: int) -> Hit:
        """The longest cached prefix, of at most `most` blocks."""
        depth = below = 0
        for name in names[:most]:
            if name in self._cpu:
                below += 1
            elif name not in self._used and name not in self._free:
                break
            depth += 1
        return Hit(depth, below)

    def admit(self, names: Sequence[int], hit: Hit, blocks: int) -> bool:
        """Reserve the hit and room for `blocks` in total; return False, with nothing changed, if there is no
        room."""
        shared = names[: hit.blocks]
        idle = sum(name not in self._used for name in shared)
        rest = blocks - hit.blocks
        if len(self._used) + self._private + idle + rest > self._device_blocks:
            return False
        come = array("Q")
        for name in shared:
            if name in self._used:
                self._used[name] += 1
                continue
            if name in self._free:
                del self._free[name]
            else:
                del self._cpu[name]
                come.append(name)
            self._used[name] = 1
        self._private += rest
        if come:
            self._say(KvEventKind.REMOVED, Medium.CPU, come)
            self._say_stored(Medium.DEVICE, come)
        self._evict()
        return True

    @property
    def room(self) -> int:
        """Blocks of the device that no running request uses; some may be cached."""
        return self._device_blocks - len(self._used) - self._private

    def resize(self, blocks: int) -> None:
        """Reserve more blocks for running requests, within `room`, or give some back if negative."""
        self._private += blocks
        if blocks > 0:
            self._evict()

    def fill(self, names: Sequence[int]) -> int:
        """Mark these reserved blocks as computed. Return how many were new: the others were cached already,
        and their room stays with the request."""
        new, below = array("Q"), array("Q")
        for name in names:
            if name in self._used:
                self._used[name] += 1
                continue
            self._used[name] = 1
            if name in self._free:
                del self._free[name]
                continue
            if name in self._cpu:
                del self._cpu[name]
                below.append(name)
            new.append(name)
        self._private -= len(new)
        if below:
            self._say(KvEventKind.REMOVED, Medium.CPU, below)
        if new:
            self._say_stored(Medium.DEVICE, new)
        return len(new)

    def release(self, names: Sequence[int], private: int) -> None:
        """Release the blocks of a request that has ended."""
        self._private -= private
        for name in reversed(names):
            users = self._used[name] - 1
            if users:
                self._used[name] = users
            else:
                del self._used[name]
                self._free[name] = None

    def take_log(self) -> bytes:
        """The changes since the last call."""
        log = bytes(self._log)
        self._log.clear()
        return log

    def _evict(self) -> None:
        excess = len(self._used) + len(self._free) + self._private - self._device_blocks
        if excess <= 0:
            return
        gone = array("Q", [self._free.popitem(last=False)[0] for _ in range(excess)])
        self._say(KvEventKind.REMOVED, Medium.DEVICE, gone)
        if not self._cpu_blocks:
            return
        for name in gone:
            self._cpu[name] = None
        self._say_stored(Medium.CPU, gone[::-1])
        over = len(self._cpu) - self._cpu_blocks
        if over > 0:
            lost = array("Q", [self._cpu.popitem(last=False)[0] for _ in range(over)])
            self._say(KvEventKind.REMOVED, Medium.CPU, lost)

    def _say(self, kind: KvEventKind, medium: Medium, names: array[int]) -> None:
        self._log += record(kind, medium, 0, 0, names)

    def _say_stored(self, medium: Medium, names: array[int]) -> None:
        """Split into runs of consecutive blocks."""
        start = 0
        for i in range(1, len(names) + 1):
            if i < len(names) and self._parents[names[i]] == names[i - 1]:
                continue
            run = names[start:i]
            self._log += record(KvEventKind.STORED, medium, 0, self._parents[run[0]], run)
            start = i
