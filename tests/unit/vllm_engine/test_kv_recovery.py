"""Recovery to EXACT after lost events, on an idle engine and on one that is always busy."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual
from kvasir_workers.engines.vllm.events.kv_recovery import RecoveryPolicy, make_exact

POLICY = RecoveryPolicy(patience_s=5.0, max_patience_s=12.0, poll_s=0.25, hold_s=2.0, publish_s=2.0)


@dataclass
class Engine:
    """Busy until `idle_at`; can be emptied by force only between `free_from` and `free_to` while newcomers
    are held. Says that it is empty `answers` seconds after a nudge, None: never."""

    clock: VirtualClock
    idle_at: float = 0.0
    free_from: float = 0.0
    free_to: float = 1e9
    answers: float | None = 0.01
    resets: list[tuple[float, bool]] = field(default_factory=list)
    holds: list[tuple[float, bool]] = field(default_factory=list)
    probes: int = 0
    held: bool = False
    empty: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def idle(self) -> bool:
        return self.clock.now() >= self.idle_at

    async def reset(self, *, preempt: bool) -> bool:
        now = self.clock.now()
        self.resets.append((now, preempt))
        assert not preempt or self.held
        return self.idle or (preempt and self.free_from <= now <= self.free_to)

    def hold(self, held: bool) -> None:
        self.held = held
        self.holds.append((self.clock.now(), held))

    async def nudge(self) -> None:
        if self.answers is not None:
            asyncio.get_running_loop().call_later(self.answers, self.empty.set)

    def probe(self) -> None:
        self.probes += 1

    async def exact_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.empty.wait()
        except TimeoutError:
            return False
        return True


def recover(**engine: float | None) -> tuple[Engine, float]:
    async def main() -> tuple[Engine, float]:
        clock = VirtualClock()
        made = Engine(clock, **engine)  # type: ignore[arg-type]  # all of them are times
        await make_exact(made, made, clock, POLICY)
        return made, clock.now()

    return run_virtual(main())


def test_an_idle_engine_is_emptied_at_once_and_nobody_is_held() -> None:
    engine, seconds = recover()
    assert engine.resets == [(0.0, False)]
    assert engine.holds == []
    assert seconds == 0.01


def test_an_engine_that_comes_to_rest_is_emptied_then() -> None:
    engine, seconds = recover(idle_at=3.1)
    assert engine.resets == [(3.25, False)]
    assert engine.holds == []
    assert seconds == 3.26


def test_an_engine_that_never_rests_is_emptied_by_force_and_goes_on() -> None:
    engine, seconds = recover(idle_at=1e9)
    assert engine.resets == [(5.0, True)]
    assert engine.holds == [(5.0, True), (5.0, False)]
    assert seconds == 5.01


def test_kv_that_is_still_being_pulled_is_waited_for_while_newcomers_are_held() -> None:
    engine, _ = recover(idle_at=1e9, free_from=6.1)
    assert [preempt for _, preempt in engine.resets] == [True] * 6
    assert engine.holds == [(5.0, True), (6.25, False)]


def test_newcomers_are_never_held_for_longer_than_said_and_pauses_grow() -> None:
    engine, seconds = recover(idle_at=1e9, free_from=40.0)
    starts = [at for at, held in engine.holds if held]
    ends = [at for at, held in engine.holds if not held]
    assert all(end - start <= POLICY.hold_s for start, end in zip(starts, ends, strict=True))
    assert starts == [5.0, 17.0, 31.0, 45.0]
    assert not engine.held
    assert seconds == 45.01


def test_a_cache_that_was_emptied_unheard_is_emptied_again() -> None:
    async def main() -> Engine:
        clock = VirtualClock()
        engine = Engine(clock, answers=None)
        recovering = asyncio.create_task(make_exact(engine, engine, clock, POLICY))
        await clock.sleep(1.0)
        engine.answers = 0.01
        await recovering
        return engine

    engine = run_virtual(main())
    assert engine.resets == [(0.0, False), (2.0, False)]
    assert engine.probes == 2
