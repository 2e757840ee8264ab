"""Run one schedule on one cluster in virtual time, and report the promises that broke."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass
from random import Random

from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec, SimSpec
from kvasir.core.errors import KvasirError
from kvasir.core.requests import Delta, Role
from kvasir.ports.clock import Rng
from kvasir.ports.router import RequestSummary
from kvasir_platform.sim.chaos.checks import broken_streams, recovered
from kvasir_platform.sim.chaos.load import Gaps
from kvasir_platform.sim.chaos.schedule import ClusterShape, Fault, FaultKind, Schedule
from kvasir_platform.sim.chaos.trace import ChaosTrace
from kvasir_platform.sim.chaos.workload import ClientRequest, draw_asks
from kvasir_platform.sim.client import ClientStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.core.virtual_loop import VirtualClock, VirtualDeadlock, run_virtual

_ROLES = {"prefill": Role.PREFILL, "decode": Role.DECODE, "both": Role.BOTH}
_BLOCK = 16
_CHUNK = 48
# The time that a stream may take beyond its own: detection, queueing and a few migrations.
_PATIENCE_S = 60.0
# Blocks pinned after all streams ended are free after this time; the sessions of a dead router last longer.
_REST_S = 5.0
# Longer than detection, queueing and the recomputation of a long output; sessions expire later.
_PAUSE_S = 10.0
_GRACE_S = 1.0
_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class ChaosOutcome:
    """The result of a schedule. `broken` names the promises that were not kept, `outcomes` counts requests by
    outcome, and `longest_gap_s` is the longest gap in any stream. Equal histories have equal digests."""

    schedule: Schedule
    digest: str
    events: int
    virtual_s: float
    outcomes: dict[str, int]
    migrations: int
    retries: int
    longest_gap_s: float
    broken: tuple[str, ...]
    story: tuple[str, ...]


def deployment_of(shape: ClusterShape) -> Deployment:
    """The cluster of a schedule. Its engines are slow, so that faults hit running streams; their chunks are
    short, so that most prompts are pulled while they are computed; their caches are small, so that blocks are
    evicted."""
    engine = EngineSpec(
        kind="sim",
        block_size=_BLOCK,
        kv_cache_bytes=4 << 20,
        max_num_batched_tokens=_CHUNK,
        sim=SimSpec(prefill_tokens_per_s=2_000.0, decode_step_s=0.05, transfer_latency_s=0.02),
    )
    pools = tuple(
        PoolSpec(name=pool, role=_ROLES[pool], replicas=len(ids), engine=engine)
        for pool, ids in shape.pools.items()
    )
    return Deployment.model_validate(
        {
            "model": {"max_model_len": 1024},
            "disaggregation": shape.disaggregation,
            "pools": pools,
            "transfer": {"on_failure": shape.on_failure},
            # So few requests would not earn the retries that one bad worker costs until it is ejected.
            "routing": {"retry_budget": 1.0},
        }
    )


def play(schedule: Schedule, *, keep: bool = False) -> ChaosOutcome:
    """Run it. Broken promises are in the result; only errors of the simulation itself are raised. `keep` the
    story."""
    return run_virtual(_Run(schedule, keep=keep).run())


class _Run:
    """One running history."""

    def __init__(self, schedule: Schedule, *, keep: bool) -> None:
        self.schedule = schedule
        self.clock = VirtualClock()
        self.trace = ChaosTrace(self.clock, keep=keep)
        self.cluster = Cluster(
            deployment_of(schedule.shape), self.clock, seed=schedule.seed, on_stream=self._heard
        )
        self.gaps = Gaps(self.clock)
        self.streams: list[ClientStream] = []
        self.cut: set[str] = set()
        self.owners: dict[str, str] = {}
        self.broken: list[str] = []

    async def run(self) -> ChaosOutcome:
        cluster, schedule = self.cluster, self.schedule
        await cluster.start()
        for _ in range(schedule.shape.routers - 1):
            cluster.add_router()
        await cluster.ready()
        watch = asyncio.create_task(self._watch(), name="chaos-watch")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._ask_all(), name="chaos-asks")
                for number, fault in enumerate(schedule.faults):
                    rng = Random(f"{schedule.seed}/fault/{number}")  # noqa: S311 - has to repeat
                    group.create_task(self._fault(fault, rng), name=f"chaos-fault-{number}")
            await self._wind_up()
        except* (AssertionError, VirtualDeadlock, KvasirError) as errors:
            self.broken += [_error_text(error) for error in errors.exceptions]
        finally:
            watch.cancel()
        await cluster.close()
        left = asyncio.all_tasks() - {asyncio.current_task(), watch}
        self.broken += sorted(f"left running: {task.get_name()}" for task in left)
        return self._outcome()

    def _outcome(self) -> ChaosOutcome:
        outcomes: dict[str, int] = {}
        for summary in self.cluster.summaries:
            outcomes[summary.outcome] = outcomes.get(summary.outcome, 0) + 1
        return ChaosOutcome(
            schedule=self.schedule,
            digest=self.trace.digest,
            events=self.trace.events,
            virtual_s=self.clock.now(),
            outcomes=outcomes,
            migrations=sum(summary.migrations for summary in self.cluster.summaries),
            longest_gap_s=max(self.gaps.longest.values(), default=0.0),
            retries=sum(summary.retries for summary in self.cluster.summaries),
            broken=tuple(self.broken),
            story=tuple(self.trace.story),
        )

    def _heard(self, event: Delta | RequestSummary) -> None:
        self.trace.client(event)
        self.gaps(event)

    # -- what happens ----------------------------------------------------------------------------

    async def _ask_all(self) -> None:
        began = self.clock.now()
        for ask in draw_asks(self.schedule):
            await self.clock.sleep(began + ask.at_s - self.clock.now())
            self._ask(ask)

    def _ask(self, ask: ClientRequest) -> None:
        routers = list(self.cluster.routers)
        router_id = routers[ask.router % len(routers)]
        try:
            stream = self.cluster.submit(ask.tokens, ask.sampling, router_id=router_id)
        except KvasirError as error:
            self.broken.append(f"a request was refused with {error.code}: {error.message}")
            return
        request_id = stream.request.request_id
        self.streams.append(stream)
        self.owners[request_id] = router_id
        if ask.leaves_after_s is not None:
            asyncio.get_running_loop().call_later(ask.leaves_after_s, self._leave, stream, router_id)

    def _leave(self, stream: ClientStream, router_id: str) -> None:
        request_id = stream.request.request_id
        router = self.cluster.routers.get(router_id)
        if router is not None and not stream.ended.is_set():
            self.cut.add(request_id)
            self.trace.fault(f"the client of {request_id} leaves")
            router.router.cancel(request_id)

    async def _fault(self, fault: Fault, rng: Rng) -> None:
        await self.clock.sleep(fault.at_s)
        self.trace.fault(str(fault))
        cluster, faults, victim = self.cluster, self.cluster.faults, fault.victim
        routers = list(cluster.routers)
        router_id = routers[fault.router % len(routers)]
        match fault.kind:
            case FaultKind.FREEZE:
                faults.freeze(victim)
                await self.clock.sleep(fault.lasts_s)
                faults.thaw(victim)
            case FaultKind.PARTITION | FaultKind.PARTITION_ROUTER:
                only = router_id if fault.kind is FaultKind.PARTITION_ROUTER else None
                faults.partition(victim, only)
                await self.clock.sleep(fault.lasts_s)
                faults.heal(victim, only)
            case FaultKind.CUT:
                faults.cut(victim)
            case FaultKind.BAD_LINE:
                line = cluster.network.weather(victim)
                line.set(delay_s=fault.amount, jitter_s=fault.amount, bytes_per_s=1e6, rng=rng)
                await self.clock.sleep(fault.lasts_s)
                faults.heal(victim)
            case FaultKind.SLOW:
                faults.slow(victim, fault.amount)
                await self.clock.sleep(fault.lasts_s)
                faults.slow(victim, 1.0)
            case FaultKind.STALE:
                faults.stale(victim, True)
                await self.clock.sleep(fault.lasts_s)
                faults.stale(victim, False)
            case FaultKind.FAIL:
                faults.fail(victim, "worker_overloaded" if rng.random() < 0.5 else "worker_failed")
                await self.clock.sleep(fault.lasts_s)
                faults.fail(victim, None)
            case _:
                await self._life(fault, router_id)
        self.trace.fault(f"over: {fault}")

    async def _life(self, fault: Fault, router_id: str) -> None:
        """Faults that end a process or start one."""
        cluster, victim = self.cluster, fault.victim
        match fault.kind:
            case FaultKind.KILL:
                gone = await cluster.kill(victim)
                await self.clock.sleep(fault.lasts_s)
                await cluster.revive(gone.endpoint, gone.epoch + 1)
            case FaultKind.VANISH:
                gone = cluster.vanish(victim)
                await self.clock.sleep(fault.lasts_s)
                await cluster.revive(gone.endpoint, gone.epoch + 1)
            case FaultKind.RESTART:
                await cluster.faults.restart(victim, _GRACE_S)
            case FaultKind.JOIN:
                await cluster.add(victim)
            case FaultKind.KILL_ROUTER:
                self.cut |= {one for one, owner in self.owners.items() if owner == router_id}
                await cluster.kill_router(router_id)
                await self.clock.sleep(fault.lasts_s)
                cluster.add_router()

    # -- what must hold --------------------------------------------------------------------------

    async def _watch(self) -> None:
        """The invariants hold at all times, not only at the end."""
        while True:
            await self.clock.sleep(_CHECK_S)
            try:
                self.cluster.check()
            except AssertionError as error:
                self.broken.append(f"at {self.clock.now():.3f} s: {_error_text(error)}")
                return

    async def _wind_up(self) -> None:
        deadline = self.clock.now() + _PATIENCE_S
        for stream in self.streams:
            if stream.request.request_id not in self.cut:
                await self._ended(stream, deadline)
        self.broken += broken_streams(self.cluster.deployment, self.streams, frozenset(self.cut))
        if not any(fault.kind is FaultKind.SLOW for fault in self.schedule.faults):
            self.broken += [
                f"{request_id} paused for {gap:.1f} s"
                for request_id, gap in self.gaps.longest.items()
                if gap > _PAUSE_S
            ]
        if missing := await recovered(self.cluster):
            self.broken.append(missing)
        dead = any(fault.kind is FaultKind.KILL_ROUTER for fault in self.schedule.faults)
        window_s = self.cluster.deployment.worker.resume_window_s if dead else 0.0
        await self.cluster.rest(_REST_S + window_s)

    async def _ended(self, stream: ClientStream, deadline: float) -> None:
        try:
            async with asyncio.timeout(deadline - self.clock.now()):
                await stream.ended.wait()
        except TimeoutError:
            self.trace.fault(f"{stream.request.request_id} hangs")


def _error_text(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].name} line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
