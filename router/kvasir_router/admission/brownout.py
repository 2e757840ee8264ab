"""Degraded service before refusals: an ordered list of steps, entered and left one at a time.

A step is entered when pressure has been high for `enter_s`, and left when it has been low for `leave_s`.
Leaving a step brings back the load that it removed, so a step that is entered again soon after it was left is
kept twice as long.
"""

from __future__ import annotations

from kvasir.ports.router import NO_BROWNOUT, BrownoutView
from kvasir_router.admission.contract import BrownoutRules, BrownoutStep

MOST_PATIENCE = 16.0
"""Upper limit of the time that a step is kept, as a multiple of `leave_s`."""


class Brownout:
    """The number of steps in force, counted from the first."""

    def __init__(self, rules: BrownoutRules) -> None:
        self._rules = rules
        self._since_s: float | None = None
        self._rising = False
        self._left_s: float | None = None
        self._kept_s = rules.leave_s
        self.level = 0
        self.view = NO_BROWNOUT

    @property
    def active(self) -> tuple[BrownoutStep, ...]:
        """The steps in force, in order."""
        return self._rules.steps[: self.level]

    @property
    def cap(self) -> int | None:
        """The smallest cap on max_tokens in force."""
        return min((s.cap_max_tokens for s in self.active if s.cap_max_tokens is not None), default=None)

    @property
    def shed(self) -> int | None:
        """The first priority class that is refused; classes after it are refused too."""
        return min((s.shed for s in self.active if s.shed is not None), default=None)

    def update(self, pressure: float, now: float) -> bool:
        """Update with the current pressure. Return whether the level changed."""
        rules = self._rules
        rising = pressure >= rules.enter and self.level < len(rules.steps)
        falling = pressure <= rules.leave and self.level > 0
        if not (rising or falling):
            self._since_s = None
            return False
        if self._since_s is None or rising is not self._rising:
            self._since_s, self._rising = now, rising
        due = self._due()
        if due is None or now < due:
            return False
        if rising:
            self._enter(now)
        else:
            self.level -= 1
            self._left_s = now
        self.view = self._seen()
        self._since_s = now if 0 < self.level < len(rules.steps) else None
        return True

    def next_due(self) -> float | None:
        """The time at which an `update` with the same pressure changes the level."""
        return self._due()

    def retry_after_s(self) -> float:
        """The least time until a step may be left."""
        return self._kept_s

    def _seen(self) -> BrownoutView:
        if not self.level:
            return NO_BROWNOUT
        models = [step.fallback_model for step in self.active if step.fallback_model is not None]
        text = "; ".join((str(self.level), *map(str, self.active)))
        return BrownoutView(self.level, text, models[-1] if models else None)

    def _enter(self, now: float) -> None:
        rules = self._rules
        soon = self._left_s is not None and now - self._left_s <= 2 * self._kept_s
        if soon:
            self._kept_s = min(MOST_PATIENCE * rules.leave_s, 2 * self._kept_s)
        elif self.level == 0:
            self._kept_s = rules.leave_s
        self._left_s = None
        self.level += 1

    def _due(self) -> float | None:
        if self._since_s is None:
            return None
        return self._since_s + (self._rules.enter_s if self._rising else self._kept_s)
