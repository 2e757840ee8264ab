"""How many replicas of an engine a rate takes, and what requests then see."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from statistics import fmean

from kvasir.performance.coefficients import Coefficients
from kvasir.performance.speculation import Speculation
from kvasir.performance.step import Limit, accepted_tokens
from kvasir_platform.capacity.engines import EngineOption, MeasuredTransfer
from kvasir_platform.capacity.queueing import (
    DecodeState,
    PrefillState,
    StepCurve,
    both_states,
    decode_state,
    prefill_state,
    step_curve,
)
from kvasir_platform.capacity.traffic import TrafficProfile

MOST_REPLICAS = 1000
TRANSFER_FIXED_S = 0.005
"""Of a hand-off without bytes: messages and a round trip."""
_TAIL = 2.0
"""Standard deviations of the number of streams for which there must be room."""
_LINK_BUSY = 0.7
_MOST_BUSY = 0.85
"""Share of the time in which a replica may compute prompts: above it, waits grow with every error of the
load and of the coefficients."""


class Mode(Enum):
    """How the work is divided."""

    AGGREGATED = "aggregated"
    DISAGGREGATED = "disaggregated"
    EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True)
class ServiceTarget:
    """The SLO: `attainment` of the requests have a first token within `ttft_s`, and on average `itl_s`
    between tokens, both in seconds."""

    ttft_s: float
    itl_s: float
    attainment: float = 0.95


@dataclass(frozen=True)
class SizedEngine:
    """An engine for a load: its curve is computed once."""

    option: EngineOption
    traffic: TrafficProfile
    speculation: Speculation | None = None

    @cached_property
    def curve(self) -> StepCurve:
        """Times of its steps."""
        lookahead = 0 if self.speculation is None else self.speculation.lookahead
        return step_curve(self.option.engine, self.traffic, lookahead=lookahead)

    @cached_property
    def seats(self) -> float:
        """Requests that run at once."""
        return self.option.seats(self.traffic.context)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a stream gets in a step."""
        found = self.speculation
        return 1.0 if found is None else accepted_tokens(found.acceptance, found.lookahead)

    @property
    def limit(self) -> int:
        """The most replicas for which there is hardware."""
        count = self.option.hardware.count
        return MOST_REPLICAS if count is None else min(MOST_REPLICAS, count // self.option.devices)

    def varied(self, coefficients: Coefficients) -> SizedEngine:
        """Return the engine with other coefficients."""
        engine = replace(self.option.engine, coefficients=coefficients)
        return SizedEngine(replace(self.option, engine=engine), self.traffic, self.speculation)

    def has_room(self, streams: float, prompts: float = 0.0) -> bool:
        """Whether such a number of streams on average, and of prompts beside them, has room."""
        return streams + _TAIL * math.sqrt(streams) + prompts <= self.seats


@dataclass(frozen=True)
class Experience:
    """What requests see, from the states of prompts and of streams, which are None if there is more to do
    than the replicas can, and for embeddings. `after_s` is what follows each prompt's prefill until its first
    token, `met` the share of requests that meets the SLO. `room`: memory and links suffice."""

    target: ServiceTarget
    prefill: PrefillState | None
    decode: DecodeState | None
    met: float
    after_s: tuple[float, ...] = ()
    room: bool = True

    @cached_property
    def ttft_s(self) -> float:
        """The TTFT that the target's share of requests does not exceed."""
        if self.prefill is None or not self.room:
            return math.inf
        return self.prefill.quantile(self.target.attainment, self.after_s)

    @cached_property
    def ttft_mean_s(self) -> float:
        """The mean TTFT."""
        return math.inf if self.prefill is None else self.prefill.mean(self.after_s)

    @cached_property
    def itl_s(self) -> float:
        """The mean ITL of a request that the target's share does not exceed."""
        if not self.room:
            return math.inf
        return 0.0 if self.decode is None else self.decode.quantile(self.target.attainment)

    @property
    def itl_mean_s(self) -> float:
        """The mean ITL."""
        return 0.0 if self.decode is None else self.decode.itl_s

    @property
    def busy(self) -> float:
        """The share of the time in which a replica computes prompts."""
        return 1.0 if self.prefill is None else self.prefill.busy

    @property
    def streams(self) -> float:
        """Streams at once on a replica that decodes."""
        return 0.0 if self.decode is None else self.decode.streams

    @property
    def meets(self) -> bool:
        """Whether the SLO is met, and there is room and time to spare."""
        return self.room and self.busy <= _MOST_BUSY and self.met >= self.target.attainment


def _overload(target: ServiceTarget) -> Experience:
    return Experience(target, None, None, 0.0, room=False)


def aggregated(engine: SizedEngine, replicas: int, rate: float, target: ServiceTarget) -> Experience:
    """Return what requests see of replicas that do both parts."""
    prefill, decode = both_states(
        engine.curve, engine.traffic, rate, replicas, tokens_per_step=engine.tokens_per_step
    )
    if prefill.busy >= 1.0:
        return _overload(target)
    room = engine.has_room(decode.streams, 1.0)
    return _experience(prefill, decode, target, (), room=room)


def embedding(engine: SizedEngine, replicas: int, rate: float, target: ServiceTarget) -> Experience:
    """Return what requests see of replicas that compute embeddings: there is no second token."""
    prefill = prefill_state(engine.curve, engine.traffic, rate, replicas)
    if prefill.busy >= 1.0:
        return _overload(target)
    return Experience(target, prefill, None, prefill.within(target.ttft_s))


@dataclass(frozen=True)
class Pair:
    """Pools of prefill and decode. KV moves between their replicas as a profile measured it if both have that
    hardware, else at the rate of their network ports, unless `bytes_per_s` says otherwise."""

    prefill: SizedEngine
    decode: SizedEngine
    bytes_per_s: float = 0.0

    @cached_property
    def measured(self) -> MeasuredTransfer | None:
        """The transfer that was measured, None without such a measurement."""
        one, other = (each.option.hardware for each in (self.prefill, self.decode))
        return one.transfer if one.name == other.name else None

    @cached_property
    def link_bytes_per_s(self) -> float:
        """The rate between two replicas: the ports of the side with fewer devices, as far as engines reach
        their rate."""
        if self.bytes_per_s:
            return self.bytes_per_s
        if self.measured is not None:
            return 1.0 / self.measured.byte_s
        engines = [each.option for each in (self.prefill, self.decode)]
        ports = min(each.devices * each.engine.device.network_bytes_per_s for each in engines)
        return ports * min(each.engine.coefficients.link for each in engines)

    @cached_property
    def moved_bytes(self) -> tuple[float, ...]:
        """KV of each prompt that moves: a decode worker has what is shared already."""
        engine = self.prefill.option.engine
        return tuple(
            engine.context_bytes(each.prompt) * each.computed / each.prompt
            for each in self.prefill.traffic.lengths
        )

    @cached_property
    def transfer_s(self) -> tuple[float, ...]:
        """Seconds of the hand-off of each prompt."""
        fixed_s = TRANSFER_FIXED_S if self.measured is None else self.measured.fixed_s
        return tuple(fixed_s + size / self.link_bytes_per_s for size in self.moved_bytes)

    def decoding(self, replicas: int, rate: float) -> tuple[DecodeState, bool]:
        """Return the state of decode replicas, and whether they and their links have room."""
        decode = self.decode
        state = decode_state(
            decode.curve, decode.traffic, rate, replicas, tokens_per_step=decode.tokens_per_step
        )
        moving = fmean(self.moved_bytes) / self.link_bytes_per_s * rate / replicas
        return state, decode.has_room(state.streams) and moving < _LINK_BUSY


def disaggregated(pair: Pair, replicas: tuple[int, int], rate: float, target: ServiceTarget) -> Experience:
    """Return what requests see of that many prefill and decode replicas."""
    if not all(replicas):
        return _overload(target)
    prefill = prefill_state(pair.prefill.curve, pair.prefill.traffic, rate, replicas[0])
    decode, room = pair.decoding(replicas[1], rate)
    if prefill.busy >= 1.0:
        return _overload(target)
    step = pair.decode.curve.decode(decode.streams + 1.0)
    after = tuple(seconds + step for seconds in pair.transfer_s)
    return _experience(prefill, decode, target, after, room=room)


def _experience(
    prefill: PrefillState,
    decode: DecodeState,
    target: ServiceTarget,
    after: tuple[float, ...],
    *,
    room: bool,
) -> Experience:
    met = prefill.within(target.ttft_s, after) * decode.within(target.itl_s) if room else 0.0
    return Experience(target, prefill, decode, met, after, room)


def decode_limit(engine: SizedEngine, streams: float) -> Limit:
    """Return what limits a step that decodes so many streams."""
    return engine.option.engine.decode(max(1, round(streams)), engine.traffic.context).limit
