"""Bare NIXL: an agent that is read from and an agent that reads, on NIXL's own bindings, and nothing else.

The agents are set up as ours are, since NIXL's defaults burn a core for each agent that idles; what is
compared is what comes on top.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from load_tests.scenarios.kv_parts.memory import Case, Memory

PROGRESS_DELAY_US = 1_000
Descriptor = tuple[int, int, int]


class _Agent:
    def __init__(self, name: str, memory: Memory) -> None:
        import nixl

        self.nixl: Any = nixl._bindings
        config = self.nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = PROGRESS_DELAY_US
        config.syncMode = self.nixl.NIXL_THREAD_SYNC_NONE
        self.name = name
        self.agent: Any = self.nixl.nixlAgent(name, config)
        self.backend = self.agent.createBackend("UCX", {"engine_config": "NET_DEVICES=lo"})
        regions = [(r.address, r.blocks * r.block_bytes, 0, "") for r in memory.regions]
        self._registered = self.nixl.nixlRegDList(self.nixl.DRAM_SEG, regions)
        self.agent.registerMem(self._registered, [self.backend])

    def close(self) -> None:
        self.agent.deregisterMem(self._registered, [self.backend])
        self.agent = None


class Source:
    """Is read from."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._agent: _Agent | None = None
        self._memory: Memory | None = None

    def prepare(self, case: Case, seed: int) -> tuple[str, bytes, list[int]]:
        """Have a case's KV; name, metadata and the layers' addresses."""
        self.close()
        self._count += 1
        self._memory = Memory(case, seed)
        self._agent = _Agent(f"{self._name}-{self._count}", self._memory)
        metadata = bytes(self._agent.agent.getLocalMD())
        return self._agent.name, metadata, [region.address for region in self._memory.regions]

    def digest(self, blocks: list[int]) -> str:
        """Of what lies in these blocks."""
        if self._memory is None:
            raise RuntimeError("nothing is prepared")
        return self._memory.digest(blocks)

    def close(self) -> None:
        """Free everything."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None


class Sink:
    """Reads, in one request with a descriptor for each run of neighbours, or for each piece."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._agent: _Agent | None = None
        self._memory: Memory | None = None
        self._theirs: tuple[str, list[int]] = ("", [])

    def prepare(self, case: Case, name: str, metadata: bytes, addresses: list[int]) -> None:
        """Have room for a case's KV, and know the source."""
        self.close()
        self._count += 1
        self._memory = Memory(case, None)
        self._agent = _Agent(f"{self._name}-{self._count}", self._memory)
        self._agent.agent.loadRemoteMD(metadata)
        self._theirs = (name, addresses)

    def read(self, runs: Sequence[tuple[int, int, int]]) -> float:
        """Seconds from making the descriptors to the last byte; `runs` are (source, target, blocks)."""
        if self._agent is None or self._memory is None:
            raise RuntimeError("nothing is prepared")
        agent, nixl = self._agent.agent, self._agent.nixl
        peer, addresses = self._theirs
        piece = self._memory.case.piece
        began = time.perf_counter()
        local: list[Descriptor] = []
        remote: list[Descriptor] = []
        for region, address in zip(self._memory.regions, addresses, strict=True):
            for source, target, blocks in runs:
                local.append((region.address + target * piece, blocks * piece, 0))
                remote.append((address + source * piece, blocks * piece, 0))
        handle = agent.createXferReq(
            nixl.NIXL_READ,
            nixl.nixlXferDList(nixl.DRAM_SEG, local),
            nixl.nixlXferDList(nixl.DRAM_SEG, remote),
            peer,
            "",
            [self._agent.backend],
        )
        agent.postXferReq(handle, "")
        while agent.getXferStatus(handle) != nixl.NIXL_SUCCESS:
            pass
        seconds = time.perf_counter() - began
        agent.releaseXferReq(handle)
        return seconds

    def digest(self, blocks: list[int]) -> str:
        """Of what lies in these blocks."""
        if self._memory is None:
            raise RuntimeError("nothing is prepared")
        return self._memory.digest(blocks)

    def close(self) -> None:
        """Free everything."""
        if self._agent is not None:
            self._agent.close()
            self._agent = None
