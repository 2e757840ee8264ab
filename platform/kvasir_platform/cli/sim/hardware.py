"""Chooses the hardware of each simulated pool: of an option, of the spec, or the default."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvasir.config.load.gpu_catalogue import read_catalogue
from kvasir.config.spec.deployment import CostSpec, Deployment, PoolSpec
from kvasir.core.errors import ConfigError
from kvasir.hardware.gpus import gpu_named
from kvasir.hardware.offers import OfferedGpu, catalogue
from kvasir_platform.capacity.engines import CPU, HardwareChoice, cpu_choice, gpu_choice
from kvasir_platform.capacity.models import PlannedModel
from kvasir_platform.cli.plan.profile import with_profile

GPU = "H100"
_MOST_CORES = 1024


@dataclass(frozen=True, slots=True)
class PoolHardware:
    """`cores` are those of a worker on CPUs. `assumed`: neither an option nor the spec names it."""

    choice: HardwareChoice
    cores: int = 1
    assumed: bool = False


def hardware_of(
    deployment: Deployment, args: argparse.Namespace, model: PlannedModel
) -> dict[str, PoolHardware]:
    """Return the hardware of each pool. Raises ConfigError that says what to correct."""
    known = catalogue() if args.catalogue is None else read_catalogue(args.catalogue)
    found = {pool.name: _of_pool(pool, args, known) for pool in deployment.pools}
    if args.catalogue is None:
        found = {
            name: replace(each, choice=_priced(each.choice, deployment.cost)) for name, each in found.items()
        }
    if args.profile is None:
        return found
    kinds = {each.choice.name: each.choice for each in found.values()}
    measured = {each.name: each for each in with_profile(tuple(kinds.values()), args.profile, model)}
    return {name: _measured(each, measured[each.choice.name], args) for name, each in found.items()}


def _of_pool(pool: PoolSpec, args: argparse.Namespace, known: Sequence[OfferedGpu]) -> PoolHardware:
    if args.gpu is not None:
        name, colon, number = args.gpu.partition(":")
        if name.upper() == CPU:
            return PoolHardware(cpu_choice(), _cores(args.gpu, number) if colon else _own_cores(pool))
        return PoolHardware(gpu_choice(_offered(args.gpu, known)))
    if pool.gpu is not None:
        gpu = gpu_named(pool.gpu)
        return PoolHardware(gpu_choice(_offered(gpu.name if gpu else pool.gpu, known)))
    if pool.gpus == 0:
        return PoolHardware(cpu_choice(), _own_cores(pool))
    return PoolHardware(gpu_choice(_offered(GPU, known)), assumed=args.file is not None)


def _offered(name: str, known: Sequence[OfferedGpu]) -> OfferedGpu:
    found = next((each for each in known if each.name.lower() == name.lower()), None)
    if found is None:
        names = ", ".join(each.name for each in known)
        raise ConfigError(f"--gpu {name} is not in the catalogue: {names}; {CPU}:N is a worker of N cores")
    return found


def _cores(text: str, number: str) -> int:
    if not number.isdecimal() or not 1 <= int(number) <= _MOST_CORES:
        raise ConfigError(f"--gpu {text}: after the colon is the number of cores of a worker, such as CPU:16")
    return int(number)


def _own_cores(pool: PoolSpec) -> int:
    return pool.engine.threads or math.ceil(pool.cpus)


def _priced(choice: HardwareChoice, cost: CostSpec) -> HardwareChoice:
    """Return the hardware at the price that the spec states, if that is in dollars."""
    offered = choice.offered
    price = cost.prices.get("cpu") if offered is None else cost.price_of(offered.gpu)
    if price is None or cost.currency != "USD":
        return choice
    return replace(choice, device=replace(choice.device, dollars_per_hour=price))


def _measured(pool: PoolHardware, choice: HardwareChoice, args: argparse.Namespace) -> PoolHardware:
    if choice.divisible:
        return replace(pool, choice=choice)
    if args.gpu is not None and ":" in args.gpu:
        raise ConfigError(
            f"--gpu {args.gpu}: a worker has as many cores as --profile {args.profile} was measured on; "
            f"write --gpu {CPU}"
        )
    return replace(pool, choice=choice, cores=1)
