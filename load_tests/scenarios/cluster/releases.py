"""Upgrades of a release: two in a row, and one whose image never starts, with the rollback after it.

Real Ray, Serve and control process, with this module in place of KubeRay and the kubelet
(tests/kit/cluster/pods.py). Engines are simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.kit.cluster.pods import (
    DECODE,
    HEALTH,
    NEW,
    OLD,
    PREFILL,
    SESSION,
    PodCluster,
    pod_cluster,
    ready_workers,
    serves,
)

from kvasir_platform.cluster.local.commands import ControlCommand, ask, socket_path
from load_tests.scenarios.cluster.losses import Load, judged, under_load
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial

SPARE = "127.0.0.44"
PODS = (DECODE, SPARE)
NEWER, BROKEN = "00aa00aa00aa", "dead00dead00"
COMMAND_S = RESTART_S = 120.0
STEP_S = 0.02


@dataclass(frozen=True, slots=True)
class Upgrade:
    """`broken_s`: how long an upgrade whose image does not start is left alone before its rollback."""

    broken_s: float = 5.0
    load: Load = Load(rate=6.0, tokens=40)


def spec() -> dict[str, Any]:
    """Prefill and decode apart; the decode pool gets a second replica by command."""
    engines = ({"kind": "sim", "sim": {"decode_step_s": STEP_S}} for _ in range(2))
    pools = (("prefill", PREFILL), ("decode", DECODE), ("decode", SPARE))
    return {
        "version": "kvasir/v1",
        "name": "kvasir",
        "pools": [
            {"name": role, "role": role, "engine": engine}
            for role, engine in zip(("prefill", "decode"), engines, strict=True)
        ],
        "worker": {"host": "pod", "port": SESSION, "health_port": HEALTH, "drain_s": 3},
        "gateway": {"host": "127.0.0.1", "port": 0},
        "discovery": {"kind": "static", "endpoints": [f"{pool}={ip}:{SESSION}" for pool, ip in pools]},
    }


@asynccontextmanager
async def release(trial: Trial) -> AsyncIterator[tuple[PodCluster, str]]:
    """A release with one prefill and two decode pods, and the address of its router."""
    made = pod_cluster(trial.folder, spec())
    cluster = await asyncio.to_thread(made.__enter__)
    try:
        yield cluster, await asyncio.to_thread(installed, cluster, (SPARE,))
    finally:
        await asyncio.to_thread(made.__exit__, None, None, None)


def installed(cluster: PodCluster, further: Sequence[str]) -> str:
    """Start a release with a prefill and a decode pod, and further decode pods at these addresses; give the
    URL of its router."""
    cluster.first_head()
    cluster.first_workers({"prefill": PREFILL, "decode": DECODE})
    url = cluster.router()
    for number, ip in enumerate(further, 2):
        cluster.worker("decode", ip)
        done = list(ask(socket_path(cluster.head_dir), ControlCommand("scale", "decode", number), COMMAND_S))
        if done[-1]["event"] != "done":
            raise NotProven(f"the decode pool did not get its replica: {done[-1]}")
        cluster.until(partial(serves, ip), "the further decode pod is ready")
        cluster.until(partial(_has_workers, url, number + 1), "the router has all workers")
    return url


class Operator:
    """In place of KubeRay: makes decode pods that have ended anew, from the template of that time."""

    def __init__(self, cluster: PodCluster, url: str) -> None:
        self._cluster = cluster
        self._url = url
        self._template = OLD
        self.templates = dict.fromkeys(PODS, OLD)

    def upgrade(self, template: str) -> None:
        """Change the template of decode pods, as `helm upgrade` and `helm rollback` do."""
        self._template = template
        self._cluster.set_desired_pods(prefill=OLD, decode=template)

    def step(self) -> None:
        """Make ended pods anew."""
        for ip in PODS:
            if self._cluster.processes[ip].poll() is not None:
                self._cluster.make_anew("decode", self._template, ip)
                self.templates[ip] = self._template

    def settled(self) -> bool:
        """Whether all pods are of the current template, and serve."""
        self.step()
        return (
            set(self.templates.values()) == {self._template}
            and all(map(serves, PODS))
            and self._cluster.running() == {"prefill": 1, "decode": 2}
            and ready_workers(self._url) == 3
        )


async def two_in_a_row(trial: Trial, size: Upgrade) -> list[Figure]:
    """A second template comes while pods are replaced for the first."""
    async with (
        release(trial) as (cluster, url),
        under_load(trial, [address_of(url)], size.load) as outcomes,
    ):
        operator = Operator(cluster, url)

        def begun() -> bool:
            operator.step()
            return NEW in operator.templates.values()

        operator.upgrade(NEW)
        await _until(cluster, begun, "the first upgrade has replaced a pod")
        if OLD not in operator.templates.values():
            raise NotProven("the first upgrade was over before the second began")
        operator.upgrade(NEWER)
        await _until(cluster, operator.settled, "the second upgrade is done")
        let_go = [each["template"] for each in cluster.events("head", "let_go")]
    return judged(outcomes, f"pods that were replaced, by their template: {', '.join(let_go)}")


async def never_starts(trial: Trial, size: Upgrade) -> list[Figure]:
    """The pod of the new template never starts; the rollback brings its predecessor's back."""
    async with (
        release(trial) as (cluster, url),
        under_load(trial, [address_of(url)], size.load) as outcomes,
    ):
        await rolled_back(trial, cluster, Operator(cluster, url), url, size.broken_s)
    return judged(outcomes, f"one of two decode replicas was away for {size.broken_s:g} s and more")


async def rolled_back(
    trial: Trial, cluster: PodCluster, operator: Operator, url: str, broken_s: float
) -> None:
    """An upgrade whose pod never starts, left alone for `broken_s` seconds, and its rollback. Raises
    NotProven."""
    operator.upgrade(BROKEN)
    await _until(cluster, lambda: bool(_ended(cluster)), "a pod is let go for the new template")
    await trial.clock.sleep(broken_s)
    let_go = len(cluster.events("head", "let_go"))
    if let_go != 1 or ready_workers(url) != 2:
        raise NotProven(f"{let_go} pods were let go, {ready_workers(url)} workers serve")
    operator.upgrade(OLD)
    await _until(cluster, operator.settled, "the rollback is done")


async def redis_without_data(trial: Trial, size: Upgrade) -> list[Figure]:
    """Redis restarts without a volume. The next head knows no node of the workers, so that these end, and
    pods are made anew; the pool gets the replicas of its spec again, and not those of a command."""
    async with (
        release(trial) as (cluster, url),
        under_load(trial, [address_of(url)], size.load) as outcomes,
    ):
        engines = {ip: cluster.replica(ip) for ip in (PREFILL, DECODE)}
        began = trial.clock.now()
        await asyncio.to_thread(cluster.redis.kill)
        await asyncio.to_thread(cluster.redis.start)
        await asyncio.to_thread(cluster.processes["head"].wait, RESTART_S)
        await _until(cluster, lambda: _revived(cluster, url), "new pods serve")
        took_s = trial.clock.now() - began
        if any(cluster.replica(ip) == pid for ip, pid in engines.items()):
            raise NotProven("an engine has outlived the state of Ray's head")
    errors = [each for each in outcomes if each.error]
    wrong = [each for each in outcomes if not each.error and not each.exact]
    return [
        Figure("until both pools serve again", took_s, "s", "lower"),
        Figure("failed requests", len(errors), "requests", "lower", note=f"of {len(outcomes)}"),
        Figure("streams with a lost, repeated or wrong token", len(wrong), "streams", "lower", 0.0),
    ]


def _revived(cluster: PodCluster, url: str) -> bool:
    """As KubeRay: restart the head and make pods anew, until both pools serve."""
    if cluster.processes["head"].poll() is not None:
        # Ray may not have been up.
        cluster.heads = len(cluster.events("head", "ray"))
        cluster.head()
    for pool, ip in (("prefill", PREFILL), ("decode", DECODE), ("decode", SPARE)):
        if cluster.processes[ip].poll() is not None:
            cluster.worker(pool, ip)
    return cluster.running() == {"prefill": 1, "decode": 1} and ready_workers(url) == 2


def _has_workers(url: str, count: int) -> bool:
    return ready_workers(url) == count


def _ended(cluster: PodCluster) -> list[str]:
    return [ip for ip in PODS if cluster.processes[ip].poll() is not None]


async def _until(cluster: PodCluster, condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(cluster.until, condition, what, 180.0)


def address_of(url: str) -> str:
    """`host:port`."""
    return url.removeprefix("http://")
