"""What sizes the pools of one model should have, and why: the whole of a decision, in words and numbers.

What routers tell becomes work a second; forecasts say how much of it there may be by the time that a replica
asked for now serves, and until one that is let go could be had back; what was measured of the workers says
how many replicas that takes. Bounds, pins, windows and rates of change have the last word, in that order, and
each says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvasir.core.demand import Traffic, WorkerFigures
from kvasir.core.requests import Role
from kvasir_platform.control.scaling.capacity import Capacity, Promise, Rates, capacity, seats
from kvasir_platform.control.scaling.caution import Caution
from kvasir_platform.control.scaling.demand import Interval, Mix
from kvasir_platform.control.scaling.forecast import Forecast, Forecaster, Predictor, predictors
from kvasir_platform.control.scaling.sizes import Bounds, Work, needs, whole
from kvasir_platform.control.scaling.stabilise import Window

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
    """What the spec says of one model. Seconds: `interval_s` between decisions, `window_s` for which fewer
    must have been wanted before any goes, `idle_s` without a request after which pools that may have no
    replica get none. `aim` is the part of the requests that may miss their service level. Of a pool no more
    than `grow` times what it has, and one, start at once, and no more than the part `shrink` of it goes."""

    pools: tuple[PoolRules, ...]
    promise: Promise
    aim: float = 0.005
    interval_s: float = 15.0
    window_s: float = 60.0
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
    """What was decided for one pool. `load` is what there is now, in replicas that it keeps busy, and
    `expected` and `upper` are the highest foreseen, likely and at worst. `need` is what that takes; `size`
    is what there should be of the pool, after every rule in `because`."""

    pool: str
    role: Role
    load: float
    expected: float
    upper: float
    predictor: str
    level: float
    need: float
    size: int
    have: int
    because: tuple[str, ...]
    capacity: Capacity | None = None
    horizon_s: float = 0.0


@dataclass(slots=True)
class _Pool:
    rules: PoolRules
    window: Window
    capacity: Capacity | None = None


@dataclass(slots=True)
class Planner:
    """Of one model. Call `plan` once an interval."""

    rules: ModelRules
    made: Callable[[], Sequence[Predictor]] = predictors
    mix: Mix = field(default_factory=Mix)
    _caution: Caution = field(init=False)
    _prompts: Forecaster = field(init=False)
    _outputs: Forecaster = field(init=False)
    _pools: dict[str, _Pool] = field(init=False)
    _last_s: float | None = None
    _short: bool = False

    def __post_init__(self) -> None:
        rules = self.rules
        slack_s = rules.promise.ttft_s

        def forecaster() -> Forecaster:
            return Forecaster(self.made(), interval_s=rules.interval_s, smooth_s=slack_s)

        self._caution = Caution(rules.aim)
        self._prompts, self._outputs = forecaster(), forecaster()
        self._pools = {each.bounds.name: _Pool(each, Window(rules.window_s)) for each in rules.pools}

    @property
    def _embeds(self) -> bool:
        return all(each.bounds.role is Role.EMBED for each in self.rules.pools)

    @property
    def level(self) -> float:
        """In how many cases of one a forecast must suffice."""
        return self._caution.level

    def plan(
        self,
        interval: Interval,
        states: Mapping[str, PoolState],
        workers: Sequence[WorkerFigures],
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
        work = self._arrived(interval)
        self._prompts.take(work.prompt_tokens_s, seconds, now, horizon_s)
        self._outputs.take(work.output_tokens_s, seconds, now, horizon_s)
        if self._short or news.waiting:
            self._caution.learn(news.judged, news.judged - news.met, seconds)
        else:
            self._caution.learn(news.judged, 0, seconds)
        prompts, outputs = (each.forecast(self.level) for each in (self._prompts, self._outputs))
        self._measure(workers)
        self._short = False
        decisions = self._sized(prompts, outputs, self._backlog(news, prompts, outputs), states, horizon_s)
        return [self._ruled(each, states[each.pool], now) for each in decisions]

    def _arrived(self, interval: Interval) -> Work:
        """The work that came, by what requests have been like."""
        news, seconds = interval.traffic, interval.seconds
        if self._embeds:
            return Work(float(news.in_flight), 0.0)
        prompts = news.arrived * self.mix.computed_tokens / seconds
        return Work(prompts, news.arrived * self.mix.output_tokens / seconds)

    def _backlog(self, news: Traffic, prompts: Forecast, outputs: Forecast) -> Work:
        """The work there is, with what waits worked off within the promised time to first token."""
        waiting_s = self.rules.promise.ttft_s
        tokens = news.waiting_tokens * self.mix.computed_share / waiting_s
        answers = news.waiting * self.mix.output_tokens / waiting_s
        return Work(
            prompts.now + min(tokens, _BACKLOG_MOST * prompts.now),
            outputs.now + min(answers, _BACKLOG_MOST * outputs.now),
        )

    def _measure(self, workers: Sequence[WorkerFigures]) -> None:
        """What a replica of each pool can do; what was known stays known while there is none."""
        for name, pool in self._pools.items():
            if self._embeds:
                pool.capacity = seats(pool.rules.most_streams)
                continue
            rates = Rates.of([each for each in workers if each.pool == name and each.serving])
            if rates is not None and self.mix.known:
                pool.capacity = capacity(
                    rates,
                    self.mix,
                    self.rules.promise,
                    pool.rules.bounds.role,
                    most_streams=pool.rules.most_streams,
                )

    def _sized(
        self,
        prompts: Forecast,
        outputs: Forecast,
        backlog: Work,
        states: Mapping[str, PoolState],
        horizon_s: float,
    ) -> list[Decision]:
        measured = [
            (pool.rules.bounds, pool.capacity) for pool in self._pools.values() if pool.capacity is not None
        ]
        now = needs(Work(prompts.now, outputs.now), measured)
        urgent = needs(backlog, measured)
        likely = needs(Work(prompts.expected, outputs.expected), measured)
        worst = needs(Work(prompts.upper, outputs.upper), measured)
        found = []
        for name, pool in self._pools.items():
            bounds, each, have = pool.rules.bounds, pool.capacity, states[name].have
            forecast = outputs if bounds.role is Role.DECODE else prompts
            if each is None:
                # Nothing has been measured yet: what there is, is the best guess.
                found.append(
                    Decision(
                        name, bounds.role, 0.0, 0.0, 0.0, forecast.predictor, self.level, have, have, have,
                        ("nothing has been measured yet",), None, horizon_s,
                    )
                )  # fmt: skip
                continue
            need = max(worst[name], urgent[name])
            waits = urgent[name] > max(worst[name], now[name])
            if now[name] - each.spare > _SHORT_OF * max(1, states[name].serving):
                self._short = True
            found.append(
                Decision(
                    pool=name,
                    role=bounds.role,
                    load=now[name] - (each.spare if now[name] else 0.0),
                    expected=likely[name],
                    upper=worst[name],
                    predictor=forecast.predictor,
                    level=self.level,
                    need=need,
                    size=whole(need),
                    have=have,
                    because=("what waits is worked off",) if waits else (),
                    capacity=each,
                    horizon_s=horizon_s,
                )
            )
        return found

    def _ruled(self, wish: Decision, state: PoolState, now: float) -> Decision:
        """The wish after every rule."""
        rules, pool = self.rules, self._pools[wish.pool]
        bounds, size, why = pool.rules.bounds, wish.size, list(wish.because)
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
            why.append(f"not more than scaling.max {bounds.most}: the need is {wish.need:.1f}")
        if state.pinned is not None:
            size = state.pinned
            why.append(f"pinned to {state.pinned}")
        else:
            size = self._steadied(pool, size, state, why, now)
        return replace(wish, size=size, because=tuple(why))

    def _steadied(self, pool: _Pool, size: int, state: PoolState, why: list[str], now: float) -> int:
        rules, have = self.rules, state.have
        held = pool.window.hold(size, have, now)
        if held > size:
            why.append(f"more was wanted within the last {pool.window.seconds:.0f} s")
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
        if held < have:
            pool.window.released(held, now)
        return held
