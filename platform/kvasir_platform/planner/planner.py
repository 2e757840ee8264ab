"""Sizes of the pools of one model, and the reasons: the whole of a decision, in words and numbers.

Reports of routers become a request rate; forecasts give the rate by the time that a replica requested now
serves; the mix of requests and the measured rates of workers give the number of replicas for it; and
backtests on the observed load give the margin. Bounds, pins, windows and rates of change apply last, in that
order, and each adds its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvasir.core.demand import Traffic, WorkerStats
from kvasir.core.requests import Role
from kvasir_platform.planner.backtest import PRESSING, Backtest, ForecastChoice, LoadSample, SloLedger
from kvasir_platform.planner.capacity import Capacity, SloTarget, SteadyRates, WorkerRates, capacity, seats
from kvasir_platform.planner.demand import Interval, Mix
from kvasir_platform.planner.forecast import Corrected, Predictor, Steady, predictors
from kvasir_platform.planner.sizes import Bounds, TokenLoad, busy, needs, whole
from kvasir_platform.planner.stabilize import CALM, NEAR, STARTS, DesiredWindow, Regrets

_WAITS = "includes queued work"
_NOW_S = 30.0
"""A shorter excursion of the load is noise."""
_SHORT_OF = 0.9
"""Utilization above which late requests are attributed to too few workers."""
_BACKLOG_MOST = 1.0
"""Maximum load that waiting work adds, relative to the load itself: a pool that cannot start must not request
ever more."""


@dataclass(frozen=True, slots=True)
class PoolRules:
    """The spec's bounds of one pool. `most_streams` is the number that a replica's settings allow."""

    bounds: Bounds
    most_streams: int


@dataclass(frozen=True, slots=True)
class ModelRules:
    """The spec's rules of one model. Seconds: `interval_s` between decisions; `window_s`, for half of which
    fewer replicas must have been desired before any is removed (None: two starts); `idle_s` without a request
    after which pools that may have no replica get none. `aim` is the share of requests that may miss their
    SLO. A pool starts at most one more than `grow` times its size at once, and removes at most the share
    `shrink` of it."""

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
    """The replicas of a pool. `stuck`: starting ones that take far longer than earlier starts. `start_s` is
    the duration of a start. `pinned` is a size that a user requested."""

    serving: int
    starting: int
    start_s: float
    stuck: int = 0
    pinned: int | None = None

    @property
    def have(self) -> int:
        """Replicas that serve or will."""
        return self.serving + self.starting


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision for one pool. `load` is the present load, in busy replicas, `expected` the forecast, and
    `upper` the forecast with its `margin`. `calm`: surplus replicas are kept for longer. `need` is the number
    for that load; `size` is the desired size after every rule in `because`."""

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
    """The inputs of one decision. `rate`: requests per second, or concurrent embeddings."""

    interval: Interval
    states: Mapping[str, PoolState]
    rate: float
    horizon_s: float
    now: float


@dataclass(frozen=True, slots=True)
class _Part:
    """The inputs for the pools of one role: the work of `one` request, how its forecast is raised, and the
    requests per second that are added for `late` work."""

    role: Role
    measured: list[tuple[Bounds, Capacity]]
    one: TokenLoad
    choice: ForecastChoice
    late: float


@dataclass(slots=True)
class _Pool:
    """`brisk` is the size without calm keeping: it shows what such a pool would regret, also while this one
    is calm."""

    rules: PoolRules
    window: DesiredWindow = field(default_factory=DesiredWindow)
    regrets: Regrets = field(default_factory=Regrets)
    brisk: float | None = None
    rates: SteadyRates = field(default_factory=SteadyRates)
    capacity: Capacity | None = None


@dataclass(slots=True)
class Planner:
    """The planner of one model. Call `plan` once an interval."""

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
        """Continue with other rules and the learned load; False if they are for other pools."""
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
        # A replica requested at one decision serves a start later; the next decision is an interval later.
        horizon_s = max(state.start_s for state in states.values()) + self.rules.interval_s
        # For embeddings the reports give the concurrent number, for others the rate.
        rate = float(news.in_flight) if self._embeds else news.arrived / seconds
        self._now.take(rate, seconds)
        for each in self._predictors:
            each.take(rate, seconds, horizon_s)
        self._learn(news, seconds, states)
        self._measure(workers, seconds)
        self._short = False
        look = _Look(interval, states, rate, horizon_s, now)
        parts = [part for role in self._rehearsals if (part := self._part(role, look)) is not None]
        # A surge that one role sees first will reach the others.
        predicted = self._predicted()
        leads = max((each.choice.predictor for each in parts), key=predicted.__getitem__, default=0)
        found = {each.pool: each for part in parts for each in self._sized(part, look, leads)}
        desired_sizes = [found.get(name) or self._unmeasured(name, look) for name in self._pools]
        self._decided = [self._ruled(each, states[each.pool], now) for each in desired_sizes]
        return self._decided

    def _learn(self, news: Traffic, seconds: float, states: Mapping[str, PoolState]) -> None:
        # Where pools were smaller than desired, misses do not judge the desired size.
        had = all(
            states[each.pool].have >= each.size
            and each.need <= self._pools[each.pool].rules.bounds.most
            and states[each.pool].pinned is None
            for each in self._decided
        )
        missed = news.judged - news.met if had and (self._short or news.waiting) else 0
        self.ledger.take(news.judged, missed, seconds)

    def _measure(self, workers: Sequence[WorkerStats], seconds: float) -> None:
        """Return the capacity of a replica of each pool; without replicas, the last known one."""
        for name, pool in self._pools.items():
            if self._embeds:
                pool.capacity = seats(pool.rules.most_streams)
                continue
            rates = WorkerRates.of([each for each in workers if each.pool == name and each.serving])
            if rates is not None and self.mix.known:
                pool.capacity = capacity(
                    pool.rates.take(rates, seconds),
                    self.mix,
                    self.rules.promise,
                    pool.rules.bounds.role,
                    most_streams=pool.rules.most_streams,
                )

    def _unmeasured(self, name: str, look: _Look) -> Decision:
        """Keep the present size while nothing has been measured."""
        have = look.states[name].have
        return Decision(
            name, self._pools[name].rules.bounds.role, 0.0, 0.0, 0.0, "nothing", 1.0, False, have, have, have,
            ("nothing is measured yet",), None, look.horizon_s,
        )  # fmt: skip

    def _part(self, role: Role, look: _Look) -> _Part | None:
        """Return the inputs for the pools of one role; None while nothing has been measured of them."""
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
        """Return the desired sizes of the pools of one role, which share its work, by one predictor's
        forecast."""
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
        """Return the rate by predictor. A predictor without a forecast uses the first one's."""
        first = self._predictors[0].ahead or 0.0
        return [first if each.ahead is None else each.ahead for each in self._predictors]

    def _backtested(
        self, role: Role, look: _Look, cost: float, first: Capacity, slack_s: float
    ) -> ForecastChoice:
        """Return the forecast choice of a role. A request per second keeps `cost` replicas busy."""
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
        """Return the requests per second to add so that waiting work is worked off in time."""
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
        """Return the desired size after every rule."""
        rules, pool = self.rules, self._pools[desired.pool]
        bounds, size, why = pool.rules.bounds, desired.size, list(desired.because)
        idle = self._last_s is not None and now - self._last_s > rules.idle_s
        if idle:
            size = bounds.least
            why.append(f"no request for the model for {rules.idle_s:.0f} s")
        elif size < 1:
            size = 1
        if size < bounds.least:
            size = bounds.least
            why.append(f"raised to scaling.min {bounds.least}")
        if size > bounds.most:
            size = bounds.most
            why.append(f"limited to scaling.max {bounds.most}: the need is {desired.need:.1f}")
        if state.pinned is not None:
            size = min(state.pinned, bounds.most)
            why.append(f"pinned to {state.pinned}")
            if size < state.pinned:
                why.append(f"limited to scaling.max {bounds.most}")
        else:
            size = self._steadied(desired, size, state, why, now)
        return replace(desired, size=size, because=tuple(why))

    def _steadied(self, desired: Decision, size: int, state: PoolState, why: list[str], now: float) -> int:
        rules, pool, have = self.rules, self._pools[desired.pool], state.have
        over_s = self._over_s(state.start_s)
        # The replicas that work off waiting requests are needed only briefly.
        calm = pool.regrets.take(min(size, whole(desired.upper)), now, over_s) or desired.calm
        brisk = float(have) if pool.brisk is None else pool.brisk
        # Where a rule has changed the size, that is needed.
        need = size if size != desired.size else min(size, desired.need)
        restless, many = pool.window.hold(
            np.array([need, need], float),
            np.array([brisk, have], float),
            now,
            over_s=over_s,
            pressing=np.array(2 * [_WAITS in desired.because]),
            calm=np.array([False, calm]),
        )
        if restless < brisk:
            pool.regrets.released(int(restless), now)
        pool.brisk = float(restless)
        # An idle model has already waited for `idle_s`: no window applies.
        held = int(many) if size > 0 else 0
        if held > size:
            long = f"the last {CALM * over_s:.0f} s" if calm else f"half of the last {over_s:.0f} s"
            near = have - size <= NEAR * have
            why.append(
                "the present size is within tolerance" if near else f"a larger size was desired within {long}"
            )
        elif held < size:
            why.append("the present size is within tolerance")
        if state.stuck and held >= have:
            why.append(f"{state.stuck} start too slowly: no more are requested")
            held = have
        most = have + max(1, math.ceil(rules.grow * have))
        least = have - max(1, math.floor(rules.shrink * have))
        if held > most:
            why.append(f"at most {most - have} start at once")
            held = most
        if held < least and held > 0:
            why.append(f"at most {have - least} are removed at once")
            held = least
        # Bounds apply also to sizes that are near.
        return min(pool.rules.bounds.most, max(pool.rules.bounds.least, held))
