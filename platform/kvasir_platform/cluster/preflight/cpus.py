"""The CPUs that this process may use: their number, from which numbers of processes and threads are derived,
and whether they have the instructions that some kernels need."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
CPUINFO = Path("/proc/cpuinfo")


def usable_cpus(cgroup: Path = CGROUP) -> float:
    """Return the size of its affinity mask, limited by the quota of the control group at `cgroup`."""
    cpus = float(len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            cpus = min(cpus, int(quota) / int(period))
    except (OSError, ValueError):
        pass
    return cpus


def is_x86() -> bool:
    """Whether the CPU has the instructions of x86."""
    return platform.machine().lower() in ("x86_64", "amd64")


def has_amx(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the CPU has AMX, Intel's instructions for matrices."""
    return "amx_tile" in _flags(cpuinfo)


def has_avx512(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the CPU has the instructions of AVX-512 that torch and vLLM ask for."""
    return {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= _flags(cpuinfo)


def _flags(cpuinfo: Path) -> set[str]:
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())
