"""Bare NIXL: a source agent and a reading agent, on NIXL's own bindings.

The agents are configured like ours, because NIXL's defaults use a core per idle agent; the comparison shows
the overhead on top of NIXL.
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


class _Side:
    def __init__(self, name: str) -> None:
        self._name = name
        self._count = 0
        self._agent: _Agent | None = None
        self._memory: Memory | None = None

    def _renew(self, case: Case, seed: int | None) -> _Agent:
        if self._agent is not None:
            self._agent.close()
        self._count += 1
        self._memory = Memory(case, seed)
        self._agent = _Agent(f"{self._name}-{self._count}", self._memory)
        return self._agent

    def _prepared(self) -> tuple[_Agent, Memory]:
        if self._agent is None or self._memory is None:
            raise RuntimeError("nothing is prepared")
        return self._agent, self._memory

    def digest(self, blocks: list[int]) -> str:
        """A checksum of the contents of these blocks."""
        return self._prepared()[1].digest(blocks)


class Source(_Side):
    """The agent that is read from."""

    def prepare(self, case: Case, seed: int) -> tuple[str, bytes, list[int]]:
        """Allocate a case's KV; return the agent's name, metadata and the layers' addresses."""
        self._renew(case, seed)
        ours, memory = self._prepared()
        return ours.name, bytes(ours.agent.getLocalMD()), [region.address for region in memory.regions]


class Sink(_Side):
    """The agent that reads, in one request with a descriptor per run of adjacent blocks, or per piece."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._theirs: tuple[str, list[int]] = ("", [])

    def prepare(self, case: Case, name: str, metadata: bytes, addresses: list[int]) -> None:
        """Allocate the target of a case's KV and register the source."""
        self._renew(case, None).agent.loadRemoteMD(metadata)
        self._theirs = (name, addresses)

    def read(self, runs: Sequence[tuple[int, int, int]]) -> float:
        """Return the seconds from building the descriptors to the last byte; `runs` are (source, target,
        blocks)."""
        ours, memory = self._prepared()
        agent, nixl = ours.agent, ours.nixl
        peer, addresses = self._theirs
        piece = memory.case.piece
        began = time.perf_counter()
        local: list[Descriptor] = []
        remote: list[Descriptor] = []
        for region, address in zip(memory.regions, addresses, strict=True):
            for source, target, blocks in runs:
                local.append((region.address + target * piece, blocks * piece, 0))
                remote.append((address + source * piece, blocks * piece, 0))
        handle = agent.createXferReq(
            nixl.NIXL_READ,
            nixl.nixlXferDList(nixl.DRAM_SEG, local),
            nixl.nixlXferDList(nixl.DRAM_SEG, remote),
            peer,
            "",
            [ours.backend],
        )
        agent.postXferReq(handle, "")
        while agent.getXferStatus(handle) != nixl.NIXL_SUCCESS:
            pass
        seconds = time.perf_counter() - began
        agent.releaseXferReq(handle)
        return seconds
