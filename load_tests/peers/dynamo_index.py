"""Dynamo's radix tree on the workload of the index bench. Run in an environment that has `ai-dynamo-runtime`,
with the folder of index_workload.py as its argument; prints one JSON object.

Dynamo's Python binding takes one event as JSON. Events are built before the clock starts, so that decoding
and the tree are measured, as for ours. CPU time includes all threads of the process, because the tree has its
own thread.
"""

from __future__ import annotations

import json
import sys
import time
from array import array
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any


def _event(number: int, parent: int, names: array[int]) -> bytes:
    blocks = [{"block_hash": name, "tokens_hash": name} for name in names]
    stored = {"parent_hash": parent or None, "blocks": blocks}
    return json.dumps({"event_id": number, "data": {"stored": stored}, "dp_rank": 0}).encode()


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS")


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    blocks, workers = int(sys.argv[2]), int(sys.argv[3])
    # Neither is installed where this is checked: one is in the given folder, the other belongs to the peer.
    workload: Any = import_module("index_workload")
    tree: Any = import_module("dynamo._core").RadixTree()
    before = _resident()
    events = workload.stored(1, workers, blocks)
    spent, held, number = 0.0, 0, 0
    while batch := list(islice(events, 2000)):
        encoded = []
        for each in batch:
            number += 1
            held += len(each.names)
            encoded.append((each.worker, _event(number, each.parent, each.names)))
        tree.find_matches([1])
        began = time.process_time()
        for worker, event in encoded:
            tree.apply_event(worker, event)
        tree.find_matches([1])
        spent += time.process_time() - began
        del encoded, batch
    memory = _resident() - before

    (prompt,) = workload.prompts(2, 1, 2048)
    for worker in range(workers):
        tree.apply_event(worker, _event(number + worker + 1, 0, prompt))
    asked = list(prompt)
    lookups = []
    for _ in range(50):
        began = time.process_time()
        scores = tree.find_matches(asked).scores
        lookups.append(time.process_time() - began)
    if min(scores.values()) != len(asked):
        raise RuntimeError("the look-up did not find what was stored")
    began = time.perf_counter()
    tree.remove_worker(0)
    tree.find_matches([1])
    removed = time.perf_counter() - began
    json.dump(
        {
            "ingest_s": spent / held,
            "memory_bytes": memory / held,
            "lookup_s": sorted(lookups)[len(lookups) // 2],
            "remove_s": removed,
            "held": held,
            "held_by_removed": held / workers,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
