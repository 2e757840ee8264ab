"""How many GPUs each replica gets where the spec leaves it to the machine.

A rank computes on one GPU of its own. Where there are fewer GPUs than ranks, two things can be done. Pools
that the spec names share them in equal parts, and each part has as much of the memory. The default pair of
pools becomes one pool instead: on one GPU two engines would hold the weights twice, take turns computing, and
hand KV from the GPU to itself. `gpus` of the spec, or `disaggregation: always`, states another choice.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from kvasir.config.load.aggregated import must_disaggregate, served_whole
from kvasir.config.load.support import Platform
from kvasir.config.spec.deployment import Deployment, PoolSpec

_DIGITS = 4
"""Ray counts GPUs in units of 0.0001."""


@dataclass(frozen=True, slots=True)
class GpuChoice:
    """A deployment whose pools have numbers of GPUs, and in `reason` what was chosen and why, "" if the spec
    left nothing open. `missing` is what keeps the engines from starting, "" if nothing does: then `auto`
    stays."""

    deployment: Deployment
    reason: str = ""
    missing: str = ""


def reserved_gpus(pools: Iterable[PoolSpec]) -> float:
    """Return the GPUs that all replicas of these pools reserve together, the pools at their largest."""
    return round(sum(pool.most * pool.engine.nodes * pool.reserved_gpus for pool in pools), _DIGITS)


def with_chosen_gpus(deployment: Deployment, *, present: int, platform: Platform) -> GpuChoice:
    """Return `deployment` with a number in place of each `gpus: auto`, for engines of the `platform` on a
    machine with `present` GPUs."""
    undecided = [pool for pool in deployment.pools if _is_undecided(pool)]
    if not undecided:
        return GpuChoice(_with_numbers(deployment, {}))
    if platform == "cpu":
        unused = f"{_count(present)} here and not used: vLLM's build for CPUs is installed"
        return GpuChoice(_with_numbers(deployment, {}), unused if present else "")
    if not present:
        names = ", ".join(pool.name for pool in undecided)
        missing = f"vLLM's build for GPUs is installed, and there is no GPU here for {names}"
        return GpuChoice(deployment, missing=missing)
    room = present - reserved_gpus(pool for pool in deployment.pools if pool not in undecided)
    gpus = {pool.name: _one_for_each_rank(pool) for pool in undecided}
    if _wanted(undecided) <= room:
        return GpuChoice(_with_numbers(deployment, gpus), _reason(undecided, gpus, present))
    stated = "pools" in deployment.model_fields_set
    if not stated and not must_disaggregate(deployment, deployment.model.name):
        return _one_pool(deployment, present)
    gpus |= _shares(undecided, room)
    return GpuChoice(_with_numbers(deployment, gpus), _reason(undecided, gpus, present))


def with_whole_gpus(deployment: Deployment, names: Container[str]) -> Deployment:
    """Return `deployment` with one GPU for each rank of the pools of these names, where `auto` leaves their
    number open: for machines of which only the GPU is known."""
    whole = {
        pool.name: _one_for_each_rank(pool)
        for pool in deployment.pools
        if pool.name in names and _is_undecided(pool)
    }
    pools = tuple(
        pool.model_copy(update={"gpus": whole[pool.name]}) if pool.name in whole else pool
        for pool in deployment.pools
    )
    return deployment.model_copy(update={"pools": pools}) if whole else deployment


def _one_for_each_rank(pool: PoolSpec) -> float:
    """Return the GPUs of each node."""
    return float(pool.engine.ranks // pool.engine.nodes)


def _is_undecided(pool: PoolSpec) -> bool:
    return pool.gpus == "auto" and pool.gpu is None and pool.engine.kind == "vllm"


def _one_pool(deployment: Deployment, present: int) -> GpuChoice:
    one = served_whole(deployment, {deployment.model.name})
    (pool,) = one.pools
    return GpuChoice(
        _with_numbers(one, {pool.name: 1.0}),
        f"{_count(present)} here, and prefill and decode apart take 2: pool {pool.name} does both; set "
        "disaggregation: always to divide the GPU between two engines",
    )


def _wanted(pools: Iterable[PoolSpec]) -> int:
    return sum(pool.most * pool.engine.ranks for pool in pools)


def _shares(pools: Sequence[PoolSpec], room: float) -> dict[str, float]:
    """Return equal shares of what is left of `room` GPUs for the pools that can have less than a GPU: of one
    rank, and of a fixed size. Empty if nothing is left for them."""
    sharing = [pool for pool in pools if pool.engine.ranks == 1 and pool.scaling is None and pool.replicas]
    left = room - _wanted(pool for pool in pools if pool not in sharing)
    replicas = _wanted(sharing)
    if not sharing or left <= 0:
        return {}
    # A share is a part of one GPU: several GPUs take as many replicas each.
    share = min(1.0, 1 / math.ceil(replicas / math.floor(left)) if left >= 1 else left / replicas)
    return {pool.name: math.floor(share * 10**_DIGITS) / 10**_DIGITS for pool in sharing}


def _with_numbers(deployment: Deployment, gpus: dict[str, float]) -> Deployment:
    pools = tuple(
        pool.model_copy(update={"gpus": gpus.get(pool.name, pool.reserved_gpus)})
        if pool.gpus == "auto"
        else pool
        for pool in deployment.pools
    )
    return deployment.model_copy(update={"pools": pools})


def _reason(pools: Sequence[PoolSpec], gpus: dict[str, float], present: int) -> str:
    each = ", ".join(
        f"{pool.name} {f'{pool.replicas} x ' if pool.replicas != 1 else ''}{gpus[pool.name]:g}"
        for pool in pools
    )
    if any(gpus[pool.name] < 1 for pool in pools):
        return f"{_count(present)} here, shared in equal parts, as is the memory: {each}"
    return f"{_count(present)} here, one for each rank: {each}"


def _count(present: int) -> str:
    return "1 GPU is" if present == 1 else f"{present} GPUs are"
