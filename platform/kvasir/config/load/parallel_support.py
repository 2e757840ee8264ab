"""Checks that a model's experts can be divided as a pool divides them, and that the kernels for it are here.

vLLM asserts most of this in its ranks, when the weights are being loaded.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator

from kvasir.checkpoint.model_config import ModelConfig
from kvasir.checkpoint.numbers import EXPERTS, count
from kvasir.config.checks.all2all import lacking_kernels
from kvasir.config.spec.deployment import PoolSpec

_UNEVEN_BACKENDS = (None, "allgather_reducescatter")
"""Backends whose ranks may have different numbers of experts."""


def has_module(name: str) -> bool:
    """Whether a Python module is installed; it is not imported."""
    return importlib.util.find_spec(name) is not None


def missing_kernels(pools: Iterable[PoolSpec], has: Callable[[str], bool] = has_module) -> list[str]:
    """Return the kernels that `pools` name and that are not installed, each as `field: reason; remedy`. `has`
    says whether a Python module is installed where the engines run."""
    found = []
    for pool in pools:
        backend = pool.engine.all2all_backend
        if pool.engine.kind != "vllm" or backend is None:
            continue
        if (lacking := lacking_kernels(backend, has)) is not None:
            found.append(f"pools.{pool.name}.engine.all2all_backend: {lacking}")
    return found


def expert_problems(pool: PoolSpec, config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield why the engines of `pool` cannot divide the experts of the model with `config`, each with a
    remedy."""
    engine, at = pool.engine, f"pools.{pool.name}.engine"
    if engine.kind != "vllm":
        return
    experts = count(config.text, *EXPERTS)
    if not experts:
        yield from _dense(pool)
        return
    if not pool.reserved_gpus and engine.data_parallel_size > 1:
        yield (
            f"{at}.data_parallel_size: vLLM's CPU kernels cannot exchange the tokens of experts between "
            "data-parallel ranks",
            "set it to 1 and use more replicas",
        )
    if not engine.expert_parallel:
        return
    ranks, copies = engine.expert_ranks, 0 if engine.eplb is None else engine.eplb.redundant_experts
    if experts < ranks:
        yield (
            f"{at}.expert_parallel: the model has {experts} experts in a layer for {ranks} tensor x data "
            "parallel ranks, so that some would have none",
            f"divide it among {experts} ranks or fewer and use more replicas, or leave expert_parallel off",
        )
    elif (experts + copies) % ranks and engine.eplb is not None:
        even = copies + -(experts + copies) % ranks
        yield (
            f"{at}.eplb.redundant_experts: {experts} experts and {copies} copies do not divide equally among "
            f"{ranks} tensor x data parallel ranks",
            f"set redundant_experts to {even}",
        )
    elif (experts + copies) % ranks and engine.all2all_backend not in _UNEVEN_BACKENDS:
        even = -experts % ranks
        yield (
            f"{at}.all2all_backend: {engine.all2all_backend} needs as many experts on each rank, and "
            f"{experts} do not divide equally among {ranks} tensor x data parallel ranks",
            f"set eplb: {{redundant_experts: {even}}}, or all2all_backend: allgather_reducescatter",
        )


def _dense(pool: PoolSpec) -> Iterator[tuple[str, str]]:
    engine, at = pool.engine, f"pools.{pool.name}.engine"
    if engine.expert_parallel:
        yield (f"{at}.expert_parallel: the model has no experts", "leave it off")
    if engine.nodes > 1 and engine.data_parallel_size > 1:
        yield (
            f"{at}.data_parallel_size: {engine.data_parallel_size} ranks over {engine.nodes} nodes, and "
            "data-parallel ranks of a model without experts have nothing to exchange",
            "set it to 1, with as many nodes as one rank needs, and use more replicas",
        )
