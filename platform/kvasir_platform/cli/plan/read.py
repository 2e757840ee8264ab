"""Reads what a plan is made from: the model, the load, hardware and prices, measurements."""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvasir.checkpoint.model_config import ModelConfig, read_model_config
from kvasir.core.errors import ConfigError
from kvasir.hardware.offers import OfferedGpu, catalogue
from kvasir.performance.speculation import Speculation
from kvasir_platform.capacity.assumed import cautious
from kvasir_platform.capacity.engines import CPU, HardwareChoice, cpu_choice, gpu_choice
from kvasir_platform.capacity.known_models import KNOWN_MODELS
from kvasir_platform.capacity.models import PlannedModel, known_model, planned_model
from kvasir_platform.capacity.pools import Mode, ServiceTarget
from kvasir_platform.capacity.precisions import computes_int8, precisions
from kvasir_platform.capacity.search import PlanRequest
from kvasir_platform.capacity.traffic import (
    LengthSpread,
    RequestLengths,
    TrafficProfile,
    observed_traffic,
    stated_traffic,
)
from kvasir_platform.cli.plan.profile import with_profile
from kvasir_platform.workload.files import open_workload
from kvasir_platform.workload.requests import Workload

_SEED = 1
_PEAK = 2.0
"""Peak over mean, if it is not given: a usual day."""
_LENGTH_UNIT = 1024


def read_request(args: argparse.Namespace) -> PlanRequest:
    """Return what the options ask for. Raises ConfigError that says what to correct."""
    model = read_model(args.model, args.config)
    traffic = read_traffic(args, embeds=model.embeds)
    length = _length(args.max_model_len, traffic, model)
    modes = {
        "auto": (Mode.AGGREGATED, Mode.DISAGGREGATED),
        "aggregated": (Mode.AGGREGATED,),
        "disaggregated": (Mode.DISAGGREGATED,),
    }[args.mode]
    slo = args.slo
    hardware = read_hardware(args.gpus, args.catalogue)
    if args.gpus is None and args.quantization == "int8":
        hardware = tuple(filter(computes_int8, hardware))
    if args.profile is not None:
        hardware = with_profile(hardware, args.profile, model)
    if args.cautious:
        hardware = tuple(replace(each, assumed=cautious(each.assumed)) for each in hardware)
    request = PlanRequest(
        model,
        hardware,
        traffic,
        ServiceTarget(slo.ttft, slo.itl, slo.attainment),
        length,
        modes=(Mode.EMBEDDING,) if model.embeds else modes,
        speculation=Speculation(args.acceptance, args.speculate) if args.speculate else None,
        link_bytes_per_s=(args.network_gbps or 0.0) * 1e9 / 8,
    )
    chosen = precisions(model, hardware, quantization=args.quantization, kv_dtype=args.kv_dtype)
    return replace(request, precisions=chosen)


def read_model(name: str | None, config: Path | None) -> PlannedModel:
    """Return the model: from config.json alone, from files, of a known shape, or from the Hub."""
    if config is not None and name is None:
        return _planned(config.parent.name or "model", str(config.parent.resolve()), _config(config))
    if name is None or config is not None:
        known_names = ", ".join(KNOWN_MODELS)
        raise ConfigError(f"name either a model or --config FILE; known without a network: {known_names}")
    if not Path(name).exists() and (known := known_model(name)) is not None:
        return known
    # It takes a fifth of a second to import, and known shapes do without.
    from kvasir_platform.cluster.preflight.probe import probe_model

    probe = probe_model(name, "main")
    if probe.config is None:
        reason = probe.problem or probe.unknown or "it is not in the cache, and HF_HUB_OFFLINE is set"
        raise ConfigError(f"{name}: {reason}; known without a network: {', '.join(KNOWN_MODELS)}")
    local = Path(name).exists()
    short = (Path(name).resolve().name if local else name).rsplit("/", 1)[-1]
    return planned_model(short, str(Path(name).resolve()) if local else name, probe.config, probe.weights)


def _config(path: Path) -> ModelConfig:
    if path.name != "config.json":
        raise ConfigError(f"--config {path}: the file of a model is called config.json; name that one")
    return read_model_config(path.parent)


def _planned(name: str, source: str, config: ModelConfig) -> PlannedModel:
    made = planned_model(name, source, config)
    if not made.work.layers or not made.work.hidden or not made.work.parameters:
        raise ConfigError(
            f"{config.folder}/config.json has no layers or no hidden size: it is no language model"
        )
    return made


def read_traffic(args: argparse.Namespace, *, embeds: bool) -> TrafficProfile:
    """Return the load: of a workload, or as stated."""
    stated = [
        option
        for option in ("rate", "prompt_tokens", "output_tokens", "prefix_share", "burstiness")
        if getattr(args, option) is not None
    ]
    if args.workload is not None:
        if stated:
            option = stated[0].replace("_", "-")
            raise ConfigError(f"--workload and --{option} both describe the load; leave one out")
        found = _observed(open_workload(args.workload, random.Random(_SEED)), embeds=embeds)  # noqa: S311
    else:
        prompt, output = args.prompt_tokens, args.output_tokens
        rate = args.rate or 1.0
        found = stated_traffic(
            rate=rate,
            peak=rate * _PEAK,
            prompt=LengthSpread(1000, 1000) if prompt is None else LengthSpread(prompt.median, prompt.p95),
            output=None
            if embeds
            else LengthSpread(250, 250)
            if output is None
            else LengthSpread(output.median, output.p95),
            prefix_share=args.prefix_share or 0.0,
            burstiness=args.burstiness or 1.0,
        )
    if args.peak is None:
        return found
    if args.peak < found.rate:
        raise ConfigError(f"--peak {args.peak:g} is below the mean of {found.rate:g} requests per second")
    if args.peak > 20 * found.rate:
        raise ConfigError(f"--peak {args.peak:g} is over 20 times the mean of {found.rate:g}; raise --rate")
    return replace(found, peak=args.peak)


def _observed(workload: Workload, *, embeds: bool) -> TrafficProfile:
    if len(workload.requests) < 2:
        raise ConfigError(f"workload {workload.name}: two requests are the least that have a rate")
    seen: set[int] = set()
    lengths = []
    for each in workload.requests:
        depth = next((i for i, name in enumerate(each.names) if name not in seen), len(each.names))
        seen.update(each.names)
        cached = min(depth * workload.block_tokens, each.prompt_tokens - 1)
        lengths.append(
            RequestLengths(each.prompt_tokens, cached, 0 if embeds else max(1, each.output_tokens))
        )
    arrivals = [each.arrival_s for each in workload.requests]
    return observed_traffic(workload.name or "trace", arrivals, lengths, embeds=embeds)


def _length(stated: int | None, traffic: TrafficProfile, model: PlannedModel) -> int:
    most = model.config.max_positions
    if stated is not None:
        if most is not None and stated > most:
            raise ConfigError(f"--max-model-len {stated}: {model.name} has {most} positions")
        if stated < traffic.longest:
            raise ConfigError(f"--max-model-len {stated}: the longest request has {traffic.longest} tokens")
        return stated
    if most is not None and traffic.longest > most:
        raise ConfigError(
            f"the longest request has {traffic.longest} tokens, and {model.name} has {most} positions; "
            "state shorter lengths, or take another model"
        )
    rounded = -(-traffic.longest // _LENGTH_UNIT) * _LENGTH_UNIT
    return min(rounded, most) if most is not None else rounded


def read_hardware(text: str | None, file: Path | None) -> tuple[HardwareChoice, ...]:
    """Return the hardware that `text` names, or all GPUs with a price."""
    known = catalogue() if file is None else _read_catalogue(file)
    if text is None:
        return tuple(gpu_choice(each) for each in known if each.offer.dollars_per_hour is not None)
    chosen: list[HardwareChoice] = []
    for part in text.split(","):
        name, colon, number = part.strip().partition(":")
        if colon and (not number.isdecimal() or not 1 <= int(number) <= 100_000):
            raise ConfigError(f"--gpus {part}: after the colon is a number of devices, such as H100:8")
        count = int(number) if colon else None
        made = cpu_choice(count) if name.upper() == CPU else gpu_choice(_gpu(name, known), count)
        if made.name in {each.name for each in chosen}:
            raise ConfigError(f"--gpus: {made.name} is named twice; add the numbers")
        chosen.append(made)
    return tuple(chosen)


def _read_catalogue(file: Path) -> tuple[OfferedGpu, ...]:
    # It imports what reads specs.
    from kvasir.config.load.gpu_catalogue import read_catalogue

    return read_catalogue(file)


def _gpu(name: str, known: Sequence[OfferedGpu]) -> OfferedGpu:
    found = next((each for each in known if each.name.lower() == name.lower()), None)
    if found is None:
        names = ", ".join(each.name for each in known)
        raise ConfigError(
            f"--gpus: {name or 'nothing'} is not in the catalogue; there are {names} and {CPU}; "
            "--catalogue FILE adds more"
        )
    return found
