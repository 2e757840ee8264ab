"""Which processes the kernel reads for an agent, and that it reads the wanted blocks into theirs."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from msgspec import structs

from kvasir.ports.transfer import UNSHARDED, BlockPart, KvRegion
from kvasir_workers.transfer.common.checksums import HostSums
from kvasir_workers.transfer.nixl import processes
from kvasir_workers.transfer.nixl.agent import XferState
from kvasir_workers.transfer.nixl.processes import Blocks, KernelRead, ProcessId, ProcessReads, this_process

BLOCKS, LAYERS = 8, 3
PATIENCE_S = 20.0


@dataclass
class Kv:
    """The KV of one agent in this process."""

    layers: npt.NDArray[np.uint8]

    @property
    def regions(self) -> list[KvRegion]:
        return [KvRegion(int(each.ctypes.data), each.shape[1], BLOCKS) for each in self.layers]

    @classmethod
    def made(cls, seed: int, block_bytes: int) -> Kv:
        return cls(
            np.random.default_rng(seed).integers(0, 256, (LAYERS, BLOCKS, block_bytes), dtype=np.uint8)
        )


@pytest.fixture
def mine() -> ProcessId:
    found = this_process()
    assert found is not None
    return found


def over(read: KernelRead) -> XferState:
    deadline = time.monotonic() + PATIENCE_S
    while read.state is XferState.RUNNING:
        assert time.monotonic() < deadline
    return read.state


@pytest.mark.parametrize("inline", [0, 1 << 30])
@pytest.mark.parametrize(
    ("part", "parts"), [(UNSHARDED, 1), (UNSHARDED, 2), (BlockPart(1, 2), 1), (UNSHARDED, 0)]
)
def test_the_wanted_part_of_each_block_arrives_with_its_sums(
    mine: ProcessId, part: BlockPart, parts: int, inline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "INLINE_BYTES", inline)
    source, target = Kv.made(1, 8192), Kv.made(2, 8192 // part.of)
    before = target.layers.copy()
    reads = ProcessReads(mine)
    ids, targets = [5, 6, 1], [3, 4, 0]
    read = reads.begin(
        mine, Blocks(source.regions, ids, part), Blocks(target.regions, targets, UNSHARDED), parts
    )
    assert over(read) is XferState.DONE
    reads.close()
    size = 8192 // part.of
    before[:, targets] = source.layers[:, ids, part.index * size : (part.index + 1) * size]
    assert np.array_equal(target.layers, before)
    sums = HostSums(target.regions)
    assert np.array_equal(read.sums(), sums.begin(targets, parts).result())
    sums.close()


def test_processes_of_other_machines_and_those_that_ended_are_not_reached(mine: ProcessId) -> None:
    reads = ProcessReads(mine)
    memory = Kv.made(1, 64).regions[0].address
    assert reads.reaches(mine, memory)
    assert not reads.reaches(None, memory)
    assert not reads.reaches(structs.replace(mine, machine="another"), memory)
    for address in (0, -1, 1 << 12, 1 << 64):
        assert not reads.reaches(mine, address)
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert not reads.reaches(structs.replace(mine, pid=gone.pid), memory)


def test_without_an_identity_of_the_machine_no_process_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_BOOT", "/nowhere")
    assert this_process() is None
