"""Equal steps of a simulated engine, run at once: the time of k of them in closed form, and its inverse."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvasir_platform.sim.engine.sequence import EngineLeg


@dataclass(slots=True, eq=False)
class StepRun:
    """`steps` steps from `start_s` on; step j lasts `first_s + j * more_s` seconds. `chunks` are the prompt
    tokens that a single step computes; `decodes`: whether streams get their tokens."""

    start_s: float
    first_s: float
    more_s: float
    steps: int
    decodes: bool
    chunks: tuple[tuple[EngineLeg, int], ...] = ()

    def after(self, steps: int) -> float:
        """Return the seconds of the first `steps` steps."""
        return self.first_s * steps + self.more_s * (steps * (steps - 1) / 2)

    @property
    def end_s(self) -> float:
        """When the last step ends."""
        return self.start_s + self.after(self.steps)

    def steps_until(self, now: float) -> int:
        """Return the fewest steps that end at or after `now`, at least one."""
        elapsed = now - self.start_s
        if self.more_s > 0.0:
            half = self.first_s - self.more_s / 2
            guess = (math.sqrt(half * half + 2.0 * self.more_s * max(0.0, elapsed)) - half) / self.more_s
        else:
            guess = elapsed / self.first_s
        steps = max(1, math.ceil(guess))
        while self.start_s + self.after(steps) < now:
            steps += 1
        while steps > 1 and self.start_s + self.after(steps - 1) >= now:
            steps -= 1
        return steps

    def cut(self, now: float) -> None:
        """End with the step that runs at `now`: something else may join the next one."""
        if self.steps > 1 and now < self.end_s:
            self.steps = min(self.steps, self.steps_until(now))


class GapBins:
    """Bins for the time between tokens, each 3 % wider than the one before, from 10 µs on."""

    _FIRST_S = 1e-5
    _FACTOR = math.log(1.03)

    @classmethod
    def bin_of(cls, seconds: float) -> int:
        """Return the bin of a gap."""
        return max(0, int(math.log(max(seconds, cls._FIRST_S) / cls._FIRST_S) / cls._FACTOR))

    @classmethod
    def middle(cls, number: int) -> float:
        """Return the geometric middle of a bin, in seconds."""
        return cls._FIRST_S * math.exp(cls._FACTOR * (number + 0.5))
