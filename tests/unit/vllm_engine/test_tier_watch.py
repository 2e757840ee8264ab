"""An idle engine is polled while its tier has failed, and not otherwise."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from kvasir.core.kv import Medium, TierLoad
from kvasir.core.requests import EngineLoad
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_workers.engines.vllm.events.tier_watch import LONGEST_S, watch_tiers


@dataclass
class Engine:
    """Its tier is in trouble from `since` to `until`, as it says with its next step; idle but in `busy`."""

    clock: VirtualClock
    since: float = 0.0
    until: float = 1e9
    busy: tuple[float, float] = (0.0, 0.0)
    nudges: list[float] = field(default_factory=list)
    told: bool = False

    @property
    def idle(self) -> bool:
        return not self.busy[0] <= self.clock.now() < self.busy[1]

    async def nudge(self) -> None:
        self.nudges.append(self.clock.now())
        self.told = self.clock.now() >= self.until

    def load(self) -> EngineLoad:
        troubled = self.clock.now() >= self.since and not self.told
        return EngineLoad(tiers=(TierLoad(Medium.REMOTE, trouble="no answer" if troubled else ""),))


def watched(seconds: float, **engine: float | tuple[float, float]) -> Engine:
    async def main() -> Engine:
        clock = VirtualClock()
        made = Engine(clock, **engine)  # type: ignore[arg-type]  # all of them are times
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await watch_tiers(made.load, made, clock)
        return made

    return run_virtual(main())


def test_an_engine_whose_tiers_are_well_is_left_in_peace() -> None:
    assert watched(1000.0, since=1e9).nudges == []


def test_trouble_is_asked_after_less_and_less_often_while_it_lasts() -> None:
    nudges = watched(200.0).nudges
    assert nudges[:5] == [1.0, 3.0, 7.0, 15.0, 31.0]
    assert nudges[-1] - nudges[-2] == LONGEST_S


def test_an_end_of_the_trouble_is_told_and_then_nothing_more_is_asked() -> None:
    engine = watched(1000.0, until=5.0)
    assert engine.told
    assert engine.nudges == [1.0, 3.0, 7.0]


def test_an_engine_with_requests_is_not_asked_since_its_steps_tell() -> None:
    assert watched(20.0, busy=(0.0, 8.0)).nudges == [15.0]
