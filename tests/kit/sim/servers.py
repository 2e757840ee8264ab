"""Settings of simulated servers for tests: a small model on one GPU, small caches, short traffic."""

from __future__ import annotations

from random import Random

from kvasir.core.requests import Role, SloClass
from kvasir.hardware.gpus import gpu_named
from kvasir.performance.device import device_of
from kvasir.performance.step import EngineModel
from kvasir.performance.work import dense_work
from kvasir.sizing.shape import EngineShape
from kvasir_platform.sim.engine.options import BatchOptions
from kvasir_platform.sim.engine.replica import EngineReplica, ReplicaMemory
from kvasir_platform.sim.server.setting import ServerSetting, SimulatedPool, with_blocks
from kvasir_platform.workload.files import open_workload

SLO = SloClass("default", ttft_s=1.0, itl_s=0.05)


def engine_model(parameters: float = 8e9, tensor: int = 1) -> EngineModel:
    gpu = gpu_named("H100")
    assert gpu is not None
    work = dense_work(parameters=parameters, layers=32, hidden=4096, kv_elements=2048)
    return EngineModel(work, device_of(gpu), EngineShape(tensor=tensor))


def small_pool(
    role: Role,
    replicas: int,
    *,
    blocks: int = 1000,
    options: BatchOptions | None = None,
    start_s: float = 5.0,
) -> SimulatedPool:
    replica = EngineReplica(engine_model(), ReplicaMemory(blocks, 0, 64), options or BatchOptions(most=64))
    return SimulatedPool(role.value, role, replicas, replica, dollars_per_hour=2.0, start_s=start_s)


def server(traffic: str, *pools: SimulatedPool, seed: int = 1, **more: object) -> ServerSetting:
    workload = with_blocks(open_workload(traffic, Random(seed)), pools)
    return ServerSetting(workload, pools, slo=SLO, seed=seed, **more)  # type: ignore[arg-type]
