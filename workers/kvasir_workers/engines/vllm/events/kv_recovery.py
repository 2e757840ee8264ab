"""How a record of vLLM's blocks becomes exact again after events were lost.

vLLM cannot be asked what its cache holds, but it can be told to empty it, and says so in the order of its
events: from there on both sides agree. Emptying needs that nothing is in use. An idle engine is emptied at
once. One that is not idle within `patience_s` is made so: newcomers wait for at most `hold_s`, and what runs
is preempted and computed again. KV that waits to be pulled, or is being pulled, ends in that time by itself.
If it does not, the engine goes on, and the next attempt comes after a pause twice as long.

A loss takes a subscriber that lags by more messages than the backlog holds, so that this hardly ever runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvasir.ports.clock import Clock


class CacheControl(Protocol):
    """The engine, as far as its cache can be emptied."""

    @property
    def idle(self) -> bool:
        """Whether nothing is known to use the cache."""
        ...

    async def reset(self, *, preempt: bool) -> bool:
        """Empty the cache of every rank, with `preempt` whatever runs; False when something is in use."""
        ...

    def hold(self, held: bool) -> None:
        """Let newcomers wait, or go on."""
        ...

    async def nudge(self) -> None:
        """Have every rank take a step, with which it publishes its events."""
        ...


class Doubt(Protocol):
    """Whether the record may be believed; see kvasir_workers.engines.vllm.events.kv_events.KvEvents."""

    def probe(self) -> None: ...

    async def exact_within(self, seconds: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class RecoveryPolicy:
    """Seconds; see above. `publish_s` is how long an emptied cache may take to be heard of."""

    patience_s: float = 5.0
    max_patience_s: float = 60.0
    poll_s: float = 0.25
    hold_s: float = 2.0
    publish_s: float = 2.0


async def make_exact(doubt: Doubt, control: CacheControl, clock: Clock, policy: RecoveryPolicy) -> None:
    """Return once the record can be believed; tries for as long as it takes."""
    patience_s = policy.patience_s
    while True:
        emptied = await _empty_when_idle(control, clock, policy, patience_s)
        if not emptied:
            emptied = await _empty_by_force(control, clock, policy)
        if emptied and await publish(doubt, control, policy):
            return
        patience_s = min(2 * patience_s, policy.max_patience_s)


async def publish(doubt: Doubt, control: CacheControl, policy: RecoveryPolicy) -> bool:
    """Have an emptied cache heard of; False when it was not, or something was lost since."""
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
