"""Losses of a release whose engines are real vLLM: Ray's head, Redis, the only decode replica, and an upgrade
whose image never starts.

Real Ray, Serve, control process and Redis, with this module in place of KubeRay and the kubelet
(tests/kit/cluster/pods.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from tests.kit.cluster.pods import DECODE, PREFILL, PodCluster, pod_cluster, ready_workers, vllm_release
from tests.kit.lab.load import asks
from tests.kit.lab.stream import Ask, Outcome, complete

from load_tests.scenarios.cluster.losses import LONGEST_GAP_S, Load, under_load
from load_tests.scenarios.cluster.releases import SPARE, Operator, Upgrade, address_of, installed, rolled_back
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial

PROMPTS = 8
PROMPT_TOKENS = 64
BOTH = {"prefill": 1, "decode": 1}


@dataclass(frozen=True, slots=True)
class Loss:
    """How often Ray's head is killed; how long no decode replica is there; the load."""

    kills: int = 10
    away_s: float = 2.5
    load: Load = Load(rate=2.0, tokens=40)


@dataclass(frozen=True, slots=True)
class Served:
    """A release at `address`, and what each request of its load is answered while nothing happens."""

    cluster: PodCluster
    url: str
    work: tuple[Ask, ...]
    texts: Mapping[tuple[int, ...], str]

    @property
    def address(self) -> str:
        return address_of(self.url)

    def engines(self) -> dict[str, int | None]:
        """The process of each pod's engine."""
        return {ip: self.cluster.replica(ip) for ip in (PREFILL, DECODE)}

    def load(self, trial: Trial, load: Load) -> Any:
        """Run streams whose texts are known."""
        return under_load(trial, [self.address], load, cycle(self.work))

    def judged(self, outcomes: Sequence[Outcome], note: str = "") -> list[Figure]:
        """The three figures of a loss."""
        failed = [each for each in outcomes if each.error]
        whole = [each for each in outcomes if not each.error]
        wrong = [each for each in whole if each.text != self.texts[each.ask.prompt]]
        why = f"; the first: {failed[0].error}: {failed[0].detail}"[:300] if failed else ""
        said = f"of {len(outcomes)}{f'; {note}' if note else ''}{why}"
        gap_s = max((each.longest_gap_s for each in whole), default=0.0)
        return [
            Figure("failed requests", len(failed), "requests", "lower", 0.0, said),
            Figure("longest gap of a stream", gap_s, "s", "lower", LONGEST_GAP_S),
            Figure("streams with a lost, repeated or wrong token", len(wrong), "streams", "lower", 0.0),
        ]


@asynccontextmanager
async def served(trial: Trial, load: Load, *decoders: str) -> AsyncIterator[Served]:
    """A release that serves, with a Redis that has a volume."""
    volume = ("--appendonly", "yes", "--dir", str(trial.folder))
    made = pod_cluster(trial.folder, vllm_release(*decoders), *volume)
    cluster = await asyncio.to_thread(made.__enter__)
    try:
        url = await asyncio.to_thread(installed, cluster, decoders[1:])
        work = tuple(islice(asks(trial.rng(3), PROMPT_TOKENS, load.tokens), PROMPTS))
        # Twice, so that the texts of later runs are of prompts that engines have in their caches as well.
        alone = [await complete(address_of(url), ask, trial.clock) for ask in (*work, *work)]
        texts = {each.ask.prompt: each.text for each in alone}
        if any(each.error or each.text != texts[each.ask.prompt] for each in alone):
            raise NotProven(
                f"streams without a loss differ: {[each.error or each.text for each in alone]}"[:500]
            )
        yield Served(cluster, url, work, texts)
    finally:
        await asyncio.to_thread(made.__exit__, None, None, None)


async def head_killed(trial: Trial, size: Loss) -> list[Figure]:
    """Ray's head is killed again and again; the next one finds its state in Redis."""

    async def act(release: Served) -> None:
        for number in range(size.kills):
            await asyncio.to_thread(release.cluster.kill, "head")
            await asyncio.to_thread(release.cluster.take_over, BOTH)
            trial.say(f"killed {number + 1} times")

    return await _outlived(trial, size, act, f"killed {size.kills} times")


async def redis_restarted(trial: Trial, size: Loss) -> list[Figure]:
    """Redis restarts with its volume; Ray's head ends with its connection and is restarted."""

    async def act(release: Served) -> None:
        await asyncio.to_thread(release.cluster.restart_redis, BOTH)

    return await _outlived(trial, size, act, "")


async def _outlived(trial: Trial, size: Loss, act: Callable[[Served], Any], note: str) -> list[Figure]:
    async with served(trial, size.load, DECODE) as release:
        engines = release.engines()
        if None in engines.values():
            raise NotProven(f"no engine serves: {engines}")
        async with release.load(trial, size.load) as outcomes:
            await act(release)
        kept = sum(release.engines()[ip] == process for ip, process in engines.items())
    figures = release.judged(outcomes, note)
    return [*figures, Figure("engines with the same process", kept, "engines", "higher", len(engines))]


async def drained(trial: Trial, size: Loss) -> list[Figure]:
    """SIGTERM to the pod of the only decode replica, as `kubectl drain` of its node, and a successor."""
    async with served(trial, size.load, DECODE) as release:
        cluster = release.cluster
        async with release.load(trial, size.load) as outcomes:
            await asyncio.to_thread(cluster.end, DECODE)
            if ready_workers(release.url) != 1:
                raise NotProven("another decode replica serves")
            await trial.clock.sleep(size.away_s)
            cluster.worker("decode", DECODE)

            def back() -> bool:
                return cluster.running() == BOTH and ready_workers(release.url) == 2

            took_s = await asyncio.to_thread(cluster.until, back, "a successor serves", 180.0)
    return release.judged(outcomes, f"no decode replica for {size.away_s + took_s:.0f} s")


async def never_starts(trial: Trial, size: Upgrade) -> list[Figure]:
    """The pod of the new template never starts; the rollback brings its predecessor's back."""
    async with served(trial, size.load, DECODE, SPARE) as release:
        operator = Operator(release.cluster, release.url)
        async with release.load(trial, size.load) as outcomes:
            await rolled_back(trial, release.cluster, operator, release.url, size.broken_s)
    return release.judged(outcomes, f"one of two decode replicas was away for {size.broken_s:g} s and more")
