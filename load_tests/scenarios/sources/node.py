"""What several workers of a node read from a network volume, and how long it takes, with and without
`node_cache`.

All workers begin at the same time, each a process in a mount namespace of its own, as a pod is, that gets and
reads its weights (reader.py): what an engine does with them afterwards depends on neither. The volume carries
so many bytes per second for all of them. Bytes do not depend on what else runs on the machine, and seconds
hardly.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.kit.models.sharded import make_sharded

from load_tests.report import Row, median
from load_tests.scenarios.sources.figures import beside, children_cpu_s
from load_tests.scenarios.sources.link import SlowLink
from load_tests.scenarios.sources.volume import SlowVolume, may_mount

WORKERS = 3
LAYERS = 5
LINK = 60e6
"""Bytes per second of the volume."""
MOST_READ = 1.02
"""Times the size of the files that a node may read with `node_cache`."""
VARIANTS: Mapping[str, str] = {
    "own": "a mount for each",
    "cached": "a mount for each, node_cache",
    "shared": "one mount for all",
}
_LIMIT_S = 300.0
_BIND = 'mount --bind "$0" "$1" && shift && exec "$@"'
_IN_NAMESPACE = ("unshare", "--mount", "sh", "-c", _BIND)
"""Runs a command in a mount namespace, in which a volume is bound to a folder: both before the command."""


@dataclass(frozen=True, slots=True)
class NodeReads:
    """What the workers of one variant took: bytes from the volume, CPU seconds of all their processes, and
    seconds until the last had read its weights."""

    read: int
    cpu_s: float
    seconds: float


def measure(rounds: int) -> Iterator[list[Row]]:
    """Measure all variants `rounds` times, and yield the rows of all rounds so far after each. Raise
    RuntimeError where volumes cannot be mounted, or a worker has not read its weights."""
    if not may_mount():
        raise RuntimeError("the volume is mounted through FUSE: this part needs root and /dev/fuse")
    found: dict[str, list[NodeReads]] = {}
    with tempfile.TemporaryDirectory(prefix="kvasir-volume-") as made:
        model = make_sharded(Path(made) / "model", LAYERS)
        size = sum(path.stat().st_size for path in model.glob("*.safetensors"))
        for number in range(rounds):
            for name, title in VARIANTS.items():
                took = _read(model, Path(made), name, size)
                found.setdefault(name, []).append(took)
                print(f"  round {number + 1} of {rounds}: {title}: {took}", flush=True)
            yield rows(found, size)


def _read(model: Path, made: Path, variant: str, size: int) -> NodeReads:
    link, options = SlowLink(LINK), []
    if variant == "cached":
        cache = made / "node"
        shutil.rmtree(cache, ignore_errors=True)
        options.append(f"model.load.node_cache={cache}")
    mounts = [made / f"mount-{number}" for number in range(1 if variant == "shared" else WORKERS)]
    source = made / "source"
    source.mkdir(exist_ok=True)
    reader = [sys.executable, "-m", "load_tests.scenarios.sources.reader", f"model.source={source}"]
    with ExitStack() as mounted:
        for mount in mounts:
            mounted.enter_context(SlowVolume(model, mount, link))
        before, began = children_cpu_s(), time.monotonic()
        workers = [
            subprocess.Popen(
                [*_IN_NAMESPACE, mounts[number % len(mounts)], source, *reader, *options],
                stdout=subprocess.PIPE,
            )
            for number in range(WORKERS)
        ]
        said = [worker.communicate(timeout=_LIMIT_S)[0] for worker in workers]
        seconds = time.monotonic() - began
    if said != [f"{size}\n".encode()] * WORKERS:
        raise RuntimeError(f"{WORKERS} workers were to read {size} bytes each, and said {said}")
    return NodeReads(link.carried, children_cpu_s() - before, seconds)


def rows(found: Mapping[str, Sequence[NodeReads]], size: int) -> list[Row]:
    """The report rows; `size` is that of the weights in bytes."""
    about = f"{size / 1e9:.2f} GB of weights, {LINK / 1e6:.0f} MB/s for all workers"
    once, plain = size / 1e9, found["own"]
    made: list[Row] = []
    for name, title in VARIANTS.items():
        reads, what = found[name], f"{WORKERS} workers of a node, {title}"
        read, spread = median([each.read / 1e9 for each in reads])
        row = Row(f"{what}: read from the volume", read, "GB", "lower", spread=spread, note=about)
        made.append(beside(row, once, "the weights once", MOST_READ if name == "cached" else None))
        cpu, spread = median([each.cpu_s for each in reads])
        row = Row(f"{what}: CPU of all", cpu, "s", "lower", spread=spread)
        made.append(_beside_plain(row, name, [each.cpu_s for each in plain]))
        seconds, spread = median([each.seconds for each in reads])
        row = Row(f"{what}: until the last has its weights", seconds, "s", "lower", spread=spread)
        made.append(_beside_plain(row, name, [each.seconds for each in plain]))
    return made


def _beside_plain(row: Row, name: str, plain: Sequence[float]) -> Row:
    return row if name == "own" else beside(row, median(plain)[0], VARIANTS["own"])
