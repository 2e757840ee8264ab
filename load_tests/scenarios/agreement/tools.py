"""The two load generators, run alike: the same number of requests at a time, or the same arrivals; the same
number of output tokens."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir.config.load.model_files import resolve_model

AIPERF = "aiperf==0.13.0"
_ROOT = Path(__file__).resolve().parents[3]
_VENV = _ROOT / "build" / "aiperf"
_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Load:
    """One load: requests, how many run at a time (or how many come per second), and their tokens."""

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What a tool measured: times in ms, rates per second; the mean prompt tokens that the server counted;
    and the times of the same requests on the wire, once they are known."""

    figures: Mapping[str, float]
    prompt_tokens: float
    wire: Mapping[str, float] = field(default_factory=dict)

    def beside_wire(self, figure: str) -> float:
        """Return the figure as a multiple of what it was on the wire; a rate as it is."""
        return self.figures[figure] / self.wire.get(figure, 1.0)


def install_aiperf() -> Path:
    """The command of aiperf, in an environment of its own in build/. Raises CalledProcessError if the
    registry does not have it."""
    command = _VENV / "bin" / "aiperf"
    if not command.exists():
        subprocess.run([sys.executable, "-m", "venv", str(_VENV)], check=True)
        pip = [str(_VENV / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", "--progress-bar", "off", AIPERF], check=True)
    return command


def trace(load: Load, seed: int, path: Path) -> Path:
    """Write the Poisson arrivals of a load at a rate, as a trace that both tools read (Mooncake's format:
    milliseconds). Two draws of a hundred arrivals differ in how many requests overlap, and with them in the
    95th percentile of TTFT."""
    assert load.rate is not None
    rng = random.Random(seed)
    lengths = {"input_length": load.prompt_tokens, "output_length": load.output_tokens, "hash_ids": []}
    arrivals_s = itertools.accumulate(rng.expovariate(load.rate) for _ in range(load.requests))
    lines = (json.dumps({"timestamp": round(at * 1e3), **lengths}) for at in arrivals_s)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def run_aiperf(url: str, model: str, load: Load, seed: int) -> Measured:
    """Measure with aiperf. Its tokenizer is that of the model that ships with Kvasir, since it makes prompts
    by one; counts of tokens are the server's."""
    with tempfile.TemporaryDirectory(prefix="kvasir-aiperf-") as folder:
        command = [
            *(str(install_aiperf()), "profile", "--model", model, "--url", url),
            *("--endpoint-type", "chat", "--streaming", "--use-server-token-count"),
            *("--tokenizer", str(resolve_model("kvasir-tiny"))),
            *("--extra-inputs", "ignore_eos:true", "--warmup-request-count", "8"),
            *("--random-seed", str(seed), "--artifact-dir", folder, "--ui-type", "none"),
            *_aiperf_load(load, seed, Path(folder)),
        ]
        _run(command)
        found = json.loads((Path(folder) / "profile_export_aiperf.json").read_text())
    times = {
        "TTFT": found["time_to_first_token"],
        "TPOT": found["inter_token_latency"],
        "ITL": found["inter_chunk_latency"],
        "E2E": found["request_latency"],
    }
    figures = {
        f"{name} {key}": float(values[_AIPERF_KEYS[key]]) for name, values in times.items() for key in _KEYS
    }
    figures["output tokens/s"] = float(found["output_token_throughput"]["avg"])
    figures["requests/s"] = float(found["request_throughput"]["avg"])
    return Measured(figures, float(found["input_sequence_length"]["avg"]))


def _aiperf_load(load: Load, seed: int, folder: Path) -> list[str]:
    if load.rate is not None:
        arrivals = str(trace(load, seed, folder / "arrivals.jsonl"))
        return ["--input-file", arrivals, "--custom-dataset-type", "mooncake_trace", *_FROM_FIRST]
    return [
        *("--concurrency", str(load.concurrency), "--request-count", str(load.requests)),
        *("--synthetic-input-tokens-mean", str(load.prompt_tokens), "--synthetic-input-tokens-stddev", "0"),
        *("--output-tokens-mean", str(load.output_tokens), "--output-tokens-stddev", "0"),
    ]


def run_ours(url: str, model: str, load: Load, seed: int) -> Measured:
    """Measure with `kvasir bench`."""
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-") as folder:
        if load.rate is not None:
            sent = ["--workload", str(trace(load, seed, Path(folder) / "arrivals.jsonl"))]
        else:
            lengths = f"prompt={load.prompt_tokens},output={load.output_tokens},requests={load.requests}"
            pace = ("--concurrency", str(load.concurrency))
            sent = ["--workload", f"synthetic:duration=100000,{lengths}", *pace]
        command = [
            *(sys.executable, "-m", "kvasir_platform.cli.main", "-o", "json", "bench", url),
            *("--model", model, "--seed", str(seed), *sent),
        ]
        found: dict[str, Any] = json.loads(_run(command).splitlines()[-1])["figures"]
    figures = {
        f"{name} {key}": float(found[name.lower()][key]) * 1e3
        for name in ("TTFT", "TPOT", "ITL", "E2E")
        for key in _KEYS
    }
    figures["output tokens/s"] = float(found["output_tokens_per_s"])
    figures["requests/s"] = float(found["requests_per_s"])
    return Measured(figures, float(found["prompt_tokens"]["mean"]))


# Both count times from the first request.
_FROM_FIRST = ("--fixed-schedule", "--fixed-schedule-auto-offset")
_KEYS = ("mean", "p50", "p95")
_AIPERF_KEYS = {"mean": "avg", "p50": "p50", "p95": "p95"}


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout
