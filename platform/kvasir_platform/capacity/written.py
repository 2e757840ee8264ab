"""A plan as kvasir.yaml and as values of the Helm chart."""

from __future__ import annotations

import math
from typing import Any

from kvasir.core.requests import Role
from kvasir.hardware.gpus import gpu_named
from kvasir_platform.capacity.pools import Mode
from kvasir_platform.capacity.search import CapacityPlan, PlannedPool, PlanRequest

_PRODUCTS = {
    "GB200": "NVIDIA-GB200", "B200": "NVIDIA-B200", "H200": "NVIDIA-H200", "GH200-96GB": "NVIDIA-GH200-480GB",
    "H100-PCIe": "NVIDIA-H100-PCIe", "H100-NVL": "NVIDIA-H100-NVL", "H100": "NVIDIA-H100-80GB-HBM3",
    "H20": "NVIDIA-H20", "A100-40GB": "NVIDIA-A100-SXM4-40GB", "A100": "NVIDIA-A100-SXM4-80GB",
    "L40S": "NVIDIA-L40S", "L40": "NVIDIA-L40", "L4": "NVIDIA-L4", "A40": "NVIDIA-A40",
    "A10G": "NVIDIA-A10G", "A10": "NVIDIA-A10", "V100-32GB": "Tesla-V100-SXM2-32GB",
    "V100": "Tesla-V100-SXM2-16GB", "T4": "Tesla-T4",
}  # fmt: skip
"""Values of the node label nvidia.com/gpu.product, which NVIDIA's feature discovery sets."""
_TOLERATIONS = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
_CPUS_PER_GPU = 6
_GIB_PER_GPU, _GIB_BASE = 16, 16


def deployment_of(plan: CapacityPlan, request: PlanRequest) -> dict[str, Any]:
    """Return the deployment spec, as plain data."""
    return {"version": "kvasir/v1", "name": _name(request), **_config(plan, request)}


def _name(request: PlanRequest) -> str:
    kept = "".join(letter if letter.isalnum() else "-" for letter in request.model.name.lower())
    return kept.strip("-")[:40].strip("-") or "plan"


def _config(plan: CapacityPlan, request: PlanRequest) -> dict[str, Any]:
    model: dict[str, Any] = {"source": request.model.source, "served_name": request.model.name}
    model["max_model_len"] = request.max_model_len
    shape = plan.pools[0].engine.option.shape
    if shape.quantization != "none":
        model["quantization"] = shape.quantization
    target = request.target
    data: dict[str, Any] = {
        "model": model,
        "disaggregation": "always" if plan.mode is Mode.DISAGGREGATED else "never",
        "pools": [_pool(pool) for pool in plan.pools],
        "slo": [{"name": "default", "ttft_s": target.ttft_s, "itl_s": target.itl_s}],
    }
    if 0.5 < target.attainment < 1.0:
        data["scaling"] = {"attainment": target.attainment}
    return data


def pool_name(pool: PlannedPool) -> str:
    """Return the name of a pool in kvasir.yaml."""
    return "serve" if pool.role in (Role.BOTH, Role.EMBED) else pool.role.value


def _pool(pool: PlannedPool) -> dict[str, Any]:
    option = pool.engine.option
    data: dict[str, Any] = {"name": pool_name(pool), "role": pool.role.value, "replicas": pool.usual}
    if pool.replicas > 1:
        data["scaling"] = {"min": 1, "max": pool.replicas}
    if option.hardware.offered is None:
        data["gpus"] = 0
        data["cpus"] = float(option.devices)
    else:
        data["gpus"] = option.shape.ranks // _nodes(pool)
        # Only the built-in catalogue is known where the spec is checked.
        known = gpu_named(option.hardware.name)
        if known is not None and known.name == option.hardware.name:
            data["gpu"] = known.name
        data["cpus"] = _CPUS_PER_GPU * data["gpus"]
    data["engine"] = _engine(pool)
    return data


def _nodes(pool: PlannedPool) -> int:
    option = pool.engine.option
    return max(1, math.ceil(option.shape.ranks / option.hardware.device.per_node))


def _engine(pool: PlannedPool) -> dict[str, Any]:
    shape, speculation = pool.engine.option.shape, pool.engine.speculation
    data: dict[str, Any] = {
        "block_size": shape.block_size,
        "max_num_seqs": shape.max_num_seqs,
        "max_num_batched_tokens": shape.max_num_batched_tokens,
    }
    for field, value, default in (
        ("tensor_parallel_size", shape.tensor, 1),
        ("pipeline_parallel_size", shape.pipeline, 1),
        ("data_parallel_size", shape.data, 1),
        ("expert_parallel", shape.expert_parallel, False),
        ("nodes", _nodes(pool), 1),
        ("kv_dtype", shape.kv_dtype, "auto"),
    ):
        if value != default:
            data[field] = value
    if shape.data > 1 and _nodes(pool) > 1:
        # Data-parallel ranks on other nodes publish no KV events.
        data["kv_events"] = False
    if speculation is not None and pool.role is not Role.PREFILL:
        data["speculative"] = {"method": "ngram", "tokens": speculation.lookahead}
    return data


def values_of(plan: CapacityPlan, request: PlanRequest, version: str | None) -> dict[str, Any]:
    """Return values of the Helm chart. `version` is that of the worker's image, None for the chart's."""
    gpus = any(pool.engine.option.hardware.offered is not None for pool in plan.pools)
    values: dict[str, Any] = {"config": _config(plan, request)}
    if gpus and version is not None:
        values["images"] = {"worker": {"tag": f"{version}-cuda"}}
    values["pools"] = {pool_name(pool): _pod(pool) for pool in plan.pools}
    if "/" in request.model.source and not request.model.source.startswith("/"):
        values["modelCache"] = {"enabled": True, "size": f"{_cache_gib(plan)}Gi"}
        # The addresses that weights come from are not known, and those of the Hub change.
        values["networkPolicy"] = {"models": {"cidrs": ["0.0.0.0/0", "::/0"]}}
    return values


def _cache_gib(plan: CapacityPlan) -> int:
    option = plan.pools[0].engine.option
    held = sum(option.need.weights) * option.shape.tensor * option.shape.data
    return max(10, math.ceil(1.5 * held / 2**30 / 10) * 10)


def _pod(pool: PlannedPool) -> dict[str, Any]:
    option = pool.engine.option
    if option.hardware.offered is None:
        requested = {
            "cpu": str(option.devices),
            "memory": f"{max(4, option.engine.device.memory_bytes >> 30)}Gi",
        }
        return {"resources": {"requests": requested, "limits": dict(requested)}}
    gpus = option.shape.ranks // _nodes(pool)
    cpus, memory = _CPUS_PER_GPU * gpus, _GIB_BASE + _GIB_PER_GPU * gpus
    pod: dict[str, Any] = {
        "resources": {
            "requests": {"cpu": str(cpus), "memory": f"{memory}Gi"},
            "limits": {"cpu": str(2 * cpus), "memory": f"{memory * 3 // 2}Gi"},
        },
        "sharedMemory": "8Gi" if gpus == 1 else "16Gi",
        "tolerations": _TOLERATIONS,
    }
    if product := _PRODUCTS.get(option.hardware.name):
        pod["nodeSelector"] = {"nvidia.com/gpu.product": product}
    return pod
