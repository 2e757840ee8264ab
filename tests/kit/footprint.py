"""What a deployment holds on its machine while it runs, and whether that is gone."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.kit.processes import lives
from tests.kit.stack import Stack


@dataclass(frozen=True, slots=True)
class Footprint:
    """Processes, files of shared memory, temporary directory and address of a running deployment."""

    processes: list[psutil.Process]
    shared_memory: set[Path]
    temp_dir: Path
    address: str

    @classmethod
    def of(cls, stack: Stack) -> Footprint:
        processes = stack.processes()
        state = json.loads((stack.home / "kvasir" / "state.json").read_text())
        return cls(processes, _shared_memory(processes), Path(state["temp_dir"]), stack.address)

    def alive(self) -> list[str]:
        """The processes that run, as `pid name`."""
        found = []
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                if lives(process):
                    found.append(f"{process.pid} {process.name()}")
        return found

    def assert_gone(self) -> None:
        assert self.alive() == []
        assert not self._listening()
        assert [path for path in self.shared_memory if path.exists()] == []
        assert not self.temp_dir.exists()

    def _listening(self) -> bool:
        host, _, port = self.address.rpartition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0


def _shared_memory(processes: list[psutil.Process]) -> set[Path]:
    """The files of shared memory that these processes map."""
    found = set()
    for process in processes:
        with contextlib.suppress(psutil.Error):
            found |= {Path(each.path) for each in process.memory_maps() if each.path.startswith("/dev/shm/")}
    return found
