"""Traffic that a fault can change, and faults that an operator has to recognize."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kvasir.config.spec.deployment import (
    AdmissionSpec,
    Deployment,
    EngineSpec,
    GatewaySpec,
    PoolSpec,
    SimSpec,
    SloSpec,
    TenancySpec,
    TenantSpec,
)
from kvasir.config.spec.edge import EdgeTlsSpec
from kvasir.core.kv import Medium, TierLoad
from kvasir.core.requests import Role
from kvasir_platform.sim.cluster import Cluster
from kvasir_workers.engines.sim.model import SimModel

TENANTS = ("acme", "lab")
_PROMPT = 128
_SHARED = 96
_OUTPUT = 4
_VOCABULARY = SimModel().vocab_size
_SEVERAL = 4
CERTIFICATE_DAYS = 60
_PASSED_DAYS = 50


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
        admission=AdmissionSpec(patience=20.0, itl_slack=0.0),
        tenancy=TenancySpec(tenants=tuple(TenantSpec(name=name) for name in TENANTS)),
    )


@dataclass(slots=True)
class FaultScene:
    """What a fault can change: a cluster, the traffic, and Unix time in seconds."""

    cluster: Cluster
    mix: TrafficMix
    wall_s: float


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault, begun by `inject`. `code` is what the verdict calls it, and `alert` names it. `text` stands in
    the verdict too, which needs the fault for `seconds`."""

    name: str
    code: str
    alert: str
    text: str
    inject: Callable[[FaultScene], Awaitable[None]]
    seconds: float = 12.0


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
    scene.mix.shared = 0


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
    trouble = TierLoad(Medium.DISK, trouble="the disk is full; free some space")
    scene.cluster.faults.trouble(_first(scene.cluster, "decode"), trouble)


async def _failing(scene: FaultScene) -> None:
    for worker_id in scene.cluster.workers:
        scene.cluster.faults.fail(worker_id, "worker_failed")


async def _certificate(scene: FaultScene) -> None:
    scene.wall_s += _PASSED_DAYS * 86_400.0


FAULTS = (
    InjectedFault("queueing", "queue_wait", "KvasirTtftQueue", "waits", _queueing),
    InjectedFault(
        "slow prefill", "slow_first_tokens", "KvasirTtftPrefill", "computing prompts", _slow_prefill
    ),
    InjectedFault(
        "slow transfer", "slow_first_tokens", "KvasirTtftTransfer", "transferring KV", _slow_transfer
    ),
    InjectedFault("slow decode", "slow_tokens", "KvasirItlBatch", "steps of engines", _slow_decode),
    InjectedFault(
        "cold cache", "cold_cache", "KvasirHitRateFell", "caches of kvasir-tiny are cold", _cold_cache, 64.0
    ),
    InjectedFault(
        "bad worker", "worker_ejected", "KvasirWorkerUnhealthy", "decode-2 is ejected", _bad_worker
    ),
    InjectedFault("greedy tenant", "greedy_tenant", "KvasirTenantGreedy", "tenant acme has", _greedy_tenant),
    InjectedFault("lost role", "role_lost", "KvasirRoleLost", "none of the right role served", _lost_role),
    InjectedFault(
        "partition", "worker_connecting", "KvasirWorkersDisconnected", "decode-2 is not connected", _partition
    ),
    InjectedFault("tier in trouble", "tier", "KvasirTierTrouble", "the disk tier of worker decode-2", _tier),
    InjectedFault(
        "old certificate", "certificate_expires", "KvasirCertificateExpires", "in 10 days", _certificate
    ),
    InjectedFault("failing workers", "failing_requests", "KvasirRequestsFail", "worker_failed", _failing),
)


def _slow(cluster: Cluster, pool: str, times: float) -> None:
    for worker_id in cluster.workers:
        if worker_id.startswith(pool):
            cluster.faults.slow(worker_id, times)


def _first(cluster: Cluster, pool: str) -> str:
    return min(each for each in cluster.workers if each.startswith(pool))
