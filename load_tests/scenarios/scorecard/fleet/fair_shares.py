"""Effect on other tenants of a tenant that sends ten times its share, and of prompts of 100,000 tokens.

Real processes with simulated engines that are slowed down by a factor. All admission times and SLO times are
scaled by the same factor, so that delays of this machine are comparatively small.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

from tests.kit.lab.fleet import Fleet, Layout
from tests.kit.lab.load import OpenLoop, asks, quantile
from tests.kit.lab.stream import Ask, Outcome, open_stream

from kvasir.config.spec.deployment import (
    AdmissionSpec,
    Deployment,
    EngineSpec,
    GatewaySpec,
    ModelSpec,
    PoolSpec,
    RoutingSpec,
    SimSpec,
    SloSpec,
    TenancySpec,
    TenantSpec,
)
from kvasir.core.requests import Role
from kvasir_platform.gateway.identity.keys import KeyEntry, hash_of, key_line, new_key
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial, exactness, exercise

TENANTS = ("victim", "greedy", "operator")
PREFILL_TOKENS_PER_S = 20_000.0
CHUNK_TOKENS = 2048
MEAN_TOKENS = 1000
OUTPUT_TOKENS = 8
KV_TOKENS = 256_000
_KV_TOKEN_BYTES = 2048
_GRACE_S = 240.0


@dataclass(frozen=True, slots=True)
class Size:
    """All times are multiplied by `slower`. The victim sends `victim` times the capacity. A pair is a window
    without the other load and one with it, with the same arrivals and lengths."""

    prefill: int = 8
    decode: int = 2
    slower: float = 8.0
    victim: float = 0.2
    greedy: float = 10.0
    long_tokens: int = 100_000
    long_prompts: int = 2
    window_s: float = 60.0
    pairs: int = 2

    @property
    def capacity(self) -> float:
        """Prompts of mean length that the fleet can prefill per second."""
        return self.prefill * PREFILL_TOKENS_PER_S / self.slower / MEAN_TOKENS


@dataclass(slots=True)
class Crowd:
    """The fleet, the tenants' API keys, and the trial's size."""

    trial: Trial
    fleet: Fleet
    keys: dict[str, str]
    size: Size

    def headers(self, tenant: str, slo: str = "default") -> tuple[str, ...]:
        """Header lines of a request."""
        return (f"Authorization: Bearer {self.keys[tenant]}", f"x-kvasir-slo: {slo}")

    def load(self, tenant: str, rate: float, salt: int, tokens: int) -> OpenLoop:
        """Requests of a tenant at random times. `salt` seeds times and lengths, `tokens` seeds the tokens."""
        rng, content = self.trial.rng(salt), self.trial.rng(tokens)
        work = varied(rng, content, MEAN_TOKENS, self.headers(tenant))
        arrivals = self.trial.rng(salt + 1)
        return OpenLoop([self.fleet.address], work, rate, clock=self.trial.clock, rng=arrivals)


def deployment(folder: str, size: Size) -> Deployment:
    """Separate prefill and decode pools, tenants of equal weight, and an SLO class with a long wait."""
    k = size.slower
    sim = SimSpec(
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S / k,
        decode_step_s=0.004 * k,
        decode_step_per_seq_s=0.0002 * k,
    )
    spec = EngineSpec(
        kind="sim",
        block_size=16,
        kv_cache_bytes=KV_TOKENS * _KV_TOKEN_BYTES,
        max_num_batched_tokens=int(CHUNK_TOKENS / k),
        sim=sim,
    )
    usual, routing = AdmissionSpec(), RoutingSpec()
    return Deployment(
        name="scorecard",
        model=ModelSpec(max_model_len=2 * size.long_tokens),
        pools=(
            PoolSpec(name="prefill", role=Role.PREFILL, engine=spec),
            PoolSpec(name="decode", role=Role.DECODE, engine=spec),
        ),
        slo=(
            SloSpec(name="default", ttft_s=1.0 * k, itl_s=0.1 * k),
            SloSpec(name="patient", ttft_s=60.0 * k, itl_s=1.0 * k),
        ),
        routing=RoutingSpec(queue_timeout_s=routing.queue_timeout_s * k),
        admission=AdmissionSpec(
            prefill_ahead_s=usual.prefill_ahead_s * k, shared_ahead_s=usual.shared_ahead_s * k
        ),
        tenancy=TenancySpec(
            tenants=tuple(TenantSpec(name=name, operator=name == "operator") for name in TENANTS)
        ),
        gateway=GatewaySpec(api_keys_file=folder),
    )


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure both effects."""
    keys = {tenant: new_key() for tenant in TENANTS}
    file = trial.folder / "keys"
    file.write_text("\n".join(key_line(hash_of(key), KeyEntry(tenant)) for tenant, key in keys.items()))
    file.chmod(0o600)
    layout = Layout({"prefill": size.prefill, "decode": size.decode})
    spec = deployment(str(file), size)
    async with exercise(trial, spec, layout, rest_s=_GRACE_S, key=keys["operator"]) as fleet:
        crowd = Crowd(trial, fleet, keys, size)
        figures = await _greedy(crowd)
        return figures + (await _long(crowd) if size.long_prompts else [])


async def _greedy(crowd: Crowd) -> list[Figure]:
    size = crowd.size
    # Half of the capacity is the fair share of one of two tenants.
    rate = size.greedy * size.capacity / 2
    alone, beside, theirs = list[Outcome](), list[Outcome](), list[Outcome]()
    for pair in range(size.pairs):
        calm = await _victim(crowd, pair, 2 * pair)
        load = crowd.load("greedy", rate, 500 + pair, 600 + pair)
        load.start()
        # Let the queue become stable.
        await crowd.trial.clock.sleep(2.0 * size.slower)
        under = await _victim(crowd, pair, 2 * pair + 1)
        theirs += await load.stop(_GRACE_S)
        if load.skipped:
            raise NotProven(f"{load.skipped} requests of the greedy tenant were not sent")
        alone, beside = alone + calm, beside + under
        _say(crowd, "a greedy tenant", calm, under)
    refused = [each for each in theirs if each.status in (429, 503)]
    codes = ", ".join(f"{code}: {n}" for code, n in sorted(Counter(each.error for each in refused).items()))
    if len(refused) < len(theirs) / 2:
        raise NotProven(f"the greedy tenant was refused {len(refused)} of {len(theirs)} times")
    note = (f"{rate:.1f} requests a second beside {size.victim * size.capacity:.1f}, where all can have "
            f"{size.capacity:.1f}; {len(theirs) - len(refused)} served, {codes}")  # fmt: skip
    return [
        _figure("beside a greedy tenant", alone, beside, note),
        exactness([*alone, *beside], "of the other tenant"),
        exactness([each for each in theirs if each not in refused], "of the greedy tenant, not refused"),
    ]


async def _long(crowd: Crowd) -> list[Figure]:
    size, trial = crowd.size, crowd.trial
    alone, beside, long = list[Outcome](), list[Outcome](), list[Outcome]()
    for pair in range(size.pairs):
        calm = await _victim(crowd, 50 + pair, 50 + 2 * pair)
        content = trial.rng(700 + pair)
        lengthy = asks(content, size.long_tokens, OUTPUT_TOKENS)
        headers = crowd.headers("greedy", "patient")
        streams = [
            await open_stream(crowd.fleet.address, replace(next(lengthy), headers=headers), trial.clock)
            for _ in range(size.long_prompts)
        ]
        under = await _victim(crowd, 50 + pair, 51 + 2 * pair)
        async with asyncio.timeout(_GRACE_S):
            await asyncio.gather(*(stream.ended.wait() for stream in streams))
        long += [stream.outcome for stream in streams]
        alone, beside = alone + calm, beside + under
        _say(crowd, "long prompts", calm, under)
    ended = ", ".join(f"{each.ttft_s:.0f}" for each in long)
    note = (f"{size.long_prompts} prompts of {size.long_tokens:,} tokens at once on {size.prefill} prefill "
            f"workers, whose first tokens came after {ended} s")  # fmt: skip
    return [
        _figure("beside very long prompts", alone, beside, note),
        exactness([*alone, *beside], "of those beside long prompts"),
        exactness(long, "of the long prompts"),
    ]


async def _victim(crowd: Crowd, pair: int, window: int) -> list[Outcome]:
    """Measure one window of the victim. The windows of a pair have different tokens, so that nothing is
    cached."""
    size = crowd.size
    load = crowd.load("victim", size.victim * size.capacity, 1000 + 2 * pair, 2000 + window)
    load.start()
    await crowd.trial.clock.sleep(size.window_s)
    return await load.stop(_GRACE_S)


def varied(lengths: Random, content: Random, mean: int, headers: tuple[str, ...] = ()) -> Iterator[Ask]:
    """Prompts with exponentially distributed lengths, as in conversations, of at most four times the mean."""
    while True:
        tokens = min(4 * mean, 16 + int(lengths.expovariate(1 / mean)))
        yield Ask(next(asks(content, tokens, 1)).prompt, OUTPUT_TOKENS, headers=headers)


def _p99(outcomes: list[Outcome]) -> float:
    return quantile([each.ttft_s for each in outcomes], 0.99)


def _say(crowd: Crowd, what: str, calm: list[Outcome], under: list[Outcome]) -> None:
    crowd.trial.say(f"p99 TTFT {_p99(calm):.2f} s alone, {_p99(under):.2f} s beside {what}")


def _figure(what: str, alone: list[Outcome], beside: list[Outcome], note: str) -> Figure:
    """All windows are pooled, because the p99 of a few requests is one of the two slowest."""
    medians = [quantile([each.ttft_s for each in outcomes], 0.5) for outcomes in (alone, beside)]
    return Figure(
        f"change of p99 TTFT {what}", 100 * (_p99(beside) / _p99(alone) - 1), "%", "lower", 10.0,
        f"{len(beside)} requests, p99 {_p99(alone):.2f} s alone and {_p99(beside):.2f} s beside them, median "
        f"{medians[0]:.2f} and {medians[1]:.2f} s; {note}",
    )  # fmt: skip
