"""`kvasir calibrate`: fits the performance model to a running deployment, and writes a profile."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from kvasir.core.errors import ConfigError, UpstreamError
from kvasir.core.identity import Hardware, KvLayout
from kvasir.core.model.work import ModelWork
from kvasir.performance.coefficients import Coefficients
from kvasir.performance.engines import EngineSizes, engine_of_sizes
from kvasir.performance.profile import FORMAT, CalibratedProfile, EngineProfile, encode_profile
from kvasir.performance.step import EngineModel
from kvasir_platform.calibrate.design import CalibrationDesign, design
from kvasir_platform.calibrate.fit import EngineFit, busy_request_s, fit_engine, fit_line
from kvasir_platform.calibrate.samples import BusySample, CalibrationSamples
from kvasir_platform.cli.calibrate.client import CalibrationClient
from kvasir_platform.cli.calibrate.experiment import Experiment
from kvasir_platform.cli.common.gateway_client import status_of
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput, table

_PACKAGES = ("kvasir", "torch")
_COEFFICIENTS = tuple(name for name in Coefficients.__slots__ if name != "source")


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """What to measure, and the file to write."""

    model: str | None
    file: Path
    repeats: int
    quick: bool
    timeout_s: float


@dataclass(frozen=True, slots=True)
class MeasuredPool:
    """A worker of one pool, as its gateway shows it, and the model of its engine."""

    pool: str
    role: str
    engine_version: str
    sizes: EngineSizes
    engine: EngineModel


def calibrate(
    options: CalibrateOptions, site: Site, output: CommandOutput, now: datetime, *, local: bool
) -> int:
    """Measure, fit, print what was found and write the profile. `local`: the deployment runs here."""
    if not options.file.parent.is_dir():
        raise ConfigError(f"--profile {options.file}: {options.file.parent} is not a folder")
    status = status_of(site)
    if not status.get("ready"):
        raise UpstreamError(f"the deployment is not ready to serve: {status.get('reason')}")
    model = options.model or status["models"][0]
    if model not in status["models"]:
        raise ConfigError(f"--model {model}: this deployment serves {', '.join(status['models'])}")
    prefill, decode = measured_pools(status["workers"], model)
    apart = prefill.pool != decode.pool
    plan = _plan(options, (prefill, decode), status["workers"])
    experiment = Experiment(
        CalibrationClient(site, model, options.timeout_s),
        plan,
        budget=prefill.sizes.max_num_batched_tokens,
        apart=apart,
        workers=(_count(status["workers"], prefill.pool), _count(status["workers"], decode.pool)),
        rng=random.Random(),  # noqa: S311 - unique prompts, no secrets
        step=_display(plan.runs, output),
    )
    samples = experiment.run()
    if output.is_terminal:
        output.redraw("")
    profile = profile_of(
        model,
        prefill,
        decode,
        samples,
        measured=now.isoformat(timespec="seconds"),
        versions=_versions(local, prefill),
    )
    try:
        options.file.write_bytes(encode_profile(profile))
    except OSError as error:
        raise ConfigError(f"--profile {options.file}: {error.strerror or error}") from error
    output.data(msgspec.to_builtins(profile))
    _print(profile, options.file, output)
    return 0


def measured_pools(workers: Sequence[Mapping[str, Any]], model: str) -> tuple[MeasuredPool, MeasuredPool]:
    """Return the pools that compute prompts and that generate for `model`, which may be the same. Raises
    UpstreamError for workers that do not report their model."""
    own = [each for each in workers if each.get("model") == model and each.get("state") == "ready"]
    found: dict[str, MeasuredPool] = {}
    for worker in own:
        sizes = sizes_of(worker)
        engine = None if sizes is None else engine_of_sizes(sizes)
        if sizes is not None and engine is not None:
            name = str(worker["pool"])
            made = MeasuredPool(name, str(worker["role"]), str(worker.get("engine") or ""), sizes, engine)
            found.setdefault(str(worker.get("assigned") or worker["role"]).lower(), made)
    both = found.get("both")
    prefill, decode = found.get("prefill") or both, found.get("decode") or both
    if prefill is None or decode is None:
        raise UpstreamError(
            f"no worker of {model} that is ready reports the sizes of its model, so that there is nothing to "
            "fit; simulated engines and embedding models have none"
        )
    return prefill, decode


def sizes_of(worker: Mapping[str, Any]) -> EngineSizes | None:
    """Return the sizes in a worker of /status, None if it reports none."""
    layout, batch, work = worker.get("kv_layout"), worker.get("batch") or {}, worker.get("model_work")
    if not layout or not worker.get("model_parameters"):
        return None
    return EngineSizes(
        hardware=msgspec.convert(worker["hardware"], Hardware),
        kv=msgspec.convert(layout, KvLayout),
        parameters=int(worker["model_parameters"]),
        model_bytes=int(worker["model_bytes"]),
        work=None if work is None else msgspec.convert(work, ModelWork),
        max_model_len=int(worker["max_model_len"]),
        max_num_batched_tokens=int(batch.get("max_num_batched_tokens") or 2048),
        max_num_seqs=int(batch.get("max_num_seqs") or 64),
    )


def profile_of(
    model: str,
    prefill: MeasuredPool,
    decode: MeasuredPool,
    samples: CalibrationSamples,
    *,
    measured: str,
    versions: dict[str, str],
) -> CalibratedProfile:
    """Return the profile that `samples` give. One pool that does both is fitted to all of them."""
    if not samples.apart:
        fitted = fit_engine(prefill.engine, [*samples.prefill, *samples.decode])
        engines = [
            _engine_profile(prefill, fitted, (), samples.prefill_busy, True),
        ]
    else:
        first, last = fit_engine(prefill.engine, samples.prefill), fit_engine(decode.engine, samples.decode)
        decodes = _engine_profile(decode, last, samples.decode_slowed, samples.decode_busy, True)
        prefills = _engine_profile(prefill, first, samples.prefill_slowed, samples.prefill_busy, False)
        engines = [_waits_as_long(prefills, decodes), decodes]
    fixed_s, byte_s = fit_line(samples.transfers)
    return CalibratedProfile(FORMAT, model, measured, versions, tuple(engines), fixed_s, byte_s)


def _engine_profile(
    pool: MeasuredPool, fitted: EngineFit, slowed: Sequence[float], busy: Sequence[BusySample], waits: bool
) -> EngineProfile:
    found = replace(fitted.coefficients, shared=sum(slowed) / len(slowed) if slowed else 0.0)
    measured = replace(pool.engine, coefficients=found)
    found = replace(found, busy_request_s=busy_request_s(measured, busy, waits=waits))
    return EngineProfile(
        pool=pool.pool,
        role=pool.role,
        device=pool.sizes.hardware.device,
        devices=pool.sizes.hardware.devices,
        parameters=pool.sizes.parameters,
        model_bytes=pool.sizes.model_bytes,
        max_num_batched_tokens=pool.sizes.max_num_batched_tokens,
        max_num_seqs=pool.sizes.max_num_seqs,
        coefficients={name: float(getattr(found, name)) for name in _COEFFICIENTS},
        residuals=fitted.residuals,
    )


def _waits_as_long(prefill: EngineProfile, decode: EngineProfile) -> EngineProfile:
    """Return the engine that computes prompts with at least the delay of the other's requests while both
    compute. The processes that carry requests wait for the same processors on the way to either, and the time
    of a prompt that waits for others does not tell how long."""
    own, other = prefill.coefficients, decode.coefficients
    delay = other["busy_request_s"] - other["request_s"] if other["busy_request_s"] else 0.0
    busy = max(own["busy_request_s"], own["request_s"] + delay)
    return msgspec.structs.replace(prefill, coefficients=own | {"busy_request_s": busy})


def _plan(
    options: CalibrateOptions, pools: Sequence[MeasuredPool], workers: Sequence[Mapping[str, Any]]
) -> CalibrationDesign:
    names = {each.pool for each in pools}
    loads = [each.get("load") or {} for each in workers if each.get("pool") in names]
    blocks = min((int(each.get("kv_blocks_total") or 0) for each in loads), default=0)
    return design(
        min(each.sizes.max_model_len for each in pools),
        min(each.sizes.max_num_seqs for each in pools),
        blocks * pools[0].sizes.kv.block_size,
        repeats=options.repeats,
        quick=options.quick,
    )


def _count(workers: Sequence[Mapping[str, Any]], pool: str) -> int:
    """Return how many workers of a pool serve."""
    return sum(each.get("pool") == pool and each.get("state") == "ready" for each in workers)


def _display(runs: int, output: CommandOutput) -> Callable[[str], None]:
    """Return what shows each step of the experiment, with the part that is done."""
    numbers = itertools.count()

    def step(text: str) -> None:
        line = f"... {min(99, 100 * next(numbers) // (runs + 1)):2d} %  {text}"
        if output.is_terminal:
            output.redraw(line[:110])
        else:
            output.text(line)

    return step


def _versions(local: bool, pool: MeasuredPool) -> dict[str, str]:
    """Return the versions of what was measured; those of packages are known on this machine only."""
    found = {"engine": pool.engine_version}
    for name in _PACKAGES if local else _PACKAGES[:1]:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _print(profile: CalibratedProfile, file: Path, output: CommandOutput) -> None:
    for engine in profile.engines:
        device = f"{engine.devices} × {engine.device}" if engine.devices > 1 else engine.device
        output.text(f"\npool {engine.pool}: {profile.model} on {device}")
        rows = [[name, _shown(name, value)] for name, value in engine.coefficients.items()]
        output.text(table(("COEFFICIENT", "VALUE"), rows, (1,)))
        errors = [[each.kind, f"{each.error:.1%}", str(each.samples)] for each in engine.residuals]
        output.text(f"\n{table(('MEASURED', 'MEAN ERROR', 'SAMPLES'), errors, (1, 2))}")
    output.text(f"\nprofile: {file}; name it in kvasir.yaml as performance.profile")


def _shown(name: str, value: float) -> str:
    return f"{value * 1e3:.3f} ms" if name.endswith("_s") else f"{value:.3g}"
