"""What a start with weights in object storage takes: streamed by the engine, and downloaded before it starts,
on real vLLM with the Run:ai Model Streamer, beside a start from the page cache.

The streamer is installed into build/ on first use. The bucket carries so many bytes per second. Bytes and CPU
time do not depend on what else runs on the machine; seconds do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.kit.models.sharded import make_sharded

from load_tests.report import Row, median
from load_tests.scenarios.sources.bucket import BUCKET, SlowBucket
from load_tests.scenarios.sources.figures import beside, children_cpu_s
from load_tests.scenarios.sources.link import SlowLink
from load_tests.scenarios.start_up import start_s

LAYERS = 5
LINK = 100e6
"""Bytes per second of the bucket."""
VARIANTS: Mapping[str, str] = {
    "warm": "in the page cache",
    "downloaded": "downloaded from a bucket first",
    "streamed": "streamed from a bucket",
}
_PEERS: Mapping[str, str] = {"downloaded": "warm", "streamed": "downloaded"}
"""The variant whose seconds are the floor or the peer."""
_PACKAGES = (
    *("runai-model-streamer==0.17.0", "runai-model-streamer-s3==0.17.0", "humanize==4.17.0"),
    *("boto3==1.44.8", "botocore==1.44.8", "s3transfer==0.19.3", "jmespath==1.1.0"),
)
_FOLDER = Path(__file__).resolve().parents[3] / "build" / "streamer"


@dataclass(frozen=True, slots=True)
class ObjectStart:
    """What one start took: bytes from the bucket, bytes of files that were left on the disk, CPU seconds of
    its processes, and seconds until the engine was warm."""

    read: int
    kept: int
    cpu_s: float
    seconds: float


def measure(rounds: int) -> Iterator[list[Row]]:
    """Measure all variants `rounds` times, and yield the rows of all rounds so far after each. Raise
    CalledProcessError if the registry does not have the streamer."""
    packages = install_streamer()
    found: dict[str, list[ObjectStart]] = {}
    with tempfile.TemporaryDirectory(prefix="kvasir-bucket-") as made:
        model = make_sharded(Path(made) / "model", LAYERS)
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        # The first start also leaves what later ones reuse (engines/vllm/caches/compiled.py).
        _started(model, Path(made), "warm", packages)
        for number in range(rounds):
            for name, title in VARIANTS.items():
                took = _started(model, Path(made), name, packages)
                found.setdefault(name, []).append(took)
                print(f"  round {number + 1} of {rounds}: {title}: {took}", flush=True)
            yield rows(found, size)


def install_streamer() -> Path:
    """The folder of the streamer and of what it needs beside Kvasir's packages, in build/."""
    if not _FOLDER.exists():
        draft = _FOLDER.with_suffix(".partial")
        shutil.rmtree(draft, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        subprocess.run([*pip, "--no-deps", "--target", str(draft), *_PACKAGES], check=True)
        draft.rename(_FOLDER)
    return _FOLDER


def _started(model: Path, made: Path, variant: str, packages: Path) -> ObjectStart:
    home = made / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    link, before = SlowLink(LINK), children_cpu_s()
    compiled = f"worker.compile_cache_dir={made / 'compiled'}"
    with SlowBucket(model, link) as bucket:
        paths = f"{packages}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        variables = bucket.variables | {"HOME": str(home), "PYTHONPATH": paths.rstrip(os.pathsep)}
        began = time.monotonic()
        source = str(model)
        if variant == "downloaded":
            source = str(home / "downloaded")
            command = [sys.executable, "-m", "load_tests.scenarios.sources.download"]
            subprocess.run(
                [*command, BUCKET, model.name, source], check=True, env={**os.environ, **variables}
            )
        elif variant == "streamed":
            source = bucket.uri
        downloaded_s = time.monotonic() - began
        seconds = downloaded_s + start_s(f"model.source={source}", compiled, variables=variables)
    kept = sum(path.stat().st_size for path in home.rglob("*") if path.is_file())
    return ObjectStart(link.carried, kept, children_cpu_s() - before, seconds)


def rows(found: Mapping[str, Sequence[ObjectStart]], size: int) -> list[Row]:
    """The report rows; `size` is that of the weights in bytes."""
    about = f"{LINK / 1e6:.0f} MB/s, {size / 1e9:.2f} GB of weights"
    made = []
    for name, title in VARIANTS.items():
        starts, what = found[name], f"engine start, weights {title}"
        used = _row(f"{what}: CPU", "s", [each.cpu_s for each in starts])
        took = _row(f"{what}: until it has started", "s", [each.seconds for each in starts])
        if name == "warm":
            made += [used, took]
            continue
        read = _row(f"{what}: read from the bucket", "GB", [each.read / 1e9 for each in starts])
        kept = _row(f"{what}: left on the disk", "GB", [each.kept / 1e9 for each in starts], about)
        made += [
            beside(read, size / 1e9, "the weights once"),
            kept,
            beside(used, median([each.cpu_s for each in found["warm"]])[0], VARIANTS["warm"]),
            beside(took, median([each.seconds for each in found[_PEERS[name]]])[0], VARIANTS[_PEERS[name]]),
        ]
    return made


def _row(name: str, unit: str, values: Sequence[float], note: str = "") -> Row:
    value, spread = median(values)
    return Row(name, value, unit, "lower", spread=spread, note=note)
