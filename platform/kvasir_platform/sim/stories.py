"""Stories: short programs that run on a whole simulated deployment, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec, RoutingSpec, SimSpec, WorkerSpec
from kvasir.core.requests import Role
from kvasir_platform.sim.client import OnStream
from kvasir_platform.sim.cluster import Cluster
from kvasir_platform.sim.core.virtual_loop import VirtualClock, run_virtual

BLOCK = 16


def small_deployment(
    prefill: int = 2,
    decode: int = 2,
    both: int = 0,
    disaggregation: str = "always",
    **routing: Any,
) -> Deployment:
    """Return a deployment with pools of these numbers of simulated workers; `routing` are fields of the
    spec's RoutingSpec."""
    engine = EngineSpec(
        kind="sim",
        block_size=BLOCK,
        kv_cache_bytes=32 << 20,
        sim=SimSpec(prefill_tokens_per_s=20_000.0, decode_step_s=0.004),
    )
    pools = [
        PoolSpec(name=name, role=role, replicas=count, engine=engine)
        for name, role, count in (
            ("prefill", Role.PREFILL, prefill),
            ("decode", Role.DECODE, decode),
            ("both", Role.BOTH, both),
        )
        if count
    ]
    return Deployment.model_validate(
        {
            "disaggregation": disaggregation,
            "pools": tuple(pools),
            "routing": RoutingSpec(**routing),
            "worker": WorkerSpec(resume_window_s=2.0),
        }
    )


def simulate(
    spec: Deployment,
    story: Callable[[Cluster], Awaitable[None]],
    seed: int = 0,
    on_stream: OnStream | None = None,
) -> Cluster:
    """Run `story` on a started cluster, wait until it is idle, and close it. `on_stream` as in Cluster.

    Raises AssertionError if requests, blocks or tasks are left.
    """

    async def main() -> Cluster:
        cluster = Cluster(spec, VirtualClock(), seed=seed, on_stream=on_stream)
        await cluster.start()
        await story(cluster)
        await cluster.rest()
        await cluster.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            raise AssertionError(f"left running: {tasks}")
        return cluster

    return run_virtual(main())
