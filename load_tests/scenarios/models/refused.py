"""How soon `kvasir check` refuses a model that cannot start, on folders with the headers of published models.

Their weights are holes in sparse files. Each check is a process of its own. Times are of the processor: a
check waits for nothing, and on an idle machine it takes hardly longer.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kit import public_models
from tests.kit.model_folder import write_model, write_safetensors

from kvasir.checkpoint.tensors import TensorHeader
from load_tests.report import Row, median

TARGET_S = 2.0
_FITS_NOT = "does not fit on H100"
_CASES: Mapping[str, tuple[Mapping[str, Any], int, str]] = {
    "Llama-3.1-70B on one H100": (public_models.LLAMA_70B, 30, _FITS_NOT),
    "DeepSeek-V3 on one H100": (public_models.DEEPSEEK_V3, 163, _FITS_NOT),
    "a truncated shard of Llama-3.1-70B": (public_models.LLAMA_70B, 30, "is truncated"),
}
"""The model, its shards, and what the check says of it."""
_PLACED = "pools=[{name: serve, role: both, gpus: 1, gpu: H100}]"


def row_names() -> list[str]:
    """Return the names of the rows."""
    return [f"kvasir check refuses {case}" for case in _CASES]


def measure(rounds: int) -> Iterator[Row]:
    """Yield a row for each case."""
    for name, (case, (values, shards, says)) in zip(row_names(), _CASES.items(), strict=True):
        with tempfile.TemporaryDirectory(prefix="kvasir-refused-") as made:
            tensors = public_models.tensors_of(values)
            folder = _folder(Path(made) / "model", values, tensors, shards, truncated="truncated" in case)
            times = [_refused(folder, says) for _ in range(rounds)]
        value, spread = median(times)
        note = f"{len(tensors)} tensors in {shards} files"
        yield Row(name, round(value, 2), "s", "lower", target=TARGET_S, spread=spread, note=note)


def _folder(
    folder: Path,
    values: Mapping[str, Any],
    tensors: Sequence[TensorHeader],
    shards: int,
    *,
    truncated: bool,
) -> Path:
    write_model(folder, values)
    (folder / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for number in range(shards):
        name = f"model-{number + 1:05}-of-{shards:05}.safetensors"
        part = tensors[number * len(tensors) // shards : (number + 1) * len(tensors) // shards]
        missing = 1 if truncated and number == shards - 1 else 0
        shapes = {each.name: (each.dtype, each.shape) for each in part}
        write_safetensors(folder / name, shapes, missing_bytes=missing)
        weight_map |= dict.fromkeys(shapes, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _refused(folder: Path, says: str) -> float:
    """Return the processor's seconds for one check. Raise RuntimeError if it does not refuse the model for
    that reason."""
    sets = (f"model.source={folder}", "disaggregation=never", _PLACED)
    command = [sys.executable, "-m", "kvasir_platform.cli.main", "-o", "json", "check", "--port", "0"]
    for each in sets:
        command += ["--set", each]
    began = _spent()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    took = _spent() - began
    findings = json.loads(done.stdout)["findings"] if done.returncode == 1 else []
    if not any(each["level"] == "error" and says in each["message"] for each in findings):
        raise RuntimeError(f"{folder.name} was not refused: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return took


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
