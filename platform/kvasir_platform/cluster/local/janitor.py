"""Removes everything that a deployment leaves: processes, shared memory, temporary folder.

Only what is proven to belong to the deployment is removed. A process belongs to it if it has the deployment's
marker in its environment, descends from one that has or from the supervisor, or was recorded with its start
time. A shared-memory file belongs to it if one of its processes had the file open, the file's name has the
form that engines and Python use, it was created during the deployment, and it is still the same inode; it is
removed only when no process on the machine has it open. So other deployments and programs on the machine are
unaffected.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import psutil

from kvasir_platform.cluster.local.runtime_dir import ProcessRecord, ShmRecord

MARKER = "KVASIR_DEPLOYMENT_ID"
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - read, never written

_SHM_NAMES = re.compile(r"(psm_|sem\.mp-|vllm|nixl|ucx_shm_posix_|plasma).*")
_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 5
_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Leftovers:
    """The result of a clean-up: processes that had to be killed, removed files, and what could not be
    removed, with the reason."""

    killed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    remaining: tuple[str, ...] = ()


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends, so that a daemonised one stays
    in its process tree. Linux only; elsewhere only the marker finds them."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def marked_environment(base: dict[str, str], deployment_id: str) -> dict[str, str]:
    """Return `base` with the marker. SPT_NOENV keeps a process that sets its title (Ray's do) from
    overwriting the environment that the kernel shows."""
    return base | {MARKER: deployment_id, "SPT_NOENV": "1"}


class Janitor:
    """Finds and removes what belongs to one deployment. Calls block for up to seconds: run them in a thread.
    `supervised`: this process is the deployment's supervisor, so all its descendants count. Processes have
    `grace_s` seconds between SIGTERM and SIGKILL."""

    grace_s: ClassVar[float] = 5.0

    def __init__(
        self,
        deployment_id: str,
        *,
        started_at: float,
        supervised: bool,
        shm: Path = SHARED_MEMORY,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._id = deployment_id
        self._started_at = started_at
        self._supervised = supervised
        self._shm = shm
        self._pause = pause

    def processes(self, recorded: Iterable[ProcessRecord] = ()) -> list[psutil.Process]:
        """Return every live process of the deployment but this one."""
        found: dict[int, psutil.Process] = {}
        uid = os.getuid()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.uids().real == uid and process.environ().get(MARKER) == self._id:
                    found[process.pid] = process
        for record in recorded:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(record.pid)
                if abs(process.create_time() - record.created) < 0.1:
                    found[process.pid] = process
        roots = list(found.values()) + ([psutil.Process()] if self._supervised else [])
        for root in roots:
            with contextlib.suppress(psutil.Error):
                found |= {child.pid: child for child in root.children(recursive=True)}
        found.pop(os.getpid(), None)
        return [process for process in found.values() if _alive(process)]

    def shm_names(self) -> frozenset[str]:
        """Return the names of existing files, of any owner: a cheap way to detect a new one."""
        with contextlib.suppress(OSError):
            return frozenset(os.listdir(self._shm))
        return frozenset()

    def record(self, processes: Iterable[psutil.Process]) -> tuple[ProcessRecord, ...]:
        """Return the processes as records, by pid."""
        records = []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                records.append(ProcessRecord(process.pid, process.create_time(), _title(process)))
        return tuple(sorted(records, key=lambda record: record.pid))

    def shared_memory(self, processes: Iterable[psutil.Process]) -> set[ShmRecord]:
        """Return the engine's shared-memory files that any of `processes` has open."""
        opened: set[int] = set()
        for process in processes:
            opened |= _open_inodes(process.pid, self._shm)
        if not opened:
            return set()
        records = map(self._ours, (self._shm / name for name in self.shm_names()))
        return {record for record in records if record is not None and record.inode in opened}

    def holds(self, record: ShmRecord) -> bool:
        """Whether the file of `record` still exists and is the same."""
        return self._ours(Path(record.path)) == record

    def kill(self, recorded: Iterable[ProcessRecord] = (), *, at_once: bool = False) -> Leftovers:
        """Send SIGTERM to all, wait for the grace unless it has to be done `at_once`, then SIGKILL until none
        is left."""
        grace_s = 0.0 if at_once else self.grace_s
        killed: list[str] = []
        recorded = tuple(recorded)
        processes = self.processes(recorded)
        for attempt in range(_ROUNDS):
            if not processes:
                break
            killed += [f"{_title(p)} (pid {p.pid})" for p in processes if attempt == 0]
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.terminate() if attempt == 0 else process.kill()
            self._wait(processes, grace_s)
            processes = self.processes(recorded)
        remaining = tuple(f"process {_title(p)} (pid {p.pid})" for p in processes)
        return Leftovers(killed=tuple(killed), remaining=remaining)

    def remove(self, records: Iterable[ShmRecord], temp_dir: Path | None) -> Leftovers:
        """Remove the remaining files of `records` and the temporary folder."""
        removed: list[str] = []
        remaining: list[str] = []
        stale = sorted(filter(self.holds, records), key=lambda record: record.path)
        in_use = set[int]().union(*(_open_inodes(pid, self._shm) for pid in psutil.pids() if stale))
        for record in stale:
            if record.inode in in_use:
                remaining.append(f"{record.path} (another process has it open)")
                continue
            try:
                Path(record.path).unlink()
                removed.append(record.path)
            except FileNotFoundError:
                continue
            except OSError as error:
                remaining.append(f"{record.path} ({error.strerror})")
        if temp_dir is not None and temp_dir.exists():
            shutil.rmtree(temp_dir, ignore_errors=True)
            if temp_dir.exists():
                remaining.append(f"{temp_dir} (cannot be removed)")
        return Leftovers(removed=tuple(removed), remaining=tuple(remaining))

    def _wait(self, processes: list[psutil.Process], timeout_s: float) -> None:
        """Wait until all have ended or `timeout_s` seconds have passed. Nothing is reaped: the process that
        started a child needs its exit status, and an orphan's zombie ends with this process."""
        for _ in range(max(1, round(timeout_s / _POLL_S))):
            processes = [process for process in processes if _alive(process)]
            if not processes:
                return
            self._pause(_POLL_S)

    def _ours(self, path: Path) -> ShmRecord | None:
        if path.parent != self._shm or not _SHM_NAMES.fullmatch(path.name):
            return None
        try:
            status = path.lstat()
        except OSError:
            return None
        # The kernel's file timestamps have a resolution of some milliseconds.
        made_before = status.st_ctime < self._started_at - 0.1
        if status.st_uid != os.getuid() or made_before or not path.is_file():
            return None
        return ShmRecord(str(path), status.st_ino)


def _alive(process: psutil.Process) -> bool:
    """Whether it can still hold resources; a zombie cannot."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _title(process: psutil.Process) -> str:
    """Return a short name that distinguishes processes: the module or script of a Python process."""
    try:
        command = process.cmdline()
        name = process.name()
    except psutil.Error:
        return "?"
    if command and command[0].startswith("ray::"):
        return command[0].split(" ", 1)[0]
    for helper in ("resource_tracker", "forkserver", "spawn"):
        if f"from multiprocessing.{helper} import" in " ".join(command[:4]):
            return f"multiprocessing {helper.replace('_', ' ')}"
    if "-m" in command[:-1]:
        return command[command.index("-m") + 1]
    scripts = [Path(part).name for part in command[1:] if part.endswith((".py", "/ray", "/kvasir"))]
    return scripts[-1] if scripts and name.startswith("python") else name


def _open_inodes(pid: int, folder: Path) -> set[int]:
    """Return the inodes of files under `folder` that a process maps or has open. Inodes and not names: a
    semaphore is mapped before it gets its name, and the kernel keeps showing the first one."""
    prefix = f"{folder}/"
    inodes: set[int] = set()
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            # address, permissions, offset, device, inode, path
            if prefix in line:
                inodes.add(int(line.split(maxsplit=5)[4]))
    with contextlib.suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                link = f"/proc/{pid}/fd/{descriptor}"
                if os.readlink(link).startswith(prefix):
                    inodes.add(os.stat(link).st_ino)
    return inodes
