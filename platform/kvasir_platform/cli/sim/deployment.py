"""Reads the deployment of a simulation: a kvasir.yaml with the options on top, or the options alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

from kvasir.config.load.loader import load
from kvasir.config.spec.deployment import (
    Deployment,
    EngineSpec,
    ModelSpec,
    PoolScalingSpec,
    PoolSpec,
    ScalingSpec,
    SloSpec,
    TenancySpec,
)
from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role
from kvasir_platform.cli.sim.arguments import SloText
from kvasir_platform.sim.engine.replica import SIM_MODEL

MODEL, CHUNK, SEATS, BLOCK, WORKERS = "llama-3.1-8b", 8192, 256, 64, 4
_NOT_PLAYED = {
    "models": "models after the first",
    "lora": "lora",
    "lora_loading": "lora_loading",
    "routes": "routes",
    "regions": "regions",
    "tenancy": "tenancy",
    "transfer": "transfer",
    "performance": "performance",
    "output_filters": "output_filters",
}
"""Fields of the spec on which times or decisions depend in production only."""


@dataclass(frozen=True, slots=True)
class SimDeployment:
    """`deployment` has one model. `left_out` names what the file has and no run plays."""

    deployment: Deployment
    left_out: tuple[str, ...] = ()


def read_deployment(args: argparse.Namespace) -> SimDeployment:
    """Return what the options deploy. Raises ConfigError that says what to correct."""
    left_out: tuple[str, ...] = ()
    if args.file is None:
        made = _of_options(args)
    else:
        spec = load(args.file, [])
        view = spec.views()[0]
        made, left_out = _on_top(view, args), tuple(_left_out(spec, view, args))
    pools = tuple(_overridden(pool, args) for pool in _sized(made.pools, args))
    made = made.model_copy(update={"pools": pools})
    return SimDeployment(made if args.policy is None else _with_policy(made, args.policy), left_out)


def _of_options(args: argparse.Namespace) -> Deployment:
    pools = tuple(_pools(args))
    roles = {pool.role for pool in pools}
    modes = {True: "always", False: "never"} if Role.BOTH not in roles or len(roles) == 1 else {}
    slo = args.slo or SloText()
    values: dict[str, object] = {
        "model": ModelSpec(
            source=args.model or MODEL, served_name=SIM_MODEL, quantization=args.quantization or "none"
        ),
        "disaggregation": modes.get(len(roles) > 1, "auto"),
        "slo": (SloSpec(name="default", ttft_s=slo.ttft, itl_s=slo.itl),),
        "pools": pools,
        "scaling": ScalingSpec(start_s=60.0 if args.start_s is None else max(1.0, args.start_s)),
    }
    return Deployment.model_validate(values)


def _pools(args: argparse.Namespace) -> Iterator[PoolSpec]:
    sizes = {Role.PREFILL: args.prefill, Role.DECODE: args.decode, Role.BOTH: args.workers}
    if (args.prefill is None) != (args.decode is None):
        raise ConfigError("--prefill and --decode go together: prompts computed apart need both pools")
    if not any(sizes.values()):
        sizes[Role.BOTH] = WORKERS
    engine = EngineSpec(block_size=BLOCK, max_num_seqs=SEATS, max_num_batched_tokens=CHUNK)
    for role, size in sizes.items():
        if size:
            yield PoolSpec(name=role.value, role=role, replicas=size, engine=engine)


def _on_top(view: Deployment, args: argparse.Namespace) -> Deployment:
    """Return the view of the file's first model with the options that replace its own."""
    given = {"source": args.model, "quantization": args.quantization}
    model = {name: value for name, value in given.items() if value is not None}
    changes: dict[str, object] = {
        "model": view.model.model_copy(update=model | {"served_name": SIM_MODEL}),
        # Requests of a workload are all of one tenant.
        "tenancy": TenancySpec(priorities=view.tenancy.priorities),
    }
    if args.slo is not None:
        changes["slo"] = (SloSpec(name="default", ttft_s=args.slo.ttft, itl_s=args.slo.itl),)
    if args.start_s is not None:
        changes["scaling"] = view.scaling.model_copy(update={"start_s": max(1.0, args.start_s)})
    return view.model_copy(update=changes)


def _left_out(spec: Deployment, view: Deployment, args: argparse.Namespace) -> Iterator[str]:
    for field, title in _NOT_PLAYED.items():
        if field in spec.model_fields_set:
            yield title
    for tier in ("disk", "redis"):
        if getattr(view.tiers, tier) is not None:
            yield f"tiers.{tier}"
    if len(view.slo) > 1 and args.slo is None:
        yield "slo classes after the first"
    if any(pool.engine.kind == "sim" for pool in view.pools):
        yield "times of engine.sim"
    if any(0 < pool.reserved_gpus * pool.engine.nodes < pool.engine.ranks for pool in view.pools):
        yield "the speed of a shared GPU (gpus below 1)"


def _sized(pools: tuple[PoolSpec, ...], args: argparse.Namespace) -> Iterator[PoolSpec]:
    options = {
        Role.BOTH: ("--workers", args.workers),
        Role.PREFILL: ("--prefill", args.prefill),
        Role.DECODE: ("--decode", args.decode),
    }
    for role, (option, size) in options.items():
        if size is not None and role not in {pool.role for pool in pools}:
            names = ", ".join(f"{pool.name} ({pool.role.value})" for pool in pools)
            raise ConfigError(f"{option}: no pool of {args.file} has the role {role.value}: {names}")
    for pool in pools:
        _, size = options.get(pool.role, ("", None))
        replicas = pool.replicas if size is None else size
        bounds = pool.scaling
        if args.autoscale is not None:
            bounds = PoolScalingSpec(min=args.autoscale[0], max=args.autoscale[1])
        if bounds is not None and not bounds.min <= replicas <= bounds.max:
            raise ConfigError(
                f"{pool.name} starts with {replicas}, outside of the bounds {bounds.min} to {bounds.max}; "
                "choose others with --autoscale MIN:MAX, or another number of workers"
            )
        yield pool.model_copy(update={"replicas": replicas, "scaling": bounds})


def _overridden(pool: PoolSpec, args: argparse.Namespace) -> PoolSpec:
    changes = {
        "tensor_parallel_size": args.tp,
        "max_num_seqs": args.batch,
        "max_num_batched_tokens": args.chunk,
        "block_size": args.block,
        "kv_dtype": args.kv_dtype,
        "chunked_prefill": False if args.no_chunked_prefill else None,
        "prefix_caching": False if args.no_prefix_cache else None,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    return pool.model_copy(update={"engine": pool.engine.model_copy(update=given)})


def _with_policy(deployment: Deployment, policy: str) -> Deployment:
    routing = type(deployment.routing).model_validate(deployment.routing.model_dump() | {"policy": policy})
    return deployment.model_copy(update={"routing": routing})
