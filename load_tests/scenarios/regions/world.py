"""The regions, what lies between them, and what happens in a day."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from kvasir.hardware.offers import catalogue
from kvasir.sizing.shape import EngineShape
from kvasir_platform.capacity.engines import engine_option, gpu_choice
from kvasir_platform.capacity.models import known_model
from kvasir_platform.cli.sim.read import replica_of
from kvasir_platform.sim.engine.options import BatchOptions
from kvasir_platform.sim.scaling.days import DAY_S, Day, arrivals, crowds

MODEL = "llama-3.1-70b"
GPU, GPUS = "A100", 4
SEATS = 64
PROMISED_TTFT_S, PROMISED_ITL_S = 8.0, 0.3
LEAST, MOST = 0.2, 1.25
"""Requests per second of a region, at four in the morning and at four in the afternoon, before bursts."""
BURSTS = 5
PROMPT_TOKENS, OUTPUT_TOKENS = (8500.0, 0.3, 16_000), (220.0, 0.6, 800)
"""Median, spread of the logarithm, and maximum."""
BEGIN_REPLICAS, MOST_REPLICAS = 6, 20
"""Replicas of a region at midnight, and at most."""
RESIDENT_SHARE, METERED_SHARE = 0.3, 0.1
METERED_PER_MIN = 160_000
"""Tokens per minute of a tenant whose clients are in all regions."""


@dataclass(frozen=True, slots=True)
class SimRegion:
    """`price` multiplies the list price of a replica. Local time is `hours` ahead of UTC. Tenants with data
    residency may use the regions of the same `area` only."""

    name: str
    hours: float
    price: float
    area: str


REGIONS = (
    SimRegion("us-west", -8, 1.10, "us"),
    SimRegion("us-east", -5, 1.00, "us"),
    SimRegion("eu-west", 0, 1.20, "eu"),
    SimRegion("eu-north", 1, 0.80, "eu"),
    SimRegion("ap-northeast", 9, 1.35, "ap"),
)
RTT_MS = (
    (0, 65, 135, 160, 105),
    (65, 0, 80, 105, 155),
    (135, 80, 0, 35, 210),
    (160, 105, 35, 0, 245),
    (105, 155, 210, 245, 0),
)
HOME = 1
"""The home cell of the metered tenant."""


@dataclass(frozen=True, slots=True)
class Outage:
    """From `begin_s` to `end_s`, the regions in `apart` do not exchange anything with the others; with `lost`
    they do not exist at all."""

    apart: frozenset[int]
    begin_s: float
    end_s: float
    lost: bool = False

    def during(self, now: float) -> bool:
        """Whether it lasts at that time."""
        return self.begin_s <= now < self.end_s


@dataclass(frozen=True, slots=True)
class World:
    """A day, or the begin of one."""

    length_s: float = DAY_S
    outages: tuple[Outage, ...] = (
        Outage(frozenset((3,)), 13 * 3600.0, 14 * 3600.0, lost=True),
        Outage(frozenset((4,)), 19 * 3600.0, 20 * 3600.0),
    )

    def lost(self, region: int, now: float) -> bool:
        """Whether a region does not exist."""
        return any(each.lost and region in each.apart and each.during(now) for each in self.outages)

    def reaches(self, first: int, second: int, now: float) -> bool:
        """Whether messages get from the one region to the other."""
        if first == second:
            return not self.lost(first, now)
        return not any(
            each.during(now)
            and (
                (each.lost and not each.apart.isdisjoint((first, second)))
                or (first in each.apart) != (second in each.apart)
            )
            for each in self.outages
        )


def rtt_s(first: int, second: int) -> float:
    """Return the round trip between two regions."""
    return RTT_MS[first][second] / 1000.0


@dataclass(frozen=True, slots=True)
class ReplicaTimes:
    """The times of a replica by the performance model. A prompt's time is interpolated in `prompts`; a step
    takes `fixed_s`, and more for each stream and each token of KV. `dollars_per_hour` is the list price."""

    prompts: tuple[float, ...]
    prefill_s: tuple[float, ...]
    fixed_s: float
    stream_s: float
    kv_token_s: float
    kv_tokens: int
    dollars_per_hour: float

    def prefill(self, tokens: np.ndarray) -> np.ndarray:
        """Return the time of each prompt."""
        return np.asarray(np.interp(tokens, self.prompts, self.prefill_s))

    def step_s(self, streams: int, kv: float) -> float:
        """Return the time of a step with that many streams, and tokens of KV of all of them."""
        return self.fixed_s + self.stream_s * streams + self.kv_token_s * kv


@cache
def replica_times() -> ReplicaTimes:
    """Return the times of the model on its GPUs."""
    known = known_model(MODEL)
    gpu = next(each for each in catalogue() if each.name == GPU)
    assert known is not None
    shape = EngineShape(max_model_len=32_768, max_num_seqs=SEATS, max_num_batched_tokens=8192, tensor=GPUS)
    option = engine_option(known, gpu_choice(gpu), shape)
    replica = replica_of(option, BatchOptions(), 64)
    model = replica.model
    grid = tuple(float(tokens) for tokens in (1, 512, 1024, 2048, 4096, 8192, 16_384, 32_000))
    one, many = model.decode(1, 4000.0).seconds, model.decode(SEATS, 4000.0).seconds
    longer = model.decode(SEATS, 8000.0).seconds
    kv_token_s = (longer - many) / (SEATS * 4000.0)
    stream_s = max(0.0, (many - one) / (SEATS - 1) - kv_token_s * 4000.0)
    return ReplicaTimes(
        grid,
        tuple(model.prefill_s(round(tokens)) for tokens in grid),
        one - stream_s - kv_token_s * 4000.0,
        stream_s,
        kv_token_s,
        replica.memory.blocks * replica.memory.block_tokens,
        option.dollars_per_hour,
    )


@dataclass(frozen=True, slots=True)
class SimTraffic:
    """Requests in the order of arrival: time, region, tokens of prompt and output, seconds of the prompt, and
    whether a request is of a tenant with data residency, or of the metered one."""

    at_s: Sequence[float]
    region: Sequence[int]
    prompt: Sequence[int]
    output: Sequence[int]
    prefill_s: Sequence[float]
    resident: Sequence[bool]
    metered: Sequence[bool]

    def __len__(self) -> int:
        return len(self.at_s)


def traffic_of(world: World, seed: int) -> SimTraffic:
    """Return the day's requests. Each region has the same wave at its own time of day, and bursts of its
    own."""
    rng = np.random.default_rng(seed)
    times, regions = [], []
    for number, region in enumerate(REGIONS):
        day = Day(LEAST, MOST, 0.15, crowds(BURSTS, rng))
        rates = np.roll(day.rates(rng), round(-region.hours * 3600.0))[: int(world.length_s)]
        found = arrivals(rates, rng)
        times.append(found)
        regions.append(np.full(len(found), number))
    at = np.concatenate(times)
    order = np.argsort(at, kind="stable")
    count = len(at)
    prompt, output = (_lengths(rng, count, *each) for each in (PROMPT_TOKENS, OUTPUT_TOKENS))
    drawn = rng.random(count)
    return SimTraffic(
        at[order].tolist(),
        np.concatenate(regions)[order].tolist(),
        prompt.tolist(),
        output.tolist(),
        replica_times().prefill(prompt).tolist(),
        (drawn < RESIDENT_SHARE).tolist(),
        (drawn > 1.0 - METERED_SHARE).tolist(),
    )


def _lengths(rng: np.random.Generator, count: int, middle: float, spread: float, most: int) -> np.ndarray:
    return np.clip(np.exp(rng.normal(np.log(middle), spread, count)), 16, most).astype(int)
