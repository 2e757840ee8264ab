"""Keeps the tier state reported by an idle engine current.

An engine without requests takes no step, and only a step reports the state of its tiers. Routers avoid a tier
that cannot be read, and with it the worker, which then stays idle. So while a tier is in trouble, an idle
engine takes a step periodically.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvasir.core.requests import EngineLoad
from kvasir.ports.clock import Clock

FIRST_S = 1.0
LONGEST_S = 30.0
"""Approximately the longest pause between two trials of a tier in trouble."""


class Nudged(Protocol):
    """An engine that can be made to take a step."""

    @property
    def idle(self) -> bool: ...

    async def nudge(self) -> None: ...


async def watch_tiers(load: Callable[[], EngineLoad], engine: Nudged, clock: Clock) -> None:
    """Watch the tiers for the life of the engine. Pauses grow from FIRST_S to LONGEST_S while no tier
    recovers."""
    pause_s = FIRST_S
    while True:
        await clock.sleep(pause_s)
        if not any(tier.trouble for tier in load().tiers):
            pause_s = FIRST_S
            continue
        if engine.idle:
            await engine.nudge()
        pause_s = min(2 * pause_s, LONGEST_S)
