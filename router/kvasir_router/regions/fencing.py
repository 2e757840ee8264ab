"""When a request that another cell executes may be executed again.

The cell that a client is connected to and the cell that executes exchange a heartbeat on their connection.
Each ends its part by its own clock:

    origin    hears nothing for quiet_s: sends no heartbeat any more, and gives the execution up
    executor  hears nothing for orphan_s: stops the request, and frees what it holds
    origin    orphan_s and skew_s after its last heartbeat: executes again in another cell

The executor hears no heartbeat that was sent after the last one, so that it has stopped when the origin goes
on. That holds for a partition in one direction as well, which one of the two does not notice by itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FenceRules:
    """Seconds, as above. `delay_s` is the longest time that a heartbeat is under way before it is dropped,
    and `skew_s` allows for clocks of unequal speed."""

    heartbeat_s: float = 0.25
    quiet_s: float = 0.9
    orphan_s: float = 1.2
    delay_s: float = 0.5
    skew_s: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_s < min(self.quiet_s, self.orphan_s):
            raise ValueError("heartbeat_s is positive, and less than quiet_s and orphan_s")
        if min(self.delay_s, self.skew_s) < 0:
            raise ValueError("delay_s and skew_s are not negative")

    @property
    def longest_s(self) -> float:
        """The longest time from the break of a connection until the request is executed again."""
        return self.quiet_s + self.orphan_s + self.delay_s + self.skew_s


class OriginFence:
    """The origin's side, for one request. Times are monotonic seconds of the origin."""

    __slots__ = ("_given_up", "_heard_s", "_rules", "_sent_s")

    def __init__(self, rules: FenceRules, now: float) -> None:
        self._rules = rules
        self._heard_s = self._sent_s = now
        self._given_up = False

    def heard(self, now: float) -> None:
        """Something of the execution arrived: a heartbeat or output. Ignored once it was given up."""
        if not self.gives_up(now):
            self._heard_s = now

    def gives_up(self, now: float) -> bool:
        """Whether the execution is given up: nothing of it may be used any more."""
        self._given_up = self._given_up or now - self._heard_s > self._rules.quiet_s
        return self._given_up

    def beat(self, now: float) -> bool:
        """Whether to send a heartbeat. Call before each one that is sent."""
        if self.gives_up(now):
            return False
        self._sent_s = now
        return True

    def may_repeat(self, now: float) -> bool:
        """Whether the request may be executed again."""
        rules = self._rules
        return self.gives_up(now) and now >= self._sent_s + rules.delay_s + rules.orphan_s + rules.skew_s


class ExecutorFence:
    """The executor's side, for one request. Times are monotonic seconds of the executor."""

    __slots__ = ("_heard_s", "_rules", "_stopped")

    def __init__(self, rules: FenceRules, now: float) -> None:
        self._rules = rules
        self._heard_s = now
        self._stopped = False

    def heard(self, now: float) -> None:
        """A heartbeat arrived. Ignored once the request is stopped."""
        if not self.stops(now):
            self._heard_s = now

    def stops(self, now: float) -> bool:
        """Whether the execution stops, for good."""
        self._stopped = self._stopped or now - self._heard_s > self._rules.orphan_s
        return self._stopped
