"""Whether the machine is idle: what else runs here makes figures worse, and some more than others."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from dataclasses import dataclass

import psutil

LOAD = 0.5
"""Load average of the last minute, above which a machine is not idle."""
BUSY = 0.15
"""Share of the CPUs' time that others may use between two scenarios, when the load average still has the one
that just ended."""
_MARKS = (
    ("raylet", "Ray"),
    ("gcs_server", "Ray"),
    ("ray::", "Ray"),
    ("EngineCore", "a vLLM engine"),
    ("vllm", "vLLM"),
    ("kvasir_platform", "Kvasir"),
    ("kvasir_workers", "a worker of Kvasir"),
    ("load_tests.scenarios", "a benchmark"),
    ("pytest", "tests"),
    ("mypy", "mypy"),
)


_ONLY_WAIT = frozenset({"bash", "sh", "flock", "timeout", "make", "tail", "less", "watch"})
"""Programs that start others, or look at their output, and use no CPU themselves."""


@dataclass(frozen=True, slots=True)
class OtherProcess:
    """A process that disturbs measurements."""

    pid: int
    what: str
    command: str


def disturbing(processes: Iterable[tuple[int, str]], own: set[int]) -> list[OtherProcess]:
    """Those of the processes, pid and command line, that serve or measure and are not among `own`."""
    found = []
    for pid, command in processes:
        if pid in own or command.partition(" ")[0].rpartition("/")[2] in _ONLY_WAIT:
            continue
        what = next((what for mark, what in _MARKS if mark in command), "")
        if what:
            found.append(OtherProcess(pid, what, command[:100]))
    return found


def other_processes() -> list[OtherProcess]:
    """What serves or measures on this machine, without this process and those that started it."""
    here = psutil.Process()
    own = {here.pid, *(each.pid for each in here.parents())}
    processes = []
    for each in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            processes.append((each.pid, " ".join(each.cmdline()) or each.name()))
    return disturbing(processes, own)


def load_average() -> float:
    """The load average of the last minute."""
    return os.getloadavg()[0]


def busy_share(seconds: float) -> float:
    """The share of the CPUs' time that was used during the next seconds; it waits for them."""
    return psutil.cpu_percent(interval=seconds) / 100
