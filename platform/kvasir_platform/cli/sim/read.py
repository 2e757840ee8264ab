"""Reads what is simulated: model, hardware and traffic become the setting of a run.

An option comes before the spec, and the spec before a default. Pools, admission and planner are made from the
deployment that results.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from kvasir.config.spec.deployment import Deployment, PoolSpec
from kvasir.core.errors import ConfigError
from kvasir.core.requests import SloClass
from kvasir.hardware.gpus import GIB
from kvasir.sizing.fit import fit
from kvasir.sizing.pools import rank_memory
from kvasir.sizing.shape import EngineShape
from kvasir_platform.capacity.engines import EngineOption, MeasuredTransfer, engine_option
from kvasir_platform.capacity.models import PlannedModel
from kvasir_platform.cli.plan.read import read_model
from kvasir_platform.cli.sim.deployment import read_deployment
from kvasir_platform.cli.sim.faults import read_faults
from kvasir_platform.cli.sim.hardware import GPU, PoolHardware, hardware_of
from kvasir_platform.sim.engine.options import Batching, BatchOptions, Preemption, SpeculationOptions
from kvasir_platform.sim.engine.replica import EngineReplica, ReplicaLinks, ReplicaMemory
from kvasir_platform.sim.server.setting import ServerSetting, SimulatedPool, with_blocks
from kvasir_platform.workload.files import load_workload, open_workload
from kvasir_platform.workload.requests import Workload
from kvasir_platform.workload.shapes import reshaped
from kvasir_platform.workload.text import GeneratedSource, parse_workload
from kvasir_router.admission import UNLIMITED
from kvasir_router.admission.from_spec import rules_of

FRAMES = 240
_TRANSFER_FIXED_S = 0.003


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A run as asked for: its setting, and what it is in words. `note` says what the spec has and the run
    leaves out, "" for nothing. `at` returns the workload at a multiple of its rate."""

    setting: ServerSetting
    about: str
    at: Callable[[float], Workload]
    note: str = ""


def read_request(args: argparse.Namespace) -> SimRequest:
    """Return what settled options ask for. Raises ConfigError that says what to correct."""
    read = read_deployment(args)
    deployment = read.deployment
    model = _model(deployment, args)
    hardware = hardware_of(deployment, args, model)
    workload = open_workload(args.workload, Random(args.seed))  # noqa: S311
    if not workload.requests:
        raise ConfigError(f"--workload {args.workload}: no request: raise duration or rate")
    longest = max(each.prompt_tokens + each.output_tokens for each in workload.requests)
    options = {
        pool.name: _option(model, hardware[pool.name], deployment, pool, longest) for pool in deployment.pools
    }
    pools = tuple(_pool(pool, options[pool.name], deployment, args) for pool in deployment.pools)
    _check_blocks(pools)
    _check_length(pools, longest)
    slo = deployment.slo[0]
    setting = ServerSetting(
        with_blocks(workload, pools),
        pools,
        policy=deployment.routing.policy,
        disaggregation=deployment.disaggregation,
        slo=SloClass(slo.name, slo.ttft_s, slo.itl_s),
        admission=UNLIMITED if args.no_admission else rules_of(deployment),
        deployment=deployment if any(pool.scaling for pool in deployment.pools) else None,
        faults=read_faults(args.faults),
        seed=args.seed,
        frames=FRAMES if args.html is not None else 0,
    )
    policy = f"policies {args.policies}" if args.action == "compare" else f"policy {setting.policy}"
    about = _about(model, options, setting, args.workload, policy)
    assumed = [name for name, each in hardware.items() if each.assumed]
    if assumed:
        about += (
            f"; {args.file} names no gpu for {', '.join(assumed)}: {GPU} is assumed, unless --gpu names one"
        )
    left_out = list(read.left_out)
    length = deployment.model.max_model_len
    if args.file is not None and length != "auto" and longest > length:
        left_out.append(f"model.max_model_len {length} (the longest request has {longest} tokens)")
    if (cost := deployment.cost).prices and cost.currency != "USD":
        left_out.append(f"cost.prices, which are in {cost.currency} (costs are at list prices, in USD)")
    note = f"not simulated of {args.file}: {', '.join(left_out)}" if left_out else ""
    return SimRequest(setting, about, _rates(args, pools), note)


def _model(deployment: Deployment, args: argparse.Namespace) -> PlannedModel:
    source = deployment.model.source
    try:
        model = read_model(source, None)
    except ConfigError as error:
        if args.file is None or args.model is not None:
            raise
        raise ConfigError(f"model.source of {args.file}: {error}; --model takes the place of it") from error
    if model.embeds or deployment.embeds:
        raise ConfigError(
            f"{model.name} computes embeddings, and `kvasir sim` plays models that generate; "
            f"`kvasir plan {source}` sizes pools for it"
        )
    return model


def _option(
    model: PlannedModel, hardware: PoolHardware, deployment: Deployment, pool: PoolSpec, longest: int
) -> EngineOption:
    engine, served = pool.engine, deployment.model
    length = (model.config.max_positions or 0) if served.max_model_len == "auto" else served.max_model_len
    shape = EngineShape(
        max_model_len=max(length, longest),
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        block_size=engine.block_size,
        tensor=engine.tensor_parallel_size,
        pipeline=engine.pipeline_parallel_size,
        data=engine.data_parallel_size,
        expert_parallel=engine.expert_parallel,
        dtype=served.dtype,
        kv_dtype=engine.kv_dtype,
        quantization=served.quantization,
    )
    on_cpu = hardware.choice.offered is None
    if on_cpu and shape.ranks > 1:
        raise ConfigError(
            f"{pool.name}: a worker on CPUs is simulated as one rank; set --tp 1 and pipeline and data "
            "parallel sizes of 1, and give it more cores, as --gpu CPU:16"
        )
    option = engine_option(model, hardware.choice, shape, cores=hardware.cores)
    memory = rank_memory(pool, option.engine.device.memory_bytes)
    option = replace(option, fit=fit(option.need, memory))
    if not option.fits:
        short = option.fit.missing / GIB
        remedy = (
            "more cores, as --gpu CPU:16" if on_cpu else "a larger --tp, --quantization fp8 or another --gpu"
        )
        raise ConfigError(
            f"{model.name} does not fit on {option.title}: {short:.1f} GiB are missing; try {remedy}"
        )
    return option


def replica_of(
    option: EngineOption, batch: BatchOptions, block: int, cpu_bytes: float = 0.0
) -> EngineReplica:
    """Return the simulated replica of an engine, with the KV memory that is left on its devices."""
    model, device = option.engine, option.engine.device
    ranks = option.shape.ranks
    offer = option.hardware.offer
    token = max(1.0, model.kv_token_bytes())
    moved = option.hardware.transfer or MeasuredTransfer(
        _TRANSFER_FIXED_S, 1.0 / (ranks * device.network_bytes_per_s * model.coefficients.link)
    )
    return EngineReplica(
        model,
        ReplicaMemory(max(1, option.fit.tokens // block), int(cpu_bytes / (token * block)), block),
        batch,
        ReplicaLinks(
            cpu_byte_s=1.0 / (ranks * offer.pcie_bytes_per_s * model.coefficients.link),
            fixed_s=moved.fixed_s,
            byte_s=moved.byte_s,
        ),
    )


def _pool(
    pool: PoolSpec, option: EngineOption, deployment: Deployment, args: argparse.Namespace
) -> SimulatedPool:
    engine = pool.engine
    lookahead = args.speculate
    if lookahead is None:
        lookahead = 0 if engine.speculative is None else engine.speculative.tokens
    speculation = SpeculationOptions(args.acceptance, lookahead, args.draft_cost) if lookahead else None
    batch = BatchOptions(
        batching=Batching(args.batching),
        most=engine.max_num_seqs,
        step_tokens=engine.max_num_batched_tokens,
        wait_s=args.batch_wait,
        chunked=engine.chunked_prefill,
        prefix_cache=engine.prefix_caching,
        preemption=Preemption(args.preemption),
        speculation=speculation,
    )
    replica = replica_of(option, batch, engine.block_size, _cpu_bytes(pool, deployment, args))
    price = option.dollars_per_hour or None
    return SimulatedPool(pool.name, pool.role, pool.replicas, replica, price, deployment.scaling.start_s)


def _cpu_bytes(pool: PoolSpec, deployment: Deployment, args: argparse.Namespace) -> float:
    if args.cpu_kv_gib is not None:
        return float(args.cpu_kv_gib * GIB)
    tiers = deployment.tiers
    return float(tiers.memory.bytes * pool.engine.data_parallel_size) if tiers.configured else 0.0


def _check_blocks(pools: tuple[SimulatedPool, ...]) -> None:
    sizes = sorted({pool.replica.memory.block_tokens for pool in pools})
    if len(sizes) > 1:
        raise ConfigError(
            f"pools have KV blocks of {sizes[0]} and {sizes[-1]} tokens, and a run has one size: set --block"
        )


def _check_length(pools: tuple[SimulatedPool, ...], longest: int) -> None:
    for pool in pools:
        memory = pool.replica.memory
        # One block for the rest of the prompt, and what a step of speculation may add.
        room = memory.blocks * memory.block_tokens
        if longest + 2 * memory.block_tokens + 32 > room:
            raise ConfigError(
                f"a request of {longest:,} tokens does not fit in the {room:,} tokens of KV that a worker of "
                f"{pool.name} has; a larger --tp or another --gpu has more"
            )


def _about(
    model: PlannedModel, options: dict[str, EngineOption], setting: ServerSetting, workload: str, policy: str
) -> str:
    sources = dict.fromkeys(option.engine.coefficients.source for option in options.values())
    fleet = ", ".join(f"{pool.replicas} x {pool.name} ({options[pool.name].title})" for pool in setting.pools)
    return (
        f"{model.name} on {fleet}; {workload}: {len(setting.workload.requests):,} requests; "
        f"{policy}; SLO: TTFT {setting.slo.ttft_s:g} s, {setting.slo.itl_s * 1e3:g} ms per token; "
        f"times by {' and '.join(sources)}"
    )


def _rates(args: argparse.Namespace, pools: tuple[SimulatedPool, ...]) -> Callable[[float], Workload]:
    """Return the workload by a multiple of its rate: generated anew, or a trace at another speed."""
    source = parse_workload(args.workload)

    def at(factor: float) -> Workload:
        rng = Random(args.seed)  # noqa: S311
        if isinstance(source, GeneratedSource) and source.shape.arrivals != "ramp":
            shape = reshaped(source.shape, rate=source.shape.rate * factor)
            return with_blocks(load_workload(replace(source, shape=shape), rng), pools)
        return with_blocks(load_workload(source, rng), pools).sped_up(factor)

    return at
