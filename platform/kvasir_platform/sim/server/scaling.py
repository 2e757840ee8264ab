"""The planner in a simulated run: it reads the router's demand, and starts and retires simulated workers."""

from __future__ import annotations

from collections.abc import Sequence

from kvasir.config.spec.deployment import Deployment
from kvasir.core.demand import DemandReport
from kvasir.core.errors import ConfigError
from kvasir.ports.scaler import Replica, ReplicaState
from kvasir_platform.planner.loop import ScalingLoop
from kvasir_platform.sim.engine.replica import SIM_MODEL
from kvasir_platform.sim.server.server import ServerSimulation
from kvasir_router.demand import figures_of

REPORT_S = 1.0
_EPOCH = "sim"


class SimulatedScaler:
    """kvasir.ports.scaler.Scaler over the workers of a run."""

    def __init__(self, simulation: ServerSimulation) -> None:
        self._simulation = simulation
        self._pools = {pool.name: pool for pool in simulation.setting.pools}

    def observe(self) -> Sequence[Replica]:
        """See Scaler."""
        return [
            Replica(each.worker_id, each.pool.name, each.state, each.changed_s, each.worker_id)
            for each in self._simulation.workers.values()
        ]

    def start(self, pool: str, count: int) -> None:
        """See Scaler."""
        if pool not in self._pools:
            raise ConfigError(f"there is no pool {pool}; there are {', '.join(self._pools)}")
        for _ in range(count):
            self._simulation.start(self._pools[pool])

    def retire(self, pool: str, replica_ids: Sequence[str]) -> None:
        """See Scaler."""
        for name in replica_ids:
            worker = self._simulation.workers.get(name)
            if worker is not None and worker.pool.name == pool:
                self._simulation.retire(worker)


class SimulatedPlanner:
    """Runs the planner's loop beside a run, with a report of the router every second."""

    def __init__(self, simulation: ServerSimulation, deployment: Deployment) -> None:
        self._simulation = simulation
        self._loop = ScalingLoop(
            deployment, SimulatedScaler(simulation), epoch=_EPOCH, tell=lambda *_args, **_details: None
        )
        self._sequence = 0
        simulation.periodic(REPORT_S, self.step)

    def step(self, now: float) -> None:
        """Report, decide, and assign roles."""
        self._sequence += 1
        word = self._loop.take(self._report(now), now)
        self._loop.step(now)
        fleet = self._simulation.router.fleet
        if word.roles or any(worker.assigned is not None for worker in fleet.workers.values()):
            fleet.assign(word.roles)

    def _report(self, now: float) -> DemandReport:
        router = self._simulation.router
        view = router.admission.view(now)
        waiting = [router.states[request_id] for request_id in router.admission]
        traffic = router.demand.traffic(
            waiting=len(waiting),
            waiting_tokens=sum(len(state.request.tokens) for state in waiting),
            parked=view.parked,
            in_flight=len(router.states),
        )
        fleet = router.fleet
        states = {each.worker_id: each.state for each in self._simulation.workers.values()}
        workers = tuple(
            figures_of(worker, fleet.rates(worker_id))
            for worker_id, worker in fleet.workers.items()
            if states.get(worker_id) is not ReplicaState.STARTING
        )
        return DemandReport("router", _EPOCH, self._sequence, {SIM_MODEL: traffic}, workers)


def planned(simulation: ServerSimulation) -> ServerSimulation:
    """Return the simulation, with the planner beside it if its setting has a deployment."""
    if simulation.setting.deployment is not None:
        SimulatedPlanner(simulation, simulation.setting.deployment)
    return simulation
