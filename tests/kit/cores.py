"""Long runs of independent seeds take every core that there is."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Played = TypeVar("Played")


def over_cores(play: Callable[[range], Played], seeds: range) -> list[Played]:
    """What `play` makes of equal parts of the seeds, each part in a process of its own. `play` is a module's
    function; what it raises is raised here."""
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, get_context("spawn")) as processes:
        return list(processes.map(play, [seeds[first::cores] for first in range(cores)]))
