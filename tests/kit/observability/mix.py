"""Traffic that a fault can change, and faults that an operator has to recognize."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from kvasir.config.spec.admission import BrownoutSpec, BrownoutStepSpec
from kvasir.config.spec.deployment import (
    AdmissionSpec,
    Deployment,
    EngineSpec,
    GatewaySpec,
    PoolSpec,
    RoutingSpec,
    SimSpec,
    SloSpec,
    TenancySpec,
    TenantSpec,
)
from kvasir.config.spec.edge import EdgeTlsSpec
from kvasir.core.kv import Medium, TierLoad
from kvasir.core.requests import Role
from kvasir_platform.cluster.certificates import Authority
from kvasir_platform.sim.cluster import Cluster
from kvasir_workers.engines.sim.model import SimModel

TENANTS = ("acme", "lab")
_PROMPT = 128
_SHARED = 96
_OUTPUT = 4
_VOCABULARY = SimModel().vocab_size
_SEVERAL = 4
_LONG_OUTPUT, _STALL, _STALL_BEGINS_S, _QUICK_S = 60, 100.0, 0.02, 0.3
"""Steps that begin within the second are a hundred times as long; between them, there are quick ones."""
_MOVED_OUTPUT, _JUST_IN_TIME, _AWAY_S, _BACK_S = 24, 4.0, 0.5, 0.8
_BLOCK_BYTES, _DISK_BYTES, _LOAD_S = 1 << 20, 1 << 40, 0.01
CERTIFICATE_DAYS = 60
_LEFT_DAYS = 10
_DAY_S = 86_400.0
MOST_AT_ONCE = 48
"""Requests of one tenant that may run or wait at a time."""
_PREDICTED_BLOCKS, _PREDICTED_S = 1024, 20.0
_NOTICED_S = 25.0
_LONG_PROMPT, _BURST, _BURST_S, _REST, _REST_S = 448, 1.5, 15.0, 0.1, 25.0


@dataclass(slots=True)
class TrafficMix:
    """What clients send: `rate` requests a second of each tenant, and `greedy` more of the first one. Prompts
    of `prompt` tokens begin with one of a few prefixes of `shared` tokens."""

    rate: float = 1.5
    greedy: float = 0.0
    prompt: int = _PROMPT
    shared: int = _SHARED
    output: int = _OUTPUT

    @property
    def total(self) -> float:
        """Requests a second."""
        return self.rate * len(TENANTS) + self.greedy

    def tenant(self, rng: Random) -> str:
        """The tenant of the next request."""
        mine = self.rate * len(TENANTS)
        return rng.choice(TENANTS) if rng.random() * self.total < mine else TENANTS[0]

    def tokens(self, rng: Random) -> tuple[int, ...]:
        """The prompt of the next request."""
        shared = Random(rng.randrange(_SEVERAL))
        prefix = [2 + shared.randrange(_VOCABULARY - 2) for _ in range(self.shared)]
        rest = [2 + rng.randrange(_VOCABULARY - 2) for _ in range(self.prompt - self.shared)]
        return (*prefix, *rest)


def write_certificate(path: Path, now_s: float, expires_s: float) -> None:
    """Write a certificate and its key that is valid between the two times, for only its user."""
    authority = Authority.make("test", now_s - _DAY_S, expires_s + _DAY_S)
    path.write_bytes(authority.certify("spiffe://x/y", "api.example.com", now_s - _DAY_S, expires_s))
    path.chmod(0o600)


def watched_deployment(certificate: Path | None, prefill: int = 2, decode: int = 2) -> Deployment:
    """Pools of simulated workers, slow enough that a few requests a second overload them, and a gateway with
    this certificate and its key, if any."""
    file = None if certificate is None else str(certificate)
    engine = EngineSpec(
        kind="sim",
        block_size=16,
        kv_cache_bytes=32 << 20,
        max_num_seqs=16,
        sim=SimSpec(prefill_tokens_per_s=800.0, decode_step_s=0.01),
    )
    roles = (("prefill", Role.PREFILL, prefill), ("decode", Role.DECODE, decode))
    return Deployment(
        pools=tuple(
            PoolSpec(name=name, role=role, replicas=count, engine=engine) for name, role, count in roles
        ),
        slo=(SloSpec(name="default", ttft_s=0.5, itl_s=0.05),),
        gateway=GatewaySpec(port=0, tls=EdgeTlsSpec(cert_file=file, key_file=file)),
        routing=RoutingSpec(predicted_blocks=_PREDICTED_BLOCKS, predicted_ttl_s=_PREDICTED_S),
        admission=AdmissionSpec(
            patience=20.0,
            itl_slack=0.0,
            # A step that changes no request of this traffic.
            brownout=BrownoutSpec(steps=(BrownoutStepSpec(cap_max_tokens=1024),)),
        ),
        tenancy=TenancySpec(
            tenants=tuple(TenantSpec(name=name, concurrency=MOST_AT_ONCE) for name in TENANTS)
        ),
    )


@dataclass(slots=True)
class FaultScene:
    """What a fault can change: a cluster, the traffic, the gateway's certificate, when planner and discovery
    stopped to answer, by the clock of the cluster, and whether Redis and the classifier of an output filter
    answer. Tenants in `spent` have no budget left. `wall_s` is Unix time in seconds at the beginning, and
    `expires_s` when the certificate expires. `going_on` are the tasks of a fault that goes on."""

    cluster: Cluster
    mix: TrafficMix
    wall_s: float
    expires_s: float
    certificate: Path | None = None
    control_stopped_s: float | None = None
    redis_answers: bool = True
    classifier_answers: bool = True
    spent: set[str] = field(default_factory=set)
    going_on: list[asyncio.Task[None]] = field(default_factory=list)

    def go_on(self, fault: Coroutine[Any, Any, None]) -> None:
        """Run what a fault keeps doing, until the task is cancelled."""
        self.going_on.append(asyncio.create_task(fault))


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault, begun by `inject`. `code` is what the verdict calls it, and `alert` and those in `also` name
    it. `text` stands in the verdict too, which needs the fault for `seconds`."""

    name: str
    code: str
    alert: str
    text: str
    inject: Callable[[FaultScene], Awaitable[None]]
    seconds: float = 12.0
    also: tuple[str, ...] = ()

    @property
    def alerts(self) -> frozenset[str]:
        """All alerts that name it."""
        return frozenset((self.alert, *self.also))


async def _queueing(scene: FaultScene) -> None:
    scene.mix.rate, scene.mix.shared = 15.0, 0


async def _slow_prefill(scene: FaultScene) -> None:
    # Rare requests, so that none waits for another.
    scene.mix.rate = 0.4
    _slow(scene.cluster, "prefill", 20.0)


async def _slow_transfer(scene: FaultScene) -> None:
    scene.cluster.fabric.stalled.update(each for each in scene.cluster.workers if each.startswith("prefill"))


async def _slow_decode(scene: FaultScene) -> None:
    _slow(scene.cluster, "decode", 20.0)


async def _cold_cache(scene: FaultScene) -> None:
    # Long prompts, which are in time only if most of them is cached, and rare ones, so that none waits.
    scene.mix.rate, scene.mix.prompt, scene.mix.shared = 0.5, 448, 0


async def _stalls(scene: FaultScene) -> None:
    scene.mix.output = _LONG_OUTPUT
    scene.go_on(_stall(scene.cluster))


async def _stall(cluster: Cluster) -> None:
    while True:
        _slow(cluster, "decode", _STALL)
        await cluster.clock.sleep(_STALL_BEGINS_S)
        _slow(cluster, "decode", 1.0)
        await cluster.clock.sleep(_QUICK_S)


async def _moved_streams(scene: FaultScene) -> None:
    # Steps that are just in time, so that what a move takes is too much.
    scene.mix.output = _MOVED_OUTPUT
    _slow(scene.cluster, "decode", _JUST_IN_TIME)
    scene.go_on(_lose_in_turn(scene.cluster))


async def _lose_in_turn(cluster: Cluster) -> None:
    while True:
        for worker_id in sorted(each for each in cluster.workers if each.startswith("decode")):
            lost = await cluster.kill(worker_id)
            await cluster.clock.sleep(_AWAY_S)
            await cluster.revive(lost.endpoint, lost.epoch + 1)
            cluster.faults.slow(worker_id, _JUST_IN_TIME)
            await cluster.clock.sleep(_BACK_S)


async def _fragmented(scene: FaultScene) -> None:
    scene.cluster.faults.fill(_first(scene.cluster, "decode"), True)


async def _bad_worker(scene: FaultScene) -> None:
    scene.cluster.faults.fail(_first(scene.cluster, "decode"), "worker_failed")


async def _greedy_tenant(scene: FaultScene) -> None:
    scene.mix.greedy, scene.mix.shared = 30.0, 0


async def _lost_role(scene: FaultScene) -> None:
    for worker_id in [each for each in scene.cluster.workers if each.startswith("prefill")]:
        await scene.cluster.kill(worker_id)


async def _partition(scene: FaultScene) -> None:
    scene.cluster.faults.partition(_first(scene.cluster, "decode"))


async def _tier(scene: FaultScene) -> None:
    scene.go_on(_failing_disk(scene.cluster, _first(scene.cluster, "prefill")))


async def _failing_disk(cluster: Cluster, worker_id: str) -> None:
    """Report a disk that is read and written, and on which more fails each second."""
    for seconds in itertools.count(1):
        tier = TierLoad(
            Medium.DISK,
            blocks=seconds,
            bytes_used=seconds * _BLOCK_BYTES,
            bytes_capacity=_DISK_BYTES,
            loads=seconds,
            loaded_blocks=seconds,
            loaded_bytes=seconds * _BLOCK_BYTES,
            load_s=seconds * _LOAD_S,
            stored_blocks=seconds,
            stored_bytes=seconds * _BLOCK_BYTES,
            evicted_blocks=seconds,
            corrupt_blocks=seconds,
            dropped_blocks=seconds,
            failures=seconds,
            trouble="the disk is full; free some space",
        )
        cluster.faults.trouble(worker_id, tier)
        await cluster.clock.sleep(1.0)


async def _control_stops(scene: FaultScene) -> None:
    scene.mix.rate = 0.2
    scene.control_stopped_s = scene.cluster.clock.now()


async def _services_stop(scene: FaultScene) -> None:
    scene.redis_answers = scene.classifier_answers = False


async def _failing(scene: FaultScene) -> None:
    for worker_id in scene.cluster.workers:
        scene.cluster.faults.fail(worker_id, "worker_failed")


async def _no_workers(scene: FaultScene) -> None:
    for worker_id in list(scene.cluster.workers):
        await scene.cluster.kill(worker_id)


async def _forgotten_cache(scene: FaultScene) -> None:
    for worker_id in scene.cluster.workers:
        scene.cluster.faults.forget(worker_id, True)
    scene.go_on(_bursts(scene))


async def _bursts(scene: FaultScene) -> None:
    """When the router has noticed, send more prompts than predictions may be kept of, and then few, so that
    those expire."""
    mix, sleep = scene.mix, scene.cluster.clock.sleep
    await sleep(_NOTICED_S)
    while True:
        mix.prompt, mix.shared, mix.rate = _LONG_PROMPT, 0, _BURST
        await sleep(_BURST_S)
        mix.prompt, mix.rate = _PROMPT, _REST
        await sleep(_REST_S)


async def _certificate(scene: FaultScene) -> None:
    # After so long, a budget is spent too.
    scene.spent.add(TENANTS[1])
    scene.expires_s = scene.wall_s + _LEFT_DAYS * _DAY_S
    if scene.certificate is not None:
        write_certificate(scene.certificate, scene.wall_s, scene.expires_s)


FAULTS = (
    InjectedFault("queueing", "queue_wait", "KvasirTtftQueue", "waits", _queueing, also=("KvasirBrownOut",)),
    InjectedFault(
        "slow prefill", "slow_first_tokens", "KvasirTtftPrefill", "computing prompts", _slow_prefill
    ),
    InjectedFault(
        "slow transfer", "slow_first_tokens", "KvasirTtftTransfer", "transferring KV", _slow_transfer
    ),
    InjectedFault("slow decode", "slow_tokens", "KvasirItlBatch", "steps of engines", _slow_decode),
    InjectedFault(
        "cold cache",
        "cold_cache",
        "KvasirHitRateFell",
        "caches of kvasir-tiny are cold",
        _cold_cache,
        64.0,
        also=("KvasirTtftColdCache",),
    ),
    InjectedFault(
        "bad worker", "worker_ejected", "KvasirWorkerUnhealthy", "decode-2 is ejected", _bad_worker
    ),
    InjectedFault("greedy tenant", "greedy_tenant", "KvasirTenantGreedy", "tenant acme has", _greedy_tenant),
    InjectedFault("lost role", "role_lost", "KvasirRoleLost", "none of the right role served", _lost_role),
    InjectedFault(
        "partition", "worker_connecting", "KvasirWorkersDisconnected", "decode-2 is not connected", _partition
    ),
    InjectedFault("tier in trouble", "tier", "KvasirTierTrouble", "the disk tier of worker prefill-0", _tier),
    InjectedFault(
        "old certificate", "certificate_expires", "KvasirCertificateExpires", "in 10 days", _certificate
    ),
    InjectedFault(
        "stalls", "slow_tokens", "KvasirItlStall", "steps of engines", _stalls, also=("KvasirItlUneven",)
    ),
    InjectedFault(
        "moved streams", "slow_tokens", "KvasirItlTransfer", "continuing on other workers", _moved_streams
    ),
    InjectedFault(
        "fragmented KV", "worker_kv_full", "KvasirKvFragmented", "KV memory of decode-2 is full", _fragmented
    ),
    InjectedFault(
        "stopped control",
        "planner_inactive",
        "KvasirPlannerInactive",
        "has not answered",
        _control_stops,
        64.0,
        also=("KvasirDiscoveryStale",),
    ),
    InjectedFault(
        "stopped services",
        "limits_not_shared",
        "KvasirLimitsNotShared",
        "Redis does not answer",
        _services_stop,
        also=("KvasirFiltersFail",),
    ),
    InjectedFault("no workers", "not_ready", "KvasirNoWorkers", "is not served", _no_workers),
    InjectedFault(
        "forgotten caches",
        "stale_index",
        "KvasirHitRateFell",
        "the index does not know what",
        _forgotten_cache,
        70.0,
    ),
    InjectedFault("failing workers", "failing_requests", "KvasirRequestsFail", "worker_failed", _failing),
)


def _slow(cluster: Cluster, pool: str, times: float) -> None:
    for worker_id in cluster.workers:
        if worker_id.startswith(pool):
            cluster.faults.slow(worker_id, times)


def _first(cluster: Cluster, pool: str) -> str:
    return min(each for each in cluster.workers if each.startswith(pool))
