"""What several workers of a node read from a network volume, and how long they take to start, with and
without `node_cache`, on real vLLM.

All workers start at the same time, each a process of its own. The volume carries so many bytes per second for
all of them. Bytes and CPU time do not depend on what else runs on the machine; seconds do.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.kit.models.sharded import make_sharded

from load_tests.report import Row, median
from load_tests.scenarios.sources.figures import beside, children_cpu_s
from load_tests.scenarios.sources.link import SlowLink
from load_tests.scenarios.sources.volume import SlowVolume, may_mount
from load_tests.scenarios.start_up import start_s

WORKERS = 3
LAYERS = 5
LINK = 40e6
"""Bytes per second of the volume."""
MOST_READ = 1.02
"""Times the size of the files that a node may read with `node_cache`."""
VARIANTS: Mapping[str, str] = {
    "own": "a mount for each",
    "cached": "a mount for each, node_cache",
    "shared": "one mount for all",
}


@dataclass(frozen=True, slots=True)
class NodeStarts:
    """What the starts of one variant took: bytes from the volume, CPU seconds of all their processes, and
    seconds until the last engine was warm."""

    read: int
    cpu_s: float
    seconds: float


def measure(rounds: int) -> Iterator[list[Row]]:
    """Measure all variants `rounds` times, and yield the rows of all rounds so far after each. Raise
    RuntimeError where volumes cannot be mounted."""
    if not may_mount():
        raise RuntimeError("the volume is mounted through FUSE: this part needs root and /dev/fuse")
    found: dict[str, list[NodeStarts]] = {}
    with tempfile.TemporaryDirectory(prefix="kvasir-volume-") as made:
        model = make_sharded(Path(made) / "model", LAYERS)
        size = sum(path.stat().st_size for path in model.iterdir())
        # The first start also leaves what later ones reuse (engines/vllm/caches/compiled.py).
        start_s(f"model.source={model}", _kept(Path(made)))
        for number in range(rounds):
            for name, title in VARIANTS.items():
                took = _started(model, Path(made), name)
                found.setdefault(name, []).append(took)
                print(f"  round {number + 1} of {rounds}: {title}: {took}", flush=True)
            yield rows(found, size)


def _started(model: Path, made: Path, variant: str) -> NodeStarts:
    link = SlowLink(LINK)
    options = [_kept(made)]
    if variant == "cached":
        cache = made / "node"
        shutil.rmtree(cache, ignore_errors=True)
        options.append(f"model.load.node_cache={cache}")
    places = [made / f"volume-{number}" for number in range(1 if variant == "shared" else WORKERS)]
    before = children_cpu_s()
    with ExitStack() as mounted, ThreadPoolExecutor(WORKERS) as pool:
        for place in places:
            mounted.enter_context(SlowVolume(model, place, link))
        started = [
            pool.submit(start_s, f"model.source={places[number % len(places)]}", *options)
            for number in range(WORKERS)
        ]
        seconds = max(each.result() for each in started)
    return NodeStarts(link.carried, children_cpu_s() - before, seconds)


def _kept(made: Path) -> str:
    return f"worker.compile_cache_dir={made / 'compiled'}"


def rows(found: Mapping[str, Sequence[NodeStarts]], size: int) -> list[Row]:
    """The report rows; `size` is that of the model's files in bytes."""
    about = f"{size / 1e9:.2f} GB of files, {LINK / 1e6:.0f} MB/s for all workers"
    once, plain = size / 1e9, found["own"]
    made: list[Row] = []
    for name, title in VARIANTS.items():
        starts, what = found[name], f"{WORKERS} workers of a node, {title}"
        read, spread = median([each.read / 1e9 for each in starts])
        row = Row(f"{what}: read from the volume", read, "GB", "lower", spread=spread, note=about)
        made.append(beside(row, once, "the files once", MOST_READ if name == "cached" else None))
        cpu, spread = median([each.cpu_s for each in starts])
        row = Row(f"{what}: CPU of all", cpu, "s", "lower", spread=spread)
        made.append(_beside_plain(row, name, [each.cpu_s for each in plain]))
        seconds, spread = median([each.seconds for each in starts])
        row = Row(f"{what}: until the last has started", seconds, "s", "lower", spread=spread)
        made.append(_beside_plain(row, name, [each.seconds for each in plain]))
    return made


def _beside_plain(row: Row, name: str, plain: Sequence[float]) -> Row:
    return row if name == "own" else beside(row, median(plain)[0], VARIANTS["own"])
