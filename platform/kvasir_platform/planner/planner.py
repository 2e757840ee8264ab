"""What sizes the pools of one model should have, and why: the whole of a decision, in words and numbers.

What routers tell becomes a rate of requests; forecasts say what it may be by the time that a replica asked
for now serves; what requests have been like, and what was measured of the workers, says how many replicas
that takes; and rehearsals on the load that came say how many to keep beyond it. Bounds, pins, windows and
rates of change have the last word, in that order, and each says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvasir.core.demand import Traffic, WorkerStats
from kvasir.core.requests import Role
from kvasir_platform.planner.backtest import PRESSING, Backtest, ForecastChoice, LoadSample, SloLedger
from kvasir_platform.planner.capacity import Capacity, SloTarget, WorkerRates, capacity, seats
from kvasir_platform.planner.demand import Interval, Mix
from kvasir_platform.planner.forecast import Corrected, Predictor, Steady, predictors
from kvasir_platform.planner.sizes import Bounds, TokenLoad, busy, needs, whole
from kvasir_platform.planner.stabilize import CALM, NEAR, STARTS, DesiredWindow, Regrets

_WAITS = "what waits is worked off"
_NOW_S = 30.0
"""What lasts shorter is the noise of a load."""
_SHORT_OF = 0.9
"""Workers busier than this may have been too few: what was late then is put down to that."""
_BACKLOG_MOST = 1.0
"""What waits adds so much of the load itself, at most: a pool that cannot start must not ask for ever
more."""


@dataclass(frozen=True, slots=True)
class PoolRules:
    """What the spec says of one pool. `most_streams` fit onto a replica by its settings."""

    bounds: Bounds
    most_streams: int


@dataclass(frozen=True, slots=True)
class ModelRules:
    """What the spec says of one model. Seconds: `interval_s` between decisions, `window_s` for half of which
    fewer must have been wanted before any goes (None: as long as two starts), `idle_s` without a request
    after which pools that may have no replica get none. `aim` is the part of the requests that may miss their
    service level. Of a pool no more than `grow` times what it has, and one, start at once, and no more than
    the part `shrink` of it goes."""

    pools: tuple[PoolRules, ...]
    promise: SloTarget
    aim: float = 0.005
    interval_s: float = 15.0
    window_s: float | None = None
    idle_s: float = 300.0
    grow: float = 1.0
    shrink: float = 0.25


@dataclass(frozen=True, slots=True)
class PoolState:
    """What there is of a pool. `stuck`: those of the starting that take far longer than others did. `start_s`
    is what a start takes. `pinned` is a size that somebody asked for."""

    serving: int
    starting: int
    start_s: float
    stuck: int = 0
    pinned: int | None = None

    @property
    def have(self) -> int:
        """Those that serve or will."""
        return self.serving + self.starting


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for one pool. `load` is what there is now, in replicas that it keeps busy, `expected`
    what is foreseen, and `upper` that with its `margin`. `calm`: what is not needed is kept for
    longer. `need` is what that takes; `size` is what there should be of the pool, after every rule in
    `because`."""

    pool: str
    role: Role
    load: float
    expected: float
    upper: float
    predictor: str
    margin: float
    calm: bool
    need: float
    size: int
    have: int
    because: tuple[str, ...]
    capacity: Capacity | None = None
    horizon_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Look:
    """What one decision is made on. `rate`: requests a second, or embeddings at work."""

    interval: Interval
    states: Mapping[str, PoolState]
    rate: float
    horizon_s: float
    now: float


@dataclass(frozen=True, slots=True)
class _Part:
    """What the pools of one role are sized by: what `one` request is, how its forecast is raised, and by how
    many requests a second for what is `late`."""

    role: Role
    measured: list[tuple[Bounds, Capacity]]
    one: TokenLoad
    choice: ForecastChoice
    late: float


@dataclass(slots=True)
class _Pool:
    """`brisk` is how many there would be if nothing were kept for longer: what such a pool would regret is
    known also while this one is calm."""

    rules: PoolRules
    window: DesiredWindow = field(default_factory=DesiredWindow)
    regrets: Regrets = field(default_factory=Regrets)
    brisk: float | None = None
    capacity: Capacity | None = None


@dataclass(slots=True)
class Planner:
    """Of one model. Call `plan` once an interval."""

    rules: ModelRules
    made: Callable[[], Sequence[Predictor]] = predictors
    mix: Mix = field(default_factory=Mix)
    ledger: SloLedger = field(init=False)
    _now: Steady = field(default_factory=lambda: Steady("now", _NOW_S))
    _predictors: list[Corrected] = field(init=False)
    _rehearsals: dict[Role, Backtest] = field(init=False)
    _pools: dict[str, _Pool] = field(init=False)
    _decided: list[Decision] = field(default_factory=list)
    _last_s: float | None = None
    _short: bool = False

    def __post_init__(self) -> None:
        roles = {each.bounds.role for each in self.rules.pools}
        self.ledger = SloLedger(self.rules.aim)
        self._predictors = [Corrected(each) for each in self.made()]
        self._rehearsals = {
            role: Backtest(len(self._predictors), self.ledger, 1 / len(roles)) for role in roles
        }
        self._pools = {each.bounds.name: _Pool(each) for each in self.rules.pools}

    def follow(self, rules: ModelRules) -> bool:
        """Go on by other rules with what was learned of the load; False where they are for other pools."""
        if {each.bounds.name: each.bounds.role for each in rules.pools} != {
            each.bounds.name: each.bounds.role for each in self.rules.pools
        }:
            return False
        self.rules, self.ledger.aim = rules, rules.aim
        for each in rules.pools:
            self._pools[each.bounds.name].rules = each
        return True

    @property
    def _embeds(self) -> bool:
        return all(each.bounds.role is Role.EMBED for each in self.rules.pools)

    def plan(
        self,
        interval: Interval,
        states: Mapping[str, PoolState],
        workers: Sequence[WorkerStats],
        now: float,
    ) -> list[Decision]:
        """Decide for every pool. `workers` are the model's."""
        news, seconds = interval.traffic, interval.seconds
        self.mix.take(interval)
        waking = any(state.starting for state in states.values()) and not any(
            state.serving for state in states.values()
        )
        if news.arrived or news.in_flight or waking or self._last_s is None:
            self._last_s = now
        # A replica asked for at one decision serves a start later; the next decision comes an interval later.
        horizon_s = max(state.start_s for state in states.values()) + self.rules.interval_s
        # Of embeddings it is told how many are at work, and of all else how many come a second.
        rate = float(news.in_flight) if self._embeds else news.arrived / seconds
        self._now.take(rate, seconds)
        for each in self._predictors:
            each.take(rate, seconds, horizon_s)
        self._learn(news, seconds, states)
        self._measure(workers)
        self._short = False
        look = _Look(interval, states, rate, horizon_s, now)
        parts = [part for role in self._rehearsals if (part := self._part(role, look)) is not None]
        # A crowd that one role sees coming reaches the others.
        predicted = self._predicted()
        leads = max((each.choice.predictor for each in parts), key=predicted.__getitem__, default=0)
        found = {each.pool: each for part in parts for each in self._sized(part, look, leads)}
        desired_sizes = [found.get(name) or self._unmeasured(name, look) for name in self._pools]
        self._decided = [self._ruled(each, states[each.pool], now) for each in desired_sizes]
        return self._decided

    def _learn(self, news: Traffic, seconds: float, states: Mapping[str, PoolState]) -> None:
        # Where pools were not as large as was wanted, what was missed says nothing of what is wanted.
        had = all(
            states[each.pool].have >= each.size
            and each.need <= self._pools[each.pool].rules.bounds.most
            and states[each.pool].pinned is None
            for each in self._decided
        )
        missed = news.judged - news.met if had and (self._short or news.waiting) else 0
        self.ledger.take(news.judged, missed, seconds)

    def _measure(self, workers: Sequence[WorkerStats]) -> None:
        """What a replica of each pool can do; what was known stays known while there is none."""
        for name, pool in self._pools.items():
            if self._embeds:
                pool.capacity = seats(pool.rules.most_streams)
                continue
            rates = WorkerRates.of([each for each in workers if each.pool == name and each.serving])
            if rates is not None and self.mix.known:
                pool.capacity = capacity(
                    rates,
                    self.mix,
                    self.rules.promise,
                    pool.rules.bounds.role,
                    most_streams=pool.rules.most_streams,
                )

    def _unmeasured(self, name: str, look: _Look) -> Decision:
        """Nothing has been measured yet: what there is, is the best guess."""
        have = look.states[name].have
        return Decision(
            name, self._pools[name].rules.bounds.role, 0.0, 0.0, 0.0, "nothing", 1.0, False, have, have, have,
            ("nothing has been measured yet",), None, look.horizon_s,
        )  # fmt: skip

    def _part(self, role: Role, look: _Look) -> _Part | None:
        """What the pools of one role are sized by; None while nothing has been measured of them."""
        measured = [
            (each.rules.bounds, each.capacity)
            for each in self._pools.values()
            if each.rules.bounds.role is role and each.capacity is not None
        ]
        if not measured:
            return None
        one = (
            TokenLoad(1.0, 0.0)
            if self._embeds
            else TokenLoad(self.mix.computed_tokens, self.mix.output_tokens)
        )
        first = measured[0][1]
        cost = busy(one, first, role)
        slack_s = self.rules.promise.slack_s(one.prompt_tokens_s / first.prompt_tokens_s)
        choice = self._backtested(role, look, cost, first, slack_s)
        return _Part(role, measured, one, choice, self._late(role, look, cost, slack_s))

    def _sized(self, part: _Part, look: _Look, leads: int) -> list[Decision]:
        """The wishes for the pools of one role, which share its work, by what one predictor foresees."""
        ahead = self._predicted()[leads]
        states, choice, late = look.states, part.choice, part.late
        rate = self._now.ahead(0.0) or 0.0
        busy_now, expected, upper, need = (
            needs(part.one.times(each), part.measured)
            for each in (rate, ahead, choice.margin * ahead, choice.margin * ahead + late)
        )
        found = []
        for bounds, each in part.measured:
            name = bounds.name
            if busy_now[name] - each.spare > _SHORT_OF * max(1, states[name].serving):
                self._short = True
            found.append(
                Decision(
                    pool=name,
                    role=part.role,
                    load=busy_now[name] - (each.spare if busy_now[name] else 0.0),
                    expected=expected[name],
                    upper=upper[name],
                    predictor=self._predictors[leads].name,
                    margin=choice.margin,
                    calm=choice.calm,
                    need=need[name],
                    size=whole(need[name]),
                    have=states[name].have,
                    because=(_WAITS,) if late else (),
                    capacity=each,
                    horizon_s=look.horizon_s,
                )
            )
        return found

    def _predicted(self) -> list[float]:
        """The rate, by predictor. Who says nothing says what the first says."""
        first = self._predictors[0].ahead or 0.0
        return [first if each.ahead is None else each.ahead for each in self._predictors]

    def _backtested(
        self, role: Role, look: _Look, cost: float, first: Capacity, slack_s: float
    ) -> ForecastChoice:
        """Which forecast is followed for a role, and how. A request a second keeps `cost` replicas busy."""
        start_s = max(
            look.states[name].start_s for name, each in self._pools.items() if each.rules.bounds.role is role
        )
        sample = LoadSample(
            seconds=look.interval.seconds,
            load=cost * look.rate,
            predicted=[cost * each for each in self._predicted()],
            requests=float(look.interval.traffic.arrived),
            spare=first.spare,
            start_s=start_s,
            slack_s=slack_s,
            over_s=self._over_s(start_s),
        )
        self._rehearsals[role].take(sample, look.now)
        return self._rehearsals[role].choose()

    def _over_s(self, start_s: float) -> float:
        return STARTS * start_s if self.rules.window_s is None else self.rules.window_s

    def _late(self, role: Role, look: _Look, cost: float, slack_s: float) -> float:
        """Requests a second by which the rate is raised so that what waits is worked off in time."""
        if self._embeds:
            return 0.0
        news = look.interval.traffic
        waiting = float(news.waiting)
        if role is not Role.DECODE:
            waiting = news.waiting_tokens * self.mix.computed_share / max(1.0, self.mix.computed_tokens)
        serving = sum(
            look.states[name].serving for name, each in self._pools.items() if each.rules.bounds.role is role
        )
        if waiting * cost <= PRESSING * slack_s * max(1, serving):
            return 0.0
        return min(waiting / slack_s, _BACKLOG_MOST * (self._now.ahead(0.0) or 0.0))

    def _ruled(self, desired: Decision, state: PoolState, now: float) -> Decision:
        """The wish after every rule."""
        rules, pool = self.rules, self._pools[desired.pool]
        bounds, size, why = pool.rules.bounds, desired.size, list(desired.because)
        idle = self._last_s is not None and now - self._last_s > rules.idle_s
        if idle:
            size = bounds.least
            why.append(f"nobody has asked for the model for {rules.idle_s:.0f} s")
        elif size < 1:
            size = 1
        if size < bounds.least:
            size = bounds.least
            why.append(f"not fewer than scaling.min {bounds.least}")
        if size > bounds.most:
            size = bounds.most
            why.append(f"not more than scaling.max {bounds.most}: the need is {desired.need:.1f}")
        if state.pinned is not None:
            size = min(state.pinned, bounds.most)
            why.append(f"pinned to {state.pinned}")
            if size < state.pinned:
                why.append(f"not more than scaling.max {bounds.most}")
        else:
            size = self._steadied(desired, size, state, why, now)
        return replace(desired, size=size, because=tuple(why))

    def _steadied(self, desired: Decision, size: int, state: PoolState, why: list[str], now: float) -> int:
        rules, pool, have = self.rules, self._pools[desired.pool], state.have
        over_s = self._over_s(state.start_s)
        # What is asked for to work off what waits is not wanted for long.
        calm = pool.regrets.take(min(size, whole(desired.upper)), now, over_s) or desired.calm
        brisk = float(have) if pool.brisk is None else pool.brisk
        restless, many = pool.window.hold(
            np.array([size, size], float),
            np.array([brisk, have], float),
            now,
            over_s=over_s,
            pressing=np.array(2 * [_WAITS in desired.because]),
            calm=np.array([False, calm]),
        )
        if restless < brisk:
            pool.regrets.released(int(restless), now)
        pool.brisk = float(restless)
        # A model that nobody asks for has waited for long enough.
        held = int(many) if size > 0 else 0
        if held > size:
            long = f"the last {CALM * over_s:.0f} s" if calm else f"half of the last {over_s:.0f} s"
            near = have - size <= NEAR * have
            why.append("about as many are there" if near else f"more was wanted within {long}")
        elif held < size:
            why.append("about as many are there")
        if state.stuck and held >= have:
            why.append(f"{state.stuck} do not come up: none is asked for on top")
            held = have
        most = have + max(1, math.ceil(rules.grow * have))
        least = have - max(1, math.floor(rules.shrink * have))
        if held > most:
            why.append(f"no more than {most - have} start at once")
            held = most
        if held < least and held > 0:
            why.append(f"no more than {have - least} go at once")
            held = least
        # Bounds are kept whatever is near.
        return min(pool.rules.bounds.most, max(pool.rules.bounds.least, held))
