"""Reads what is simulated: model, hardware and traffic become the setting of a run.

Flags become a deployment, as a kvasir.yaml would; pools, admission and planner are made from it in either
case.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from kvasir.config.load.gpu_catalogue import read_catalogue
from kvasir.config.load.loader import load
from kvasir.config.spec.deployment import (
    Deployment,
    EngineSpec,
    ModelSpec,
    PoolScalingSpec,
    PoolSpec,
    ScalingSpec,
    SloSpec,
)
from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role, SloClass
from kvasir.hardware.gpus import GIB
from kvasir.hardware.offers import OfferedGpu, catalogue
from kvasir.sizing.shape import EngineShape
from kvasir_platform.capacity.engines import (
    EngineOption,
    HardwareChoice,
    MeasuredTransfer,
    engine_option,
    gpu_choice,
)
from kvasir_platform.capacity.models import PlannedModel
from kvasir_platform.cli.plan.profile import with_profile
from kvasir_platform.cli.plan.read import read_model
from kvasir_platform.cli.sim.arguments import SloText
from kvasir_platform.cli.sim.faults import read_faults
from kvasir_platform.sim.engine.options import Batching, BatchOptions, Preemption, SpeculationOptions
from kvasir_platform.sim.engine.replica import SIM_MODEL, EngineReplica, ReplicaLinks, ReplicaMemory
from kvasir_platform.sim.server.setting import ServerSetting, SimulatedPool, with_blocks
from kvasir_platform.workload.files import load_workload, open_workload
from kvasir_platform.workload.requests import Workload
from kvasir_platform.workload.shapes import reshaped
from kvasir_platform.workload.text import GeneratedSource, parse_workload
from kvasir_router.admission import UNLIMITED
from kvasir_router.admission.from_spec import rules_of

MODEL, CHUNK, SEATS = "llama-3.1-8b", 8192, 256
FRAMES = 240
_TRANSFER_FIXED_S = 0.003
_LEAST_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A run as asked for: its setting, and what it is in words. `at` returns the workload at a multiple of
    its rate."""

    setting: ServerSetting
    about: str
    at: Callable[[float], Workload]


def read_request(args: argparse.Namespace) -> SimRequest:
    """Return what the options ask for. Raises ConfigError that says what to correct."""
    deployment = _deployment(args)
    named = args.model or (deployment.model.source if args.file is not None else MODEL)
    model = read_model(named, None)
    hardware = gpu_choice(_gpu(args.gpu, args.catalogue))
    if args.profile is not None:
        (hardware,) = with_profile((hardware,), args.profile, model)
    workload = open_workload(args.workload, Random(args.seed))  # noqa: S311
    if not workload.requests:
        raise ConfigError(f"--workload {args.workload}: no request: raise duration or rate")
    longest = max(each.prompt_tokens + each.output_tokens for each in workload.requests)
    options = {pool.name: _option(model, hardware, pool, args, longest) for pool in deployment.pools}
    pools = tuple(_pool(pool, options[pool.name], deployment, args) for pool in deployment.pools)
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
    return SimRequest(setting, _about(model, options, setting, args.workload), _rates(args, pools))


def _deployment(args: argparse.Namespace) -> Deployment:
    """Return the deployment of a file with the options on top, or of the options alone. Only its first model
    is simulated."""
    if args.file is not None:
        view = load(args.file, []).views()[0]
        pools = tuple(_overridden(pool, args) for pool in view.pools)
    else:
        view, pools = None, tuple(_pools(args))
    classes = () if view is None else view.slo
    if args.slo is not None or not classes:
        slo = args.slo or SloText()
        classes = (SloSpec(name="default", ttft_s=slo.ttft, itl_s=slo.itl),)
    roles = {pool.role for pool in pools}
    modes = {True: "always", False: "never"} if Role.BOTH not in roles or len(roles) == 1 else {}
    disaggregation = view.disaggregation if view else modes.get(len(roles) > 1, "auto")
    values: dict[str, object] = {
        "model": ModelSpec(source="kvasir-tiny", served_name=SIM_MODEL),
        "disaggregation": disaggregation,
        "slo": classes,
        "pools": pools,
        "scaling": ScalingSpec(start_s=max(1.0, args.start_s)) if view is None else view.scaling,
    }
    if view is not None:
        values |= {"admission": view.admission, "routing": view.routing}
    made = Deployment.model_validate(values)
    return made if args.policy is None else _with_policy(made, args.policy)


def _with_policy(deployment: Deployment, policy: str) -> Deployment:
    routing = type(deployment.routing).model_validate(deployment.routing.model_dump() | {"policy": policy})
    return deployment.model_copy(update={"routing": routing})


def _pools(args: argparse.Namespace) -> list[PoolSpec]:
    sizes = {Role.PREFILL: args.prefill, Role.DECODE: args.decode, Role.BOTH: args.workers}
    if (args.prefill is None) != (args.decode is None):
        raise ConfigError("--prefill and --decode go together: prompts computed apart need both pools")
    if not any(sizes.values()):
        sizes[Role.BOTH] = 4
    least, most = args.autoscale or (1, 1)
    scaling = None if args.autoscale is None else PoolScalingSpec(min=least, max=most)
    engine = EngineSpec(max_num_seqs=args.batch or SEATS, max_num_batched_tokens=args.chunk or CHUNK)
    return [
        _overridden(PoolSpec(name=role.value, role=role, replicas=size, scaling=scaling, engine=engine), args)
        for role, size in sizes.items()
        if size
    ]


def _overridden(pool: PoolSpec, args: argparse.Namespace) -> PoolSpec:
    changes = {
        "tensor_parallel_size": args.tp,
        "max_num_seqs": args.batch,
        "max_num_batched_tokens": args.chunk,
        "kv_dtype": args.kv_dtype,
        "chunked_prefill": False if args.no_chunked_prefill else None,
        "prefix_caching": False if args.no_prefix_cache else None,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    return pool.model_copy(update={"engine": pool.engine.model_copy(update=given)})


def _gpu(name: str, file: Path | None) -> OfferedGpu:
    known = catalogue() if file is None else read_catalogue(file)
    found = next((each for each in known if each.name.lower() == name.lower()), None)
    if found is None:
        raise ConfigError(f"--gpu {name} is not in the catalogue: {', '.join(each.name for each in known)}")
    return found


def _option(
    model: PlannedModel, hardware: HardwareChoice, pool: PoolSpec, args: argparse.Namespace, longest: int
) -> EngineOption:
    engine = pool.engine
    shape = EngineShape(
        max_model_len=max(_LEAST_LENGTH, longest),
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        tensor=engine.tensor_parallel_size,
        pipeline=engine.pipeline_parallel_size,
        data=engine.data_parallel_size,
        expert_parallel=engine.expert_parallel,
        kv_dtype=engine.kv_dtype,
        quantization=args.quantization or "none",
    )
    option = engine_option(model, hardware, shape)
    if not option.fits:
        short = option.fit.missing / GIB
        raise ConfigError(
            f"{model.name} does not fit on {shape.ranks} x {hardware.name}: {short:.1f} GiB are missing; try "
            "a larger --tp, --quantization fp8 or another --gpu"
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
    lookahead = args.speculate or (engine.speculative.tokens if engine.speculative is not None else 0)
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
    replica = replica_of(option, batch, args.block, args.cpu_kv_gib * GIB)
    price = option.dollars_per_hour or None
    return SimulatedPool(pool.name, pool.role, pool.replicas, replica, price, deployment.scaling.start_s)


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
    model: PlannedModel, options: dict[str, EngineOption], setting: ServerSetting, workload: str
) -> str:
    fleet = ", ".join(f"{pool.replicas} x {pool.name} ({options[pool.name].title})" for pool in setting.pools)
    return (
        f"{model.name} on {fleet}; {workload}: {len(setting.workload.requests):,} requests; policy "
        f"{setting.policy}; SLO: TTFT {setting.slo.ttft_s:g} s, {setting.slo.itl_s * 1e3:g} ms per token; "
        f"times by {next(iter(options.values())).engine.coefficients.source}"
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
