"""The queue in front of engines: waits, and the pace at which streams go on, for a rate of requests.

An engine that does both parts of the work runs prompts one after the other, in chunks, and each step with a
chunk also gives every stream a token. At `rate` requests per second for a replica, with prompts that take s
seconds and m steps each, and pure decode steps of d(n) seconds with n streams:

    busy  = rate s                                share of the time in which a prompt is computed
    ITL   = 1 / (rate m + (1 - busy) / d(n))      seconds between two tokens of a stream
    n     = rate (output - 1) ITL                 streams at once, by Little's law

s grows with n, because streams are part of the same steps, so that these have a fixed point, which iteration
finds. Prompts wait as in a queue with k servers: the probability of a wait is Erlang's C (Kleinrock, Queueing
Systems I, 3.5); its mean is that of exponential service times (1 + variation) / 2 (Allen and Cunneen, as in
Whitt, Approximations for the GI/G/m Queue, 1993); and a wait, if there is one, is exponential. A part of
the wait is that of a queue for each replica.
`tests/simulation/test_capacity_against_replay.py` compares all of it with the simulator.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from kvasir.performance.step import EngineModel, PromptChunk, StepWork
from kvasir_platform.capacity.traffic import TrafficProfile

_ROUNDS = 60
_ROOT_HALF = math.sqrt(0.5)
_MOST_SERVERS = 4096
_NEGLIGIBLE = 1e-30
"""Of a probability."""
_OWN_QUEUE = 0.12
"""How far waits are from those of one queue for all replicas towards those of a queue for each: a router
places a request when it arrives, by what it expects. Chosen to agree with the simulator."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait in seconds: `chance` that there is one, and its mean if there is. An overloaded queue has an
    infinite mean."""

    chance: float
    mean_s: float


OVERLOADED = Wait(1.0, math.inf)


def erlang_c(servers: int, offered: float) -> float:
    """Return the probability that one who arrives has to wait, with `offered` servers busy on average."""
    if offered >= servers:
        return 1.0
    blocked = 1.0
    for number in range(1, servers + 1):
        passed_on = offered * blocked
        blocked = passed_on / (number + passed_on)
        if blocked < _NEGLIGIBLE:
            # It only falls from here on.
            return 0.0
    busy = offered / servers
    return blocked / (1.0 - busy + busy * blocked)


def wait_of(
    servers: int, rate: float, service_s: float, service_variation: float, arrival_variation: float
) -> Wait:
    """Return the wait in front of `servers` with `rate` arrivals per second in total. Variations are squared
    coefficients."""
    offered = rate * service_s
    if offered >= servers:
        return OVERLOADED
    shape = (arrival_variation + service_variation) / 2
    chance = erlang_c(min(servers, _MOST_SERVERS), offered)
    mean = chance * service_s / (servers - offered) * shape
    # With one server for each, a queue of its own.
    busy = offered / servers
    alone = busy * service_s / (1.0 - busy) * shape
    chance += _OWN_QUEUE * (busy - chance)
    mean += _OWN_QUEUE * (alone - mean)
    return Wait(chance, mean / chance if chance else 0.0)


@dataclass(frozen=True, slots=True)
class StepCurve:
    """Times of an engine's steps by the number of streams, for one load. `alone_s` has the time of each
    prompt on an idle engine, `chunks` the steps that it takes."""

    streams: tuple[float, ...]
    decode_s: tuple[float, ...]
    added_s: tuple[float, ...]
    alone_s: tuple[float, ...]
    chunks: tuple[float, ...]

    def decode(self, streams: float) -> float:
        """Return the time of a step that only decodes."""
        return _between(self.streams, self.decode_s, streams)

    def added(self, streams: float) -> float:
        """Return what streams add to a step with a chunk of a prompt."""
        return _between(self.streams, self.added_s, streams)

    def service(self, streams: float) -> list[float]:
        """Return the time of each prompt beside `streams` streams."""
        added = self.added(streams)
        return [alone + chunks * added for alone, chunks in zip(self.alone_s, self.chunks, strict=True)]


def _between(points: Sequence[float], values: Sequence[float], at: float) -> float:
    """Interpolate, and beyond the last point go on with the same slope."""
    place = min(max(1, bisect_right(points, at)), len(points) - 1)
    left, right = points[place - 1], points[place]
    return values[place - 1] + (values[place] - values[place - 1]) * (at - left) / (right - left)


def step_curve(engine: EngineModel, traffic: TrafficProfile, *, lookahead: int = 0) -> StepCurve:
    """Return the curve of `engine` for the prompts and contexts of `traffic`."""
    most = engine.shape.max_num_seqs
    grid = [0.0, 1.0]
    while grid[-1] < most:
        grid.append(min(float(most), grid[-1] * 2))
    chunk = engine.shape.max_num_batched_tokens
    typical = min(traffic.computed, chunk / 2)
    behind = traffic.cached + (traffic.computed - typical) / 2
    alone = engine.step(StepWork((PromptChunk(round(typical), round(behind)),))).seconds

    def mixed(streams: float) -> float:
        prompts = (PromptChunk(round(typical), round(behind)),)
        return engine.step(StepWork(prompts, round(streams), traffic.context, lookahead)).seconds

    def decode(streams: float) -> float:
        return engine.decode(max(1, round(streams)), traffic.context, lookahead=lookahead).seconds

    return StepCurve(
        streams=tuple(grid),
        decode_s=tuple(decode(streams) for streams in grid),
        added_s=tuple(max(0.0, mixed(streams) - alone) for streams in grid),
        alone_s=tuple(engine.prefill_s(round(each.prompt), round(each.cached)) for each in traffic.lengths),
        chunks=tuple(max(1.0, each.computed / chunk) for each in traffic.lengths),
    )


@dataclass(frozen=True, slots=True)
class PrefillState:
    """Prompts in front of a pool: the time of each in `service_s`, its wait, and the share of the time in
    which a replica computes one."""

    service_s: tuple[float, ...]
    wait: Wait
    busy: float

    def within(self, seconds: float, beside: Sequence[float] = ()) -> float:
        """Return the probability that a prompt is done within `seconds`; `beside` is what each takes after
        that."""
        wait, late = self.wait, 0.0
        if math.isinf(wait.mean_s):
            return 0.0
        pace = -1.0 / wait.mean_s if wait.mean_s else -math.inf
        extra = beside or (0.0,) * len(self.service_s)
        for service, more in zip(self.service_s, extra, strict=True):
            left = seconds - service - more
            late += 1.0 if left < 0.0 else wait.chance * math.exp(pace * left) if wait.mean_s else 0.0
        return 1.0 - late / len(self.service_s)

    def quantile(self, part: float, beside: Sequence[float] = ()) -> float:
        """Return the seconds within which `part` of the prompts are done; infinite if overloaded."""
        if math.isinf(self.wait.mean_s):
            return math.inf
        low, high = 0.0, max(self.service_s) + max(beside, default=0.0) + 1e-6
        while self.within(high, beside) < part:
            low, high = high, 2 * high
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.within(middle, beside) < part else (low, middle)
        return high

    def mean(self, beside: Sequence[float] = ()) -> float:
        """Return the mean seconds until a prompt is done."""
        after = fmean(beside) if beside else 0.0
        return fmean(self.service_s) + self.wait.chance * self.wait.mean_s + after


@dataclass(frozen=True, slots=True)
class DecodeState:
    """Streams of one replica: `streams` at once on average, `itl_s` between tokens, with a standard deviation
    among requests of `deviations` for each length of output."""

    streams: float
    itl_s: float
    deviations: tuple[float, ...]

    def within(self, seconds: float) -> float:
        """Return the probability that the mean ITL of a request is at most `seconds`."""
        left, sure, within = seconds - self.itl_s, float(self.itl_s <= seconds), 0.0
        for each in self.deviations:
            within += (1.0 + math.erf(left / each * _ROOT_HALF)) / 2 if each > 0.0 else sure
        return within / len(self.deviations)

    def quantile(self, part: float) -> float:
        """Return the mean ITL that `part` of the requests do not exceed."""
        low, high = self.itl_s, self.itl_s + 6 * max(self.deviations) + 1e-9
        if self.within(low) >= part:
            return low
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if self.within(middle) < part else (low, middle)
        return high


def both_states(
    curve: StepCurve, traffic: TrafficProfile, rate: float, replicas: int, *, tokens_per_step: float = 1.0
) -> tuple[PrefillState, DecodeState]:
    """Return the state of `replicas` replicas that do both parts of the work, at `rate` requests per second
    in total. `tokens_per_step` is more than 1 with speculation."""
    each_rate = rate / replicas
    gaps = max(0.0, traffic.output - 1.0) / tokens_per_step
    streams, pace, service, busy = 0.0, curve.decode(1.0), list(curve.alone_s), 0.0
    for _ in range(_ROUNDS):
        service = curve.service(streams)
        mean = fmean(service)
        busy = each_rate * mean
        if busy >= 1.0:
            break
        steps = each_rate * fmean(curve.chunks) + (1.0 - busy) / curve.decode(streams + 1.0)
        pace = 1.0 / steps
        new = each_rate * gaps * pace
        if abs(new - streams) <= 1e-4 * (1.0 + streams):
            break
        streams = (streams + new) / 2
        if streams > _MOST_SERVERS:
            break
    wait = wait_of(replicas, rate, fmean(service), variation(service), traffic.burstiness)
    delay = max(0.0, fmean(service) - fmean(curve.chunks) * curve.decode(streams + 1.0))
    stops = _Stops(each_rate, delay, variation(service), _clustering(busy, replicas))
    spread = _deviations(curve, traffic, streams, pace / tokens_per_step, stops)
    return (
        PrefillState(tuple(service), wait, busy),
        DecodeState(streams, pace / tokens_per_step, spread),
    )


@dataclass(frozen=True, slots=True)
class _Stops:
    """Prompts that stop a stream: `rate` per second, each for `seconds` with a squared `variation`.
    `clustering` is the variance of their number over that of a Poisson process."""

    rate: float = 0.0
    seconds: float = 0.0
    variation: float = 0.0
    clustering: float = 1.0


def _clustering(busy: float, replicas: int) -> float:
    """A replica computes prompts in busy periods, whose number of customers varies the more the busier it is
    (Kleinrock, Queueing Systems I, 5.9). Routers spread them over several replicas, which evens it out."""
    return 1.0 + (1.0 / max(0.05, 1.0 - busy) ** 2 - 1.0) / replicas


def _deviations(
    curve: StepCurve, traffic: TrafficProfile, streams: float, itl_s: float, stops: _Stops
) -> tuple[float, ...]:
    """Standard deviations of the mean ITL: streams beside it come and go, and prompts stop it, as many as a
    Poisson process has in its life."""
    slope = curve.decode(streams + 2.0) - curve.decode(streams + 1.0)
    found = []
    for each in traffic.lengths:
        tokens = max(1.0, each.output - 1.0)
        stopped = stops.rate * tokens * itl_s * stops.seconds**2 * (1.0 + stops.variation) / tokens**2
        stopped *= stops.clustering
        found.append(math.sqrt(slope**2 * max(0.0, streams) + stopped))
    return tuple(found)


def prefill_state(curve: StepCurve, traffic: TrafficProfile, rate: float, replicas: int) -> PrefillState:
    """Return the state of replicas that only compute prompts."""
    service = curve.alone_s
    wait = wait_of(replicas, rate, fmean(service), variation(service), traffic.burstiness)
    return PrefillState(service, wait, min(1.0, rate * fmean(service) / replicas))


def decode_state(
    curve: StepCurve, traffic: TrafficProfile, rate: float, replicas: int, *, tokens_per_step: float = 1.0
) -> DecodeState:
    """Return the state of replicas that only decode."""
    gaps = max(0.0, traffic.output - 1.0) / tokens_per_step
    streams, pace = 0.0, curve.decode(1.0)
    for _ in range(_ROUNDS):
        pace = curve.decode(streams + 1.0)
        new = rate / replicas * gaps * pace
        if abs(new - streams) <= 1e-4 * (1.0 + streams) or new > _MOST_SERVERS:
            streams = new
            break
        streams = (streams + new) / 2
    spread = _deviations(curve, traffic, streams, pace / tokens_per_step, _Stops())
    return DecodeState(streams, pace / tokens_per_step, spread)


def variation(values: Sequence[float]) -> float:
    """Return the squared coefficient of variation."""
    mean = sum(values) / len(values)
    return sum((value / mean - 1.0) ** 2 for value in values) / len(values) if mean else 0.0
