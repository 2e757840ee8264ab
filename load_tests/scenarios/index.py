"""Cost of the index: ingest, memory, look-up, removal, snapshot and decision, compared with Dynamo's tree.

Each measurement runs in its own process. Dynamo's runtime is installed from PyPI into its own environment for
the run; if that fails, its column is empty and the notes say why.

    make bench-index
    make bench-index ARGS=--quick     a tenth of the blocks, as a smoke test
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvasir import native
from kvasir.compiled import is_compiled
from load_tests.report import Row, median, write

ROOT = Path(__file__).resolve().parents[2]
DYNAMO = "ai-dynamo-runtime==1.6.1"
WORKERS = 16
REPEATS = 3
Figures = dict[str, Any]


def measure(part: str, blocks: int, workers: int = WORKERS) -> Figures:
    """Run one part in its own process. Raise CalledProcessError if it fails."""
    sys.stderr.write(f"{part}: {blocks:,} blocks, {workers} workers\n")
    command = [sys.executable, "-m", "load_tests.scenarios.index_parts", part, str(blocks), str(workers)]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    figures: Figures = json.loads(run.stdout)
    return figures


def dynamo(folder: Path, blocks: int) -> list[Figures] | str:
    """Dynamo's figures on the same workload, or the reason why there are none."""
    python = folder / "bin" / "python"
    sys.stderr.write(f"{DYNAMO}: installing\n")
    for command in (
        [sys.executable, "-m", "venv", str(folder)],
        [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", DYNAMO],
    ):
        installed = subprocess.run(command, capture_output=True, text=True, check=False)
        if installed.returncode:
            lines = installed.stderr.strip().splitlines() or ["no reason given"]
            return f"{DYNAMO} did not install: {lines[-1][:200]}"
    figures = []
    for _ in range(REPEATS):
        sys.stderr.write(f"{DYNAMO}: {blocks:,} blocks\n")
        program = ROOT / "load_tests" / "peers" / "dynamo_index.py"
        run = subprocess.run(
            [str(python), str(program), str(ROOT / "load_tests"), str(blocks), str(WORKERS)],
            capture_output=True,
            text=True,
            check=False,
        )
        if run.returncode:
            return f"{DYNAMO} failed: {run.stderr.strip().splitlines()[-1][:200]}"
        figures.append(json.loads(run.stdout))
    return figures


def _row(
    name: str,
    samples: Sequence[float],
    unit: str,
    target: float | None,
    peers: Sequence[float] = (),
    *,
    note: str = "",
) -> Row:
    value, spread = median(samples)
    peer = statistics.median(peers) if peers else None
    ratio = value / peer if peer else None
    return Row(name, value, unit, "lower", target, peer, ratio, spread=spread, note=note)


def rows(million: int, peer: list[Figures] | str) -> list[Row]:
    """Every row, with 10 times `million` blocks in the large index."""
    peers = peer if isinstance(peer, list) else []
    why = peer if isinstance(peer, str) else f"peer: {DYNAMO}, {million:,} blocks, JSON events"
    large = [measure("ingest", 10 * million) for _ in range(REPEATS)]
    look = measure("lookup", million)
    dead = [measure("remove", 10 * million) for _ in range(REPEATS)]
    exact = [measure("snapshot", million) for _ in range(REPEATS)]
    small, big = measure("decision", 0, 8), measure("decision", 0, 32)
    worker = measure("events", 0)

    def of(figures: Sequence[Figures], key: str, scale: float) -> list[float]:
        return [each[key] * scale for each in figures]

    blocks = look["prompt_blocks"]
    made = [
        _row(
            "ingest, a stored block from the wire",
            of(large, "ingest_s", 1e6),
            "µs",
            0.15,
            of(peers, "ingest_s", 1e6),
            note=why,
        ),
        _row(
            "ingest, a removed block",
            of(large, "unstore_s", 1e6),
            "µs",
            None,
            note="256 names at random in a batch",
        ),
        _row(
            "memory of a block",
            of(large, "memory_bytes", 1),
            "B",
            48,
            of(peers, "memory_bytes", 1),
            note=f"resident, {large[0]['held']:,} blocks; {large[0]['allocated_bytes']:.1f} B allocated",
        ),
        _row(
            "memory of a block after half were removed at random",
            of(large, "memory_after_bytes", 1),
            "B",
            64,
            note=f"resident; {large[0]['allocated_after_bytes']:.1f} B allocated",
        ),
        _row(
            "lookup, a block matched",
            [each / blocks * 1e9 for each in look["warm_s"]],
            "ns",
            2,
            [each / blocks * 1e9 for each in of(peers, "lookup_s", 1)],
            note=f"{blocks} blocks held by {WORKERS} workers; both called from Python",
        ),
        _row("lookup, a prompt of 32,768 tokens", of_list(look["warm_s"], 1e6), "µs", 5),
        _row("lookup, the same, out of the caches", of_list(look["cold_s"], 1e6), "µs", None),
        _row("hash, a prompt of 32,768 tokens", of_list(look["hash_s"], 1e6), "µs", 20),
        _row(
            "remove a dead worker",
            of(dead, "remove_s", 1e3),
            "ms",
            10,
            note=f"{dead[0]['held']:,} blocks, until no match names it",
        ),
        _row(
            "remove, its memory reclaimed",
            of(dead, "reclaim_s", 1e3),
            "ms",
            None,
            note=f"in {len(dead[0]['slices_s'])} slices",
        ),
        _row("remove, the longest slice", [max(each["slices_s"]) * 1e3 for each in dead], "ms", 1),
        _row(
            "snapshot and suffix until exact",
            of(exact, "wall_s", 1),
            "s",
            0.5,
            note=f"{exact[0]['held']:,} blocks, both sides' work, without the network",
        ),
        _row(
            "snapshot, the longest part",
            [max(each["stalls_s"]) * 1e3 for each in exact],
            "ms",
            1,
            note="what a decision can wait for",
        ),
        _row(
            f"decision, {small['pairs']} pairs",
            of_list(small["decision_s"], 1e6),
            "µs",
            50,
            note="index look-up included",
        ),
        _row(f"decision, {big['pairs']:,} pairs", of_list(big["decision_s"], 1e6), "µs", 200),
        _row("decision, accounting and prediction", of_list(big["commit_s"], 1e6), "µs", None),
    ]
    targets = {16: 0.3, 64: 0.6, 128: 1.0}
    for size, target in targets.items():
        made.append(
            _row(f"event to shadow, block of {size}", of_list(worker[f"event_{size}_s"], 1e6), "µs", target)
        )
    return made


def of_list(samples: Sequence[float], scale: float) -> list[float]:
    """Convert samples to another unit."""
    return [each * scale for each in samples]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks; writes no report")
    parser.add_argument("--no-peer", action="store_true", help="do not install Dynamo")
    args = parser.parse_args()
    if not (native.IS_NATIVE and is_compiled()):
        sys.exit("the native code is not built; figures of Python in its place do not count: make install")
    million = 100_000 if args.quick else 1_000_000
    peer: list[Figures] | str = "not asked for"
    if not args.no_peer:
        with tempfile.TemporaryDirectory() as folder:
            peer = dynamo(Path(folder), million)
    made = rows(million, peer)
    if args.quick:
        for row in made:
            print(f"{row.name}: {row.value:.4g} {row.unit} (target {row.target}, peer {row.peer})")
        return
    print(write("index", "make bench-index", made))


if __name__ == "__main__":
    main()
