"""Runs long series of independent seeds on all cores."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Played = TypeVar("Played")


def over_cores(play: Callable[[range], Played], seeds: range) -> list[Played]:
    """Return the results of `play` for equal parts of the seeds, each part in its own process. `play` is a
    module-level function; its exceptions are raised here."""
    cores = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(cores, get_context("spawn")) as processes:
        return list(processes.map(play, [seeds[first::cores] for first in range(cores)]))
