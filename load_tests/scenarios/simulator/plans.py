"""How long `kvasir plan` takes, as users run it: the whole command, of models that need no network."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from load_tests.report import Row

MODELS = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-30b-a3b", "gpt-oss-120b")
GPUS = ("H100", "A100", "L40S", "L4")
BEGINNING = "plan of "
"""Of the names of these rows."""
ROUNDS = 3
TARGET_S = 5.0


def plan_rows(rounds: int = ROUNDS) -> Iterator[Row]:
    """One row for each model, and one for all in turn: medians of the rounds."""
    taken = [{model: seconds_of(model) for model in MODELS} for _ in range(rounds)]
    note = f"{', '.join(GPUS)}; the command with its start, {rounds} rounds"
    for model in MODELS:
        yield _row(f"{BEGINNING}{model} on four GPU types", [each[model] for each in taken], note)
    name = f"{BEGINNING}four models on four GPU types, in all"
    yield _row(name, [sum(each.values()) for each in taken], note, TARGET_S)


def _row(name: str, seconds: list[float], note: str, target: float | None = None) -> Row:
    spread = (min(seconds), max(seconds))
    return Row(name, statistics.median(seconds), "s", "lower", target, spread=spread, note=note)


def seconds_of(model: str) -> float:
    """The seconds of one command. Raises CalledProcessError if it finds no plan."""
    command = (sys.executable, "-m", "kvasir_platform.cli.main", "plan", model, "--gpus", ",".join(GPUS))
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began
