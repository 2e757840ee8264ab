"""Recovery of an exact record of vLLM's blocks after events were lost.

vLLM cannot report the contents of its cache, but it can empty it, and publishes that in the order of its
events, after which both sides agree. Emptying requires that no block is in use. An idle engine is emptied at
once. If an engine is not idle within `patience_s`, admissions are held for at most `hold_s`, and running
requests are preempted and recomputed. KV that waits to be pulled, or is being pulled, ends within that time.
If it does not, the engine continues, and the next attempt follows after twice the pause.

Events are lost only if the subscriber lags by more messages than the backlog holds, so this rarely runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvasir.ports.clock import Clock


class CacheControl(Protocol):
    """The operations on an engine's cache."""

    @property
    def idle(self) -> bool:
        """Whether no known request uses the cache."""
        ...

    async def reset(self, *, preempt: bool) -> bool:
        """Empty the cache of every rank; with `preempt`, preempt running requests. Return False if a block is
        in use."""
        ...

    def hold(self, held: bool) -> None:
        """Hold or resume admissions."""
        ...

    async def nudge(self) -> None:
        """Make every rank take a step, with which it publishes its events."""
        ...


class Doubt(Protocol):
    """Whether the record is exact; see kvasir_workers.engines.vllm.events.kv_events.KvEvents."""

    def probe(self) -> None: ...

    async def exact_within(self, seconds: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """Times in seconds; see above. `publish_s` is how long the event of an emptied cache may take to
    arrive."""

    patience_s: float = 5.0
    max_patience_s: float = 60.0
    poll_s: float = 0.25
    hold_s: float = 2.0
    publish_s: float = 2.0


async def make_exact(doubt: Doubt, control: CacheControl, clock: Clock, policy: RecoveryPolicy) -> None:
    """Return once the record is exact; retries indefinitely."""
    patience_s = policy.patience_s
    while True:
        emptied = await _empty_when_idle(control, clock, policy, patience_s)
        if not emptied:
            emptied = await _empty_by_force(control, clock, policy)
        if emptied and await publish(doubt, control, policy):
            return
        patience_s = min(2 * patience_s, policy.max_patience_s)


async def publish(doubt: Doubt, control: CacheControl, policy: RecoveryPolicy) -> bool:
    """Wait for the event of an emptied cache. Return False if it did not arrive, or events were lost
    since."""
    await control.nudge()
    doubt.probe()
    return await doubt.exact_within(policy.publish_s)


async def _empty_when_idle(
    control: CacheControl, clock: Clock, policy: RecoveryPolicy, patience_s: float
) -> bool:
    until = clock.now() + patience_s
    while clock.now() < until:
        if control.idle and await control.reset(preempt=False):
            return True
        await clock.sleep(policy.poll_s)
    return False


async def _empty_by_force(control: CacheControl, clock: Clock, policy: RecoveryPolicy) -> bool:
    until = clock.now() + policy.hold_s
    control.hold(True)
    try:
        while clock.now() < until:
            if await control.reset(preempt=True):
                return True
            await clock.sleep(policy.poll_s)
    finally:
        control.hold(False)
    return False
