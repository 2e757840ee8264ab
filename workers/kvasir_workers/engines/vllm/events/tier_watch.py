"""Keeps what an idle engine says of its tiers from going stale.

An engine without requests takes no step, and only a step tells what has become of its tiers. Routers pass
by a tier that cannot be read, and with it the worker, which then stays idle. So while a tier is in trouble,
an idle engine is made to take a step now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvasir.core.requests import EngineLoad
from kvasir.ports.clock import Clock

FIRST_S = 1.0
LONGEST_S = 30.0
"""About the longest pause between two trials of a tier in trouble."""


class Nudged(Protocol):
    """The engine, as far as it can be made to take a step."""

    @property
    def idle(self) -> bool: ...

    async def nudge(self) -> None: ...


async def watch_tiers(load: Callable[[], EngineLoad], engine: Nudged, clock: Clock) -> None:
    """Runs as long as the engine. Pauses grow from FIRST_S to LONGEST_S while nothing gets better."""
    pause_s = FIRST_S
    while True:
        await clock.sleep(pause_s)
        if not any(tier.trouble for tier in load().tiers):
            pause_s = FIRST_S
            continue
        if engine.idle:
            await engine.nudge()
        pause_s = min(2 * pause_s, LONGEST_S)
