"""Checks whether vLLM has kernels for a model on this machine's CPU."""

from __future__ import annotations

from collections.abc import Iterator

from kvasir.config.checks.cpu_kernels import (
    CpuKind,
    ExpertWeights,
    kernel_problem,
    kv_dtype_on_cpu_problem,
    loses_prefixes,
)
from kvasir.config.spec.deployment import Deployment
from kvasir.sizing.weights import WeightKind
from kvasir_platform.cluster.preflight.finding import Finding
from kvasir_platform.cluster.preflight.machine_facts import ModelProbe


def cpu_kernel_findings(view: Deployment, model: ModelProbe, cpu: CpuKind) -> Iterator[Finding]:
    """Yield what the CPU cannot compute for the model of `view`."""
    pools = [pool for pool in view.pools if pool.engine.kind == "vllm"]
    if model.config is None or not pools:
        return
    name = view.model.name
    experts = _experts(model)
    if problem := kernel_problem(
        view.model.quantization, model.config.quantization, experts=experts, cpu=cpu
    ):
        message, remedy = problem
        yield Finding("model", "error", f"{name}: {message}", remedy)
    for pool in pools:
        if problem := kv_dtype_on_cpu_problem(pool.engine.kv_dtype, cpu):
            message, remedy = problem
            yield Finding("model", "error", f"{name}, pool {pool.name}: {message}", remedy)
    cached = [pool.name for pool in pools if pool.engine.prefix_caching]
    if cached and loses_prefixes(model.config.architectures):
        yield Finding(
            "model",
            "warning",
            f"{name} is served without a prefix cache: on a CPU vLLM cannot keep the states that one needs",
            "; ".join(f"set pools.{each}.engine.prefix_caching: false, to state it" for each in cached),
        )


def _experts(model: ModelProbe) -> ExpertWeights:
    parts = [part for part in model.weights if part.kind is WeightKind.EXPERT]
    if not parts:
        return "none"
    return "packed" if any(part.fixed or part.packed for part in parts) else "plain"
