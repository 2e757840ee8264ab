"""What is simulated: pools, traffic, faults, and the rules of router and planner."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from kvasir.config.spec.deployment import Deployment
from kvasir.core.requests import DEFAULT_SLO, Role, SloClass
from kvasir_platform.sim.engine.replica import EngineReplica
from kvasir_platform.workload.requests import Workload
from kvasir_router.admission import UNLIMITED, AdmissionRules


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """`replicas` workers of one role at the start. `dollars_per_hour` is the price of a replica, None where
    no price is known; a replica that is asked for serves after `start_s` seconds."""

    name: str
    role: Role
    replicas: int
    replica: EngineReplica
    dollars_per_hour: float | None = None
    start_s: float = 60.0


class FleetFaultKind(StrEnum):
    """CRASH: the worker is lost with all that runs on it, and another one starts. SLOW: its steps take
    longer. DRAIN: it ends what runs, and leaves."""

    CRASH = "crash"
    SLOW = "slow"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class FleetFault:
    """What happens to worker number `worker`, counted over all pools from 0, at `at_s`: a crashed one is
    replaced after `lasts_s`, a slow one takes `factor` times as long for `lasts_s`."""

    at_s: float
    kind: FleetFaultKind
    worker: int
    lasts_s: float = 60.0
    factor: float = 3.0


@dataclass(frozen=True, slots=True)
class ServerSetting:
    """A run. The workload's blocks are those of the engines. `deployment` is what the planner reads; None
    leaves the pools as they are. `report_delay_s` is how long messages of workers take to the router, and
    `detect_s` how long it takes to notice a lost worker."""

    workload: Workload
    pools: tuple[SimulatedPool, ...]
    policy: str = "cost"
    disaggregation: str = "auto"
    slo: SloClass = DEFAULT_SLO
    admission: AdmissionRules = UNLIMITED
    deployment: Deployment | None = None
    faults: tuple[FleetFault, ...] = ()
    seed: int = 1
    report_delay_s: float = 0.005
    detect_s: float = 0.5
    predicted_ttl_s: float = 120.0
    frames: int = 0

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, which all engines share."""
        return self.pools[0].replica.memory.block_tokens

    @property
    def expected_output(self) -> int:
        """What the router expects of a request: the mean of the workload."""
        requests = self.workload.requests
        return max(1, round(self.workload.output_tokens / max(1, len(requests))))

    def with_policy(self, policy: str) -> ServerSetting:
        """The same run under another routing policy."""
        return replace(self, policy=policy)

    def largest(self) -> ServerSetting:
        """The same run with pools as large as the planner may make them."""
        specs = {} if self.deployment is None else {pool.name: pool.scaling for pool in self.deployment.pools}
        most = {name: scaling.max for name, scaling in specs.items() if scaling is not None}
        return replace(
            self,
            pools=tuple(
                replace(pool, replicas=max(pool.replicas, most.get(pool.name, 0))) for pool in self.pools
            ),
        )


def with_blocks(workload: Workload, pools: tuple[SimulatedPool, ...]) -> Workload:
    """Return the workload with blocks of the engines' size."""
    return workload.with_blocks_of(pools[0].replica.memory.block_tokens)


@dataclass(frozen=True, slots=True)
class RunLimits:
    """Bounds of a run: virtual seconds after the last arrival, and events."""

    tail_s: float = 3600.0
    events: int = 500_000_000


LIMITS: RunLimits = RunLimits()


@dataclass(slots=True)
class SimCounters:
    """What happened in a run, beside the requests' own figures."""

    refused: dict[str, int] = field(default_factory=dict)
    failovers: int = 0
    decisions: int = 0
    starts: int = 0
    retired: int = 0
