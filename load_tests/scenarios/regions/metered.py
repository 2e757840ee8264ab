"""The limit of a tenant whose clients are in all regions, shared by the production rules, and beside it what
cells would admit that know nothing of each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvasir_router.regions.limits import (
    Admitted,
    Allotment,
    AllotmentAsk,
    AllottedLimit,
    HomeLimit,
    SharedLimitRules,
    TokenBucket,
    overshoot,
)
from load_tests.scenarios.regions.world import HOME, METERED_PER_MIN, REGIONS, World, rtt_s

RULES = SharedLimitRules()
HOUR_S = 3600


@dataclass(slots=True)
class MeteredTenant:
    """`later(at, what)` calls `what` with the time, at that time. `admitted` are tokens by second."""

    world: World
    later: Callable[[float, Callable[[float], None]], None]
    admitted: dict[int, float] = field(default_factory=dict)
    alone: dict[int, float] = field(default_factory=dict)
    refused: int = 0
    _home: HomeLimit = field(init=False)
    _others: dict[int, AllottedLimit] = field(init=False)
    _buckets: list[TokenBucket] = field(init=False)

    def __post_init__(self) -> None:
        numbers = range(len(REGIONS))
        self._home = HomeLimit(METERED_PER_MIN, 0.0, RULES)
        self._others = {
            each: AllottedLimit(REGIONS[each].name, METERED_PER_MIN, len(REGIONS), 0.0, RULES)
            for each in numbers
            if each != HOME
        }
        self._buckets = [TokenBucket(METERED_PER_MIN, 0.0) for _ in numbers]

    def take(self, region: int, tokens: int, now: float) -> Admitted:
        """Decide on a request at its cell."""
        if region == HOME:
            return self._home.take(tokens, now)
        return self._others[region].take(tokens, now)

    def count(self, region: int, tokens: int, now: float, *, admitted: bool) -> None:
        """Count a decision, and what a cell with the whole limit of its own would have decided."""
        second = int(now)
        if admitted:
            self.admitted[second] = self.admitted.get(second, 0.0) + tokens
        else:
            self.refused += 1
        if self._buckets[region].take(tokens, now):
            self.alone[second] = self.alone.get(second, 0.0) + tokens

    def second(self, now: float) -> None:
        """Every cell asks the home cell."""
        for region in self._others:
            if not self.world.lost(region, now):
                self.ask(region, now)

    def ask(self, region: int, now: float) -> None:
        """Ask for an allotment; what does not arrive is lost."""
        ask = self._others[region].ask(now)
        if self.world.reaches(region, HOME, now):
            self.later(now + rtt_s(region, HOME) / 2, lambda at: self._asked(region, ask, at))

    def _asked(self, region: int, ask: AllotmentAsk, now: float) -> None:
        answer = self._home.allot(ask, now)
        if self.world.reaches(region, HOME, now):
            self.later(now + rtt_s(region, HOME) / 2, lambda at: self._answered(region, answer, at))

    def _answered(self, region: int, answer: Allotment, now: float) -> None:
        self._others[region].answered(answer, now)

    def excess(self) -> float:
        """Return by how much the worst minute exceeds the bound, in tokens; negative if none does."""
        apart = 1 if self.world.outages else 0
        seconds = 61.0
        bound = METERED_PER_MIN * (1 + seconds / 60)
        bound += overshoot(METERED_PER_MIN, len(REGIONS), apart, seconds, RULES)
        return _most(self.admitted, 60) - bound

    def worst_hour(self, *, alone: bool = False) -> float:
        """Return the tokens of the worst hour relative to the limit."""
        return _most(self.alone if alone else self.admitted, HOUR_S) / (METERED_PER_MIN * 60)


def _most(tokens: dict[int, float], span: int) -> float:
    """Return the largest sum over that many seconds."""
    most = total = 0.0
    for second in range(max(tokens, default=0) + 1):
        total += tokens.get(second, 0.0) - tokens.get(second - span, 0.0)
        most = max(most, total)
    return most
