"""Runs of the showcase: one worker or a few, a known model, a preset workload."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from kvasir.core.errors import ConfigError
from kvasir.core.requests import Role, SloClass
from kvasir.hardware.offers import catalogue
from kvasir.sizing.shape import EngineShape
from kvasir_platform.capacity.engines import EngineOption, engine_option, gpu_choice
from kvasir_platform.capacity.models import known_model
from kvasir_platform.cli.sim.read import replica_of
from kvasir_platform.sim.engine.options import BatchOptions
from kvasir_platform.sim.server.results import ServerResult
from kvasir_platform.sim.server.server import ServerSimulation
from kvasir_platform.sim.server.setting import RunLimits, ServerSetting, SimulatedPool, with_blocks
from kvasir_platform.workload.files import open_workload
from kvasir_router.admission import AdmissionRules

BLOCK, SEED = 64, 1
SLO = SloClass("showcase", ttft_s=1.0, itl_s=0.05)
_ENDLESS = AdmissionRules(max_queue=1 << 20)
_TAIL_S = 600.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: `ranks` GPUs in each of `workers` workers."""

    workload: str
    model: str = "llama-3.1-8b"
    gpu: str = "H100"
    ranks: int = 1
    workers: int = 1
    batch: BatchOptions = BatchOptions()
    quantization: str = "none"
    cpu_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class ShowcaseResult:
    """One experiment: what was found in a sentence, a table, and charts as SVG."""

    name: str
    title: str
    question: str
    finding: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    charts: tuple[str, ...]
    figures: dict[str, object] = field(default_factory=dict)


def option_of(trial: Trial) -> EngineOption:
    """Return the engine of a trial."""
    model = known_model(trial.model)
    gpu = next((each for each in catalogue() if each.name == trial.gpu), None)
    if model is None or gpu is None:
        raise ConfigError(f"{trial.model} or {trial.gpu} is unknown")
    shape = EngineShape(
        max_model_len=8192,
        max_num_seqs=trial.batch.most,
        max_num_batched_tokens=trial.batch.step_tokens,
        tensor=trial.ranks,
        quantization=trial.quantization,
    )
    return engine_option(model, gpu_choice(gpu), shape)


def play(trial: Trial) -> ServerResult:
    """Run a trial."""
    option = option_of(trial)
    replica = replica_of(option, trial.batch, BLOCK, trial.cpu_bytes)
    pool = SimulatedPool("both", Role.BOTH, trial.workers, replica, option.dollars_per_hour or None)
    workload = with_blocks(open_workload(trial.workload, Random(SEED)), (pool,))  # noqa: S311
    setting = ServerSetting(
        workload, (pool,), policy="cost", disaggregation="never", slo=SLO, admission=_ENDLESS, seed=SEED
    )
    return ServerSimulation(setting, clock=time.perf_counter, limits=RunLimits(tail_s=_TAIL_S)).run()


def sweep(base: str, rates: Sequence[float], **of: object) -> list[ServerResult]:
    """Run a workload at several rates; `base` has a place for the rate."""
    return [play(Trial(base.format(rate=rate), **of)) for rate in rates]  # type: ignore[arg-type]
