"""A worker's KV blocks: what running requests hold, what is cached behind them, and what is said of it.

As in vLLM, a block belongs to the cache once it is computed, cannot go while a request uses it, and is
evicted in the order in which requests let go of it, a prompt's last blocks first. What the device evicts
goes to CPU memory, if there is any, and comes back from there when it is asked for.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvasir.core.kv import KvEventKind, Medium
from kvasir.native._twin import record


class Hit(NamedTuple):
    """How much of a prompt is there, in blocks: on the device or below it, and of that the part below."""

    blocks: int
    from_cpu: int


class BlockCache:
    """`parents` names the block before each; 0 for none."""

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
        """The fraction of the device's blocks that running requests hold."""
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
        """The longest prefix that is there, of at most `most` blocks."""
        depth = below = 0
        for name in names[:most]:
            if name in self._cpu:
                below += 1
            elif name not in self._used and name not in self._free:
                break
            depth += 1
        return Hit(depth, below)

    def admit(self, names: Sequence[int], hit: Hit, blocks: int) -> bool:
        """Hold the hit and room for `blocks` in all; False, with nothing changed, where there is none."""
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

    def fill(self, names: Sequence[int]) -> int:
        """These blocks, held as room so far, are computed. Returns how many of them were new: of the
        others a copy is there, and the room stays with the request."""
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
        """The request has ended."""
        self._private -= private
        for name in reversed(names):
            users = self._used[name] - 1
            if users:
                self._used[name] = users
            else:
                del self._used[name]
                self._free[name] = None

    def take_log(self) -> bytes:
        """What has changed since the last call."""
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
        """In runs of blocks that follow each other."""
        start = 0
        for i in range(1, len(names) + 1):
            if i < len(names) and self._parents[names[i]] == names[i - 1]:
                continue
            run = names[start:i]
            self._log += record(KvEventKind.STORED, medium, 0, self._parents[run[0]], run)
            start = i
