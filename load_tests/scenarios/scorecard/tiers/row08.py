"""Redis is killed, stopped, slow and full under load, and a disk is full and read-only: requests are served
without the tier, operators are informed, and the tier is used again afterwards.

Real vLLM, a real Redis behind a proxy, its own filesystem. Every prompt of the load is new, so that each
look-up misses and the cost of the look-up is measured. Prompts from before the fault show what the tier still
holds, or holds again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tests.kit.lab import gateway
from tests.kit.lab.load import quantile
from tests.kit.lab.proxy import Link

from kvasir.config.spec.deployment import EngineSpec
from load_tests.scenarios.scorecard import real_engines
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial
from load_tests.scenarios.scorecard.real_engines import Heard, Stage
from load_tests.scenarios.scorecard.tiers.tier_faults import MEMORY, SLOW_LINK, TIERS, Fault, Tier

PROMISE = "tier skipped"
BOUND_MS = 10.0
MOST_OF_COMPUTING = 2.0
"""Waiting for a block no longer than it takes to compute it, and then computing it."""
TOKENS = 2
NOTICED_S = 5.0
REPORT_S = 0.2
BACK_S = 60.0
"""The longest interval between two probes of a failed tier: 30 s plus a jitter of one fifth."""
UNUSED = "is not used for the time being: "
Earlier = Iterator[tuple[str, Heard]]


@dataclass(frozen=True, slots=True)
class Size:
    """`requests` prompts of `words` words, one every `every_s`, without a fault, and as many under each
    fault, starting before the fault. `tiers` are measured one at a time, with `lookup_timeout_s`, and under
    those of their faults that `faults` names; under all if it is empty. `hits` prompts are read from a tier
    that is slow without being late; they are the first of `requests`, whose blocks memory no longer has."""

    tiers: tuple[str, ...] = ("Redis", "disk")
    requests: int = 100
    words: int = 200
    every_s: float = 0.2
    checked: int = 5
    lookup_timeout_s: float = 0.008
    faults: tuple[str, ...] = ()
    hits: int = 30


@dataclass(slots=True)
class Windows:
    """TTFT by fault ("" for none), failed requests, faults that were not reported in one line, and how long
    the tier stayed out of use after each."""

    ttft_s: dict[str, list[float]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    wrong: int = 0
    checked: int = 0
    untold: list[str] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    slow_hits: list[float] = field(default_factory=list)
    given_up: int = 0


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    figures: list[Figure] = []
    for name in size.tiers:
        missing, made = TIERS[name]
        if (reason := missing()) is not None:
            figures.append(Figure(f"{name} could not be tried", 1.0, "tiers", "lower", 0.0, reason))
            continue
        folder = trial.folder / name
        folder.mkdir()
        async with made(replace(trial, folder=folder), size.lookup_timeout_s) as tier:
            trial.say(f"{name}: an engine is starting")
            deployment = real_engines.together(real_engines.engine(MEMORY.bytes), tiers=tier.spec)
            async with real_engines.stage(folder, deployment, ("both",)) as stage:
                row = _Row(trial, size, tier, stage)
                await row.run()
        figures += row.figures()
    return figures


class _Row:
    """One tier under its faults."""

    def __init__(self, trial: Trial, size: Size, tier: Tier, stage: Stage) -> None:
        self._trial = trial
        self._size = size
        self._tier = tier
        self._stage = stage
        self._faults = [fault for fault in tier.faults if fault.name in (size.faults or (fault.name,))]
        self._found = Windows()
        self._seeds = itertools.count(1000 * trial.seed)

    async def run(self) -> None:
        """Run all faults in turn. Raise NotProven."""
        await self._window("warm")
        for fault in self._faults:
            earlier = await self._window("")
            # On a loaded machine the tier may have missed its deadline without a fault.
            await self._used_again()
            lines = await self._under(fault, earlier)
            if fault.lost:
                await self._computed_again(earlier)
            else:
                await self._read_back(earlier)
            await self._stored()
            usual, hurt = (quantile(self._found.ttft_s[name], 0.99) * 1e3 for name in ("", fault.name))
            self._trial.say(
                f"{self._tier.name} {fault.name}: p99 of times to first token {hurt:.1f} ms, {usual:.1f} ms "
                f"while nothing is wrong; back after {self._found.back_s[-1]:.1f} s; "
                f"in the log: {' / '.join(lines)}"
            )
        if self._tier.shape is not None and self._size.hits:
            await self._slow_hits(self._tier.shape)

    def figures(self) -> list[Figure]:
        """The figures of this tier."""
        found, name = self._found, self._tier.name
        usual = quantile(found.ttft_s[""], 0.99) * 1e3
        counts = {each or "nothing wrong": len(times) for each, times in found.ttft_s.items()}
        figures = [
            Figure(f"{name}: failed requests", len(found.errors), "requests", "lower", 0.0,
                   f"of {counts}; {'; '.join(found.errors[:3])}".rstrip("; ")),
            Figure(f"{name}: requests with a wrong token", found.wrong, "requests", "lower", 0.0,
                   f"of {found.checked} that were asked twice, without the tier or after the fault"),
        ]  # fmt: skip
        for fault in self._faults:
            times = found.ttft_s[fault.name]
            more = quantile(times, 0.99) * 1e3 - usual
            figures.append(
                Figure(f"{name} {fault.name}: p99 of times to first token, beyond that without a fault", more,
                       "ms", "lower", BOUND_MS, f"{usual:.1f} ms without; the longest {max(times) * 1e3:.1f} "
                       f"ms, median {quantile(times, 0.5) * 1e3:.1f} against "
                       f"{quantile(found.ttft_s[''], 0.5) * 1e3:.1f} ms")
            )  # fmt: skip
        if found.slow_hits:
            hit, computed = quantile(found.slow_hits, 0.99), quantile(found.ttft_s[""], 0.99)
            figures.append(
                Figure(f"{name}: p99 of times to first token of slow hits, to that of computed prompts",
                       hit / computed, "x", "lower", MOST_OF_COMPUTING,
                       f"{hit * 1e3:.0f} and {computed * 1e3:.0f} ms; median "
                       f"{quantile(found.slow_hits, 0.5) * 1e3:.0f} and "
                       f"{quantile(found.ttft_s[''], 0.5) * 1e3:.0f} ms; {len(found.slow_hits)} hits, "
                       f"{found.given_up} of which were not waited for to the end")
            )  # fmt: skip
        return [
            *figures,
            Figure(f"{name}: faults that the worker's log does not tell in one line, with what to do",
                   len(found.untold), "faults", "lower", 0.0,
                   f"of {len(self._faults)}, which kvasir_worker_tier_trouble showed while they lasted; "
                   f"{'; '.join(found.untold)}".rstrip("; ")),
            Figure(f"{name}: until the tier is used again after the fault", max(found.back_s), "s", "lower",
                   BACK_S, "by itself, the longest"),
        ]  # fmt: skip

    # -- the load ----------------------------------------------------------------------------------

    async def _window(
        self, name: str, strike: Callable[[], Coroutine[Any, Any, None]] | None = None
    ) -> Earlier:
        """Send requests at even intervals and call `strike` after a tenth of them. Return the successful
        ones, to be sent again later. Raise NotProven."""
        size, stage, found = self._size, self._stage, self._found
        texts = real_engines.prompts(next(self._seeds), size.requests, size.words)
        heard = [Heard() for _ in texts]
        streams: list[asyncio.Task[None]] = []
        struck: asyncio.Task[None] | None = None
        at = stage.clock.now()
        for number, (text, each) in enumerate(zip(texts, heard, strict=True)):
            if strike is not None and number == size.requests // 10:
                struck = asyncio.ensure_future(strike())
            ask = stage.client.stream(each, text, max_tokens=TOKENS)
            streams.append(asyncio.ensure_future(ask))
            at += size.every_s
            await stage.clock.sleep(max(0.0, at - stage.clock.now()))
        ended = await asyncio.gather(*streams, return_exceptions=True)
        found.errors += [f"{name}: {error!r}" for error in ended if isinstance(error, BaseException)]
        well = [
            (text, each)
            for text, each in zip(texts, heard, strict=True)
            if each.finish == "length" and each.usage[1] == TOKENS
        ]
        short = len(texts) - len(well) - sum(isinstance(error, BaseException) for error in ended)
        found.errors += [f"{name}: other than {TOKENS} tokens"] * short
        found.ttft_s.setdefault(name, []).extend(each.ttft_s for _, each in well)
        if struck is not None:
            if not struck.done():
                struck.cancel()
                raise NotProven(f"{self._tier.name} {name}: the tier failed before the fault, for too long")
            await struck
            for text, each in well[-size.checked :]:
                await self._compare(text, each, salt="for comparison")
        return iter(well)

    async def _compare(self, text: str, right: Heard, salt: str = "") -> None:
        self._found.checked += 1
        self._found.wrong += not right.same(await self._stage.one(text, TOKENS, salt=salt))

    async def _read_back(self, earlier: Earlier) -> None:
        """Send prompts from before the fault: they get the same tokens and hit the tier. Raise NotProven."""
        before = await self._metric("loaded_blocks_total")
        for number, (text, right) in enumerate(earlier, 1):
            await self._until("up", True)
            await self._compare(text, right)
            # The engine reports hits with a later step.
            await self._stage.clock.sleep(REPORT_S)
            if number >= self._size.checked and await self._metric("loaded_blocks_total") > before:
                return
        raise NotProven(f"{self._tier.name} returns none of its blocks")

    async def _computed_again(self, earlier: Earlier) -> None:
        """Send prompts from before the fault: they get the same tokens and miss the tier. Raise NotProven."""
        before = await self._metric("loaded_blocks_total")
        for text, right in itertools.islice(earlier, self._size.checked):
            await self._compare(text, right)
        await self._stored()
        if await self._metric("loaded_blocks_total") > before:
            raise NotProven(f"{self._tier.name} still has blocks that the fault should remove")

    async def _slow_hits(self, shape: Callable[[Link], None]) -> None:
        """Send prompts that the tier has, while it returns them slowly. Raise NotProven."""
        earlier = list(itertools.islice(await self._window(""), self._size.hits))
        await self._stored()
        shape(SLOW_LINK)
        try:
            for text, right in earlier:
                heard, before = Heard(), await self._metric("loaded_blocks_total")
                await self._stage.client.stream(heard, text, max_tokens=TOKENS)
                await self._read_since(before)
                self._found.slow_hits.append(heard.ttft_s)
                self._found.given_up += heard.cached + 2 * EngineSpec().block_size <= heard.usage[0]
                self._found.checked += 1
                self._found.wrong += not right.same(heard)
        finally:
            shape(Link())
        if not self._found.given_up:
            raise NotProven(f"{self._tier.name}: no block took longer to read than to compute")
        self._trial.say(
            f"{self._tier.name} returns slowly: median {quantile(self._found.slow_hits, 0.5) * 1e3:.0f} ms; "
            f"{self._found.given_up} of {len(earlier)} were not waited for to the end"
        )

    async def _read_since(self, before: float) -> None:
        """Wait until the tier has returned blocks, be it too late for their prompt. Raise NotProven."""
        turns = itertools.count()

        async def read() -> bool:
            # An engine reports only when it runs steps.
            await self._stage.one(f"once more {next(turns)}", 1)
            return await self._metric("loaded_blocks_total") > before

        try:
            await gateway.until(read, NOTICED_S, "blocks are read", self._stage.clock, 0.05)
        except TimeoutError as error:
            raise NotProven(f"{self._tier.name} was not asked for the blocks of a prompt") from error

    async def _stored(self) -> None:
        """Wait until prompts are written to the tier. Raise TimeoutError."""
        before = await self._metric("stored_blocks_total")

        async def written() -> bool:
            (text,) = real_engines.prompts(next(self._seeds), 1, self._size.words)
            await self._stage.one(text, TOKENS)
            return await self._metric("stored_blocks_total") > before

        await gateway.until(written, BACK_S, "prompts are written to the tier", self._stage.clock, REPORT_S)

    # -- the fault ---------------------------------------------------------------------------------

    async def _under(self, fault: Fault, earlier: Earlier) -> list[str]:
        """Send requests before the fault begins and until the tier is used again. Return the worker's log
        lines about the tier. Raise NotProven."""
        begun, said = False, 0

        async def strike() -> None:
            nonlocal begun, said
            await self._until("trouble", False)
            said = len(await self._warnings())
            begun = True
            await fault.begin()

        try:
            await self._window(fault.name, strike)
            await self._skipped(fault)
            if fault.read:
                await self._read_back(earlier)
        finally:
            if begun:
                await fault.end()
        self._found.back_s.append(await self._used_again())
        lines = (await self._warnings())[said:]
        if len(lines) != 1 or fault.remedy not in lines[0]:
            self._found.untold.append(f"{fault.name}: {lines}")
        return lines

    async def _warnings(self) -> list[str]:
        """The log lines that report the tier as not used."""
        text = await asyncio.to_thread(self._stage.worker("both").child.log.read_text)
        return [line for line in text.splitlines() if self._tier.called in line and UNUSED in line]

    async def _metric(self, name: str) -> float:
        text = await gateway.metrics(self._stage.address)
        return gateway.metric(text, f"kvasir_worker_tier_{name}", tier=self._tier.label)

    async def _until(self, name: str, value: bool) -> None:
        """Wait for a value of a metric of the tier. On a loaded machine the tier may have missed its deadline
        without a fault."""

        async def so() -> bool:
            return bool(await self._metric(name)) == value

        await gateway.until(so, BACK_S, f"{name} is {value:d}", self._stage.clock, 0.05)

    async def _skipped(self, fault: Fault) -> None:
        """Raise NotProven unless the gateway's metrics report the tier as not used."""

        async def reported() -> bool:
            return bool(await self._metric("trouble")) and bool(await self._metric("up")) == fault.read

        try:
            await gateway.until(reported, NOTICED_S, "trouble is told", self._stage.clock, 0.05)
        except TimeoutError as error:
            raise NotProven(f"{self._tier.name} {fault.name}: the tier is still used") from error

    async def _used_again(self) -> float:
        """Return the seconds until the gateway's metrics report the tier as used. An engine reports only when
        it runs steps."""
        turns = itertools.count()

        async def reported() -> bool:
            await self._stage.one(f"again {next(turns)}", 1)
            return not await self._metric("trouble")

        return await gateway.until(reported, BACK_S, "the tier is used again", self._stage.clock, 0.2)
