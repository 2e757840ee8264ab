"""Redis is killed, stopped and slow under a load: requests do without it, and it is used again afterwards.

Real vLLM, a real Redis behind a proxy. No prompt was seen before, so that the tier has to be asked for each
and has nothing to give: what is measured is what asking costs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from kvasir.config.spec_tiers import CpuTierSpec, RedisTierSpec, TiersSpec
from kvasir.core.kv import Medium
from kvasir_platform.sim.lab import gateway
from kvasir_platform.sim.lab.load import quantile
from kvasir_platform.sim.lab.proxy import DOWNSTREAM, Link, TcpProxy
from kvasir_platform.sim.lab.redis_server import RedisServer, find_redis
from load_tests.scenarios.scorecard_rows import real_engines
from load_tests.scenarios.scorecard_rows.common import Figure, NotProven, Trial
from load_tests.scenarios.scorecard_rows.real_engines import Heard, Stage

PROMISE = "tier skipped"
BOUND_MS = 10.0
TOKENS = 2
SLOW_S = 0.1
NOTICED_S = 5.0
BACK_S = 60.0
"""The longest pause between two trials of a tier in trouble is 30 s and a fifth."""
FAULTS = ("killed", "stopped", "slow")


@dataclass(frozen=True, slots=True)
class Size:
    """`requests` prompts of `words` words, one every `every_s`, while nothing is wrong, and as many under
    each fault, from before it begins; `rounds` times."""

    requests: int = 100
    words: int = 200
    every_s: float = 0.25
    rounds: int = 1
    checked: int = 5


@dataclass(slots=True)
class Windows:
    """Times to first token, by what was wrong meanwhile ("" for nothing), failures, and how long the tier
    stayed out of use after each fault."""

    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    wrong: int = 0
    checked: int = 0
    back_s: list[float] = field(default_factory=list)


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """See the module."""
    if find_redis() is None:
        raise NotProven("redis-server is not installed")
    found = Windows()
    with RedisServer(trial.folder) as server:
        async with TcpProxy(server.address, clock=trial.clock, rng=trial.rng()) as proxy:
            redis = RedisTierSpec(url=f"redis://{proxy.address}/0")
            tiers = TiersSpec(cpu=CpuTierSpec(bytes=64 << 20), redis=redis)
            trial.say("an engine is starting")
            async with real_engines.stage(
                trial.folder, real_engines.together(tiers=tiers), ("both",)
            ) as stage:
                await _window(stage, size, found, "warm", trial.seed)
                for turn in range(size.rounds):
                    for number, fault in enumerate(FAULTS):
                        salt = 100 * (turn + 1) + 10 * number
                        await _window(stage, size, found, "", trial.seed + salt)
                        # A loaded machine may have missed a deadline of its own.
                        await _used_again(stage)
                        async with _wrong(fault, server, proxy) as began:
                            await _window(stage, size, found, fault, trial.seed + salt + 1, began=began)
                            await _skipped(stage, fault)
                        found.back_s.append(await _used_again(stage))
                        trial.say(_told(found, fault) + f"; back after {found.back_s[-1]:.1f} s")
    return _figures(found)


def _told(found: Windows, fault: str) -> str:
    usual, hurt = (quantile(found.ttft_s[name], 0.99) * 1e3 for name in ("", fault))
    return f"{fault}: p99 of times to first token {hurt:.1f} ms, {usual:.1f} ms while nothing is wrong"


def _figures(found: Windows) -> list[Figure]:
    usual = quantile(found.ttft_s[""], 0.99) * 1e3
    counts = {name or "nothing wrong": len(times) for name, times in found.ttft_s.items()}
    figures = [
        Figure("failed requests", len(found.errors), "requests", "lower", 0.0,
               f"of {counts}; {'; '.join(found.errors[:3])}".rstrip("; ")),
        Figure("requests with a wrong token", found.wrong, "requests", "lower", 0.0,
               f"of {found.checked} that were asked again without the tier"),
    ]  # fmt: skip
    for fault in FAULTS:
        times = found.ttft_s[fault]
        more = quantile(times, 0.99) * 1e3 - usual
        figures.append(
            Figure(f"{fault}: p99 of times to first token, beyond that without a fault", more, "ms", "lower",
                   BOUND_MS, f"{usual:.1f} ms without; the longest {max(times) * 1e3:.1f} ms, median "
                   f"{quantile(times, 0.5) * 1e3:.1f} against {quantile(found.ttft_s[''], 0.5) * 1e3:.1f} ms")
        )  # fmt: skip
    figures.append(
        Figure("until the tier is used again after the fault", max(found.back_s), "s", "lower", BACK_S,
               "by itself, the longest")
    )  # fmt: skip
    return figures


async def _window(
    stage: Stage, size: Size, found: Windows, name: str, seed: int, *, began: asyncio.Event | None = None
) -> None:
    """Requests at even intervals; after a tenth of them `began` is set, and the fault begins."""
    texts = real_engines.prompts(seed, size.requests, size.words)
    heard = [Heard() for _ in texts]
    streams: list[asyncio.Task[None]] = []
    at = stage.clock.now()
    for number, (text, each) in enumerate(zip(texts, heard, strict=True)):
        if began is not None and number == size.requests // 10:
            began.set()
        ask = stage.client.stream(each, text, max_tokens=TOKENS)
        streams.append(asyncio.ensure_future(ask))
        at += size.every_s
        await stage.clock.sleep(max(0.0, at - stage.clock.now()))
    ended = await asyncio.gather(*streams, return_exceptions=True)
    found.errors += [f"{name}: {error!r}" for error in ended if isinstance(error, BaseException)]
    well = [each for each in heard if each.finish == "length" and each.usage[1] == TOKENS]
    found.errors += [f"{name}: {each.usage}" for each in heard if each.times_s and each not in well]
    found.ttft_s.setdefault(name, []).extend(each.ttft_s for each in well)
    if began is not None:
        for text, each in list(zip(texts, heard, strict=True))[-size.checked :]:
            found.checked += 1
            found.wrong += not each.same(await stage.one(text, TOKENS, salt="for comparison"))


@asynccontextmanager
async def _wrong(fault: str, server: RedisServer, proxy: TcpProxy) -> AsyncIterator[asyncio.Event]:
    """The fault begins when the event is set, and ends with the context."""
    begin = asyncio.Event()

    async def strike() -> None:
        await begin.wait()
        if fault == "killed":
            await asyncio.to_thread(server.kill)
            proxy.reset()
        elif fault == "stopped":
            await asyncio.to_thread(server.freeze)
        else:
            proxy.shape(DOWNSTREAM, Link(delay_s=SLOW_S))

    struck = asyncio.ensure_future(strike())
    delayed = proxy.counts.delayed
    try:
        yield begin
        await struck
    finally:
        struck.cancel()
        if fault == "killed":
            await asyncio.to_thread(server.start)
        elif fault == "stopped":
            await asyncio.to_thread(server.thaw)
        else:
            proxy.shape(DOWNSTREAM, Link())
    if fault == "slow" and proxy.counts.delayed == delayed:
        raise NotProven("nothing was delayed")


async def _skipped(stage: Stage, fault: str) -> None:
    """Raises NotProven when the worker does not say that the tier is left alone."""

    async def told() -> bool:
        return bool((await _tier(stage))["trouble"])

    try:
        await gateway.until(told, NOTICED_S, "trouble is told", stage.clock, 0.05)
    except TimeoutError as error:
        raise NotProven(f"{fault}: the tier is used all the same") from error


async def _used_again(stage: Stage) -> float:
    """Seconds until the worker says that the tier is used. An engine says so when it does something."""
    turns = itertools.count()

    async def told() -> bool:
        await stage.one(f"again {next(turns)}", 1)
        return not (await _tier(stage))["trouble"]

    return await gateway.until(told, BACK_S, "the tier is used again", stage.clock, 0.2)


async def _tier(stage: Stage) -> dict[str, Any]:
    (load,) = await stage.loads("both")
    found: dict[str, Any] = next(tier for tier in load["tiers"] if tier["medium"] == Medium.REMOTE)
    return found
