"""Compares predictions of the performance model with held-out loads of real vLLM on this CPU.

For each model, aggregated and with prefill and decode apart: `kvasir calibrate` measures a deployment that
`kvasir up` started and fits a profile; then loads that it has not seen run against the same deployment, and
continuous batching in virtual time over the profile predicts what they see: open loads at fractions of the
predicted capacity, and closed ones, with mixed lengths of prompts and outputs.

    make bench-truth                      all (a quarter of an hour)
    make bench-truth ARGS="--only gemma3" one model; the rows of the others are kept

Times are the gateway's own (Server-Timing), from a request's arrival. The error of a figure is the mean over
the loads of |predicted - measured| / measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from tests.kit.models.architectures import named
from tests.kit.models.maker import make_model
from tests.kit.sim.virtual_batching import EnginesApart, VirtualOutcome, play

from kvasir.performance.profile import decode_profile
from kvasir.performance.step import EngineModel
from kvasir_platform.cli.calibrate.client import CalibrationClient
from kvasir_platform.cli.calibrate.command import CalibrateOptions, calibrate, measured_pools
from kvasir_platform.cli.common.gateway_client import status_of
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput
from load_tests.report import REPORTS, Row, read, write
from load_tests.scenarios.models.served import running
from load_tests.scenarios.truth.loads import HeldOutLoad, LoadFigures, measured, mixed_requests, predicted

_MODELS = ("kvasir-tiny", "gemma3", "qwen3-moe")
_FOLDERS = Path("build") / "models" / "folders"
_FRACTIONS = (0.3, 0.55, 0.8)
"""Rates of the open loads, as parts of the predicted capacity."""
_USERS = (3, 10)
"""Requests at a time of the closed loads."""
_SATURATING_USERS = 24
_REQUESTS = 80
_KV_BYTES = 128 << 20
_TARGET = 15.0
_FIGURES = ("TTFT", "ITL", "throughput")
_TIMEOUT_S = 120.0
_DISTINCT = 512


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="names of models, separated by commas")
    parser.add_argument("--modes", default="aggregated,apart", help="aggregated, apart, or both")
    parser.add_argument("--seed", type=int, default=11, help="of prompts and arrivals (11)")
    options = parser.parse_args()
    rows = {row.name: row for row in read(REPORTS / "truth.json")}
    for model in [name for name in options.only.split(",") if name] or _MODELS:
        for mode in options.modes.split(","):
            print(f"{model}, {mode}", flush=True)
            found = _compared(model, mode, random.Random(options.seed))
            rows |= {row.name: row for row in _rows(model, mode, found)}
            write("truth", "make bench-truth", list(rows.values()))


@dataclass(frozen=True, slots=True)
class Compared:
    """Predicted and measured figures of one load."""

    load: str
    predicted: LoadFigures
    measured: LoadFigures

    @property
    def errors(self) -> tuple[float, ...]:
        """Relative errors, in the order of the figures, in percent."""
        pairs = zip(astuple(self.predicted), astuple(self.measured), strict=True)
        return tuple(100 * abs(expected - real) / real for expected, real in pairs)


def _compared(model: str, mode: str, rng: random.Random) -> list[Compared]:
    """Start the model, calibrate it, and run the loads."""
    source, dtype = model, "auto"
    if model != "kvasir-tiny":
        tiny = named(model)
        source, dtype = str(make_model(tiny, (_FOLDERS / model).absolute())), tiny.dtype
    sets = [f"model.source={source}", f"model.dtype={dtype}", "name=truth"]
    # Nothing is refused for its SLO: a prediction has no such rule.
    sets += ["slo.default.ttft_s=600", "slo.default.itl_s=60"]
    sets += ["disaggregation=never"] if mode == "aggregated" else []
    pools = ("serve",) if mode == "aggregated" else ("prefill", "decode")
    # No request waits for a block of KV, and none is preempted.
    sets += [f"pools.{pool}.engine.kv_cache_bytes={_KV_BYTES}" for pool in pools]
    # Threads that wait for each other are slowed by whatever else runs on one of their cores.
    sets += [f"pools.{pool}.engine.threads=1" for pool in pools]
    with tempfile.TemporaryDirectory(prefix="kvt-") as folder, running(sets, Path(folder)) as address:
        site, file = Site(address), Path(folder) / "profile.json"
        output = CommandOutput(json=False)
        calibrate(
            CalibrateOptions(None, file, 5, False, _TIMEOUT_S), site, output, datetime.now(UTC), local=True
        )
        status = status_of(site)
        name = str(status["models"][0])
        prefill, decode = measured_pools(status["workers"], name)
        profile = decode_profile(file.read_bytes(), str(file))
        found_of = {each.pool: profile.coefficients_of(each) for each in profile.engines}
        first, last = (replace(each.engine, coefficients=found_of[each.pool]) for each in (prefill, decode))
        engines: EngineModel | EnginesApart = first
        if mode == "apart":
            engines = EnginesApart(
                first, last, profile.transfer_fixed_s, profile.transfer_byte_s, together=True
            )
        client = CalibrationClient(site, name, _TIMEOUT_S)
        text = " ".join(str(rng.randrange(1000)) for _ in range(_DISTINCT))
        tokens = sorted(set(client.tokenize(text)[0]))
        found = []
        for load in _loads(engines, rng):
            expected = predicted(play(load.requests, engines, users=load.users))
            found.append(Compared(load.name, expected, measured(load, client, tokens, rng)))
            print(f"  {json.dumps(_shown(found[-1]))}", flush=True)
        return found


def _loads(engines: EngineModel | EnginesApart, rng: random.Random) -> list[HeldOutLoad]:
    saturating = mixed_requests(_REQUESTS, rng)
    capacity = _rate(play(saturating, engines, users=_SATURATING_USERS))
    made = [
        HeldOutLoad(
            f"{fraction:.0%} of capacity, {capacity * fraction:.1f}/s",
            mixed_requests(_REQUESTS, rng, capacity * fraction),
        )
        for fraction in _FRACTIONS
    ]
    return made + [
        HeldOutLoad(f"{users} at a time", mixed_requests(_REQUESTS, rng), users) for users in _USERS
    ]


def _rate(found: Sequence[VirtualOutcome]) -> float:
    return len(found) / max(each.last_s for each in found)


def _shown(each: Compared) -> dict[str, object]:
    return {
        "load": each.load,
        "predicted": [round(value, 5) for value in astuple(each.predicted)],
        "measured": [round(value, 5) for value in astuple(each.measured)],
        "errors": [round(value, 1) for value in each.errors],
    }


def _rows(model: str, mode: str, found: Sequence[Compared]) -> list[Row]:
    rows = []
    for at, figure in enumerate(_FIGURES):
        errors = [each.errors[at] for each in found]
        pairs = "; ".join(
            f"{each.load}: {astuple(each.predicted)[at]:.4g} for {astuple(each.measured)[at]:.4g}"
            for each in found
        )
        rows.append(
            Row(
                f"{model}, {mode}: {figure}",
                statistics.mean(errors),
                "%",
                "lower",
                target=_TARGET,
                spread=(min(errors), max(errors)),
                note=f"predicted for measured, {'tokens/s' if figure == 'throughput' else 's'}: {pairs}",
            )
        )
    return rows


if __name__ == "__main__":
    main()
