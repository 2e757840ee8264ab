"""The measurements of the index bench, each in its own process, so that memory is measured separately:

    python -m load_tests.scenarios.index_parts PART BLOCKS WORKERS

prints the part's figures as one JSON object. Times are CPU seconds of this process unless named wall.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from struct import pack
from typing import Any

import msgspec

from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.kv import KvBatch, KvEventKind, KvSnapshotPart, KvStatus, Medium
from kvasir.core.messages import EncodedStep, WorkerFrame
from kvasir.core.requests import Request, Role, StepBatch, token_ids
from kvasir.native import PrefixTree, Shadow, chain_hashes, root_hash
from kvasir.wire.codec import decode_snapshot_part, decode_to_router, encode_snapshot_part, encode_to_router
from kvasir_router.decide import CostPolicy, Disaggregation, RateBook
from kvasir_router.fleet.fleet import Fleet
from kvasir_router.index import FetchSnapshot, FleetIndex, IndexMode
from kvasir_workers.server.holdings import PART_BLOCKS
from load_tests import index_workload as workload

PROMPT_BLOCKS = 2048
BLOCK_SIZE = 16
RECORDS_PER_STEP = 8
BATCH = 4000
CALLS = 200
Figures = dict[str, Any]


def resident() -> int:
    """Resident bytes of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmRSS")


def stored_record(parent: int, names: array[int]) -> bytes:
    """One STORED record on the device of rank 0."""
    return pack("<BBHIQ", KvEventKind.STORED, Medium.DEVICE, 0, len(names), parent) + names.tobytes()


def identity(number: int, role: Role = Role.BOTH) -> WorkerIdentity:
    """A worker of the bench, with a capacity above what it receives."""
    layout = KvLayout(BLOCK_SIZE, "bfloat16", "bench", 32, 8, 128, 2 << 20)
    return WorkerIdentity(
        worker_id=f"w{number}",
        epoch=1,
        pool=role.value,
        role=role,
        model="bench",
        revision="",
        tokenizer_digest="",
        max_model_len=1 << 20,
        kv=layout,
        kv_blocks=1 << 22,
        engine="bench",
        engine_version="1",
        transfer="bench",
        reports_kv=True,
    )


def fleet_index(workers: int) -> FleetIndex:
    """An index in which that many workers are EXACT and hold nothing."""
    index = FleetIndex(capacity_blocks=100_000_000, predicted_blocks=1_000_000, predicted_ttl_s=300.0)
    for number in range(workers):
        index.add(f"w{number}", identity(number), IndexMode.HYBRID, 0.0)
    for effect in index.tick(0.0):
        if isinstance(effect, FetchSnapshot):
            part = KvSnapshotPart(epoch=1, sequence=0, log=b"", last=True)
            index.snapshot_part(effect.worker_id, effect.attempt, part, 0.0)
            index.snapshot_ended(effect.worker_id, effect.attempt, None, 0.0)
    return index


def frames(workers: int, blocks: int) -> Iterator[tuple[int, int, bytes]]:
    """Worker, blocks, and the encoded session message of one engine step with its stored blocks."""
    sequences = [0] * workers
    logs: list[list[bytes]] = [[] for _ in range(workers)]
    counts = [0] * workers
    for event in workload.stored(1, workers, blocks):
        log = logs[event.worker]
        log.append(stored_record(event.parent, event.names))
        counts[event.worker] += len(event.names)
        if len(log) == RECORDS_PER_STEP:
            sequences[event.worker] += 1
            batch = KvBatch(1, sequences[event.worker], b"".join(log))
            frame = WorkerFrame(sequences[event.worker], 0, StepBatch(kv=batch))
            yield event.worker, counts[event.worker], encode_to_router(frame)
            log.clear()
            counts[event.worker] = 0


def status(index: FleetIndex, worker_id: str) -> KvStatus:
    """A registered worker."""
    found = index.status(worker_id)
    if found is None:
        raise RuntimeError(f"{worker_id} is not known")
    return found


def _timed(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    source = iter(items)
    while batch := list(islice(source, BATCH)):
        yield batch


def ingest(blocks: int, workers: int) -> Figures:
    """From the bytes of session messages into the fleet's index, and its memory; then half of all blocks are
    removed at random."""
    index = fleet_index(workers)
    gc.collect()
    before = resident()
    names_held: list[array[int]] = [array("Q") for _ in range(workers)]
    spent, held = 0.0, 0
    for batch in _batches(frames(workers, blocks)):

        def apply(batch: list[tuple[int, int, bytes]] = batch) -> None:
            for worker, _, data in batch:
                message = decode_to_router(data)
                if isinstance(message, WorkerFrame) and isinstance(message.payload, EncodedStep):
                    kv = message.payload.decode(None).kv
                    if kv is not None:
                        index.apply(f"w{worker}", kv, 1.0)

        spent += _timed(apply)
        held += sum(count for _, count, _ in batch)
    gc.collect()
    memory = resident() - before
    allocated = index.stats().bytes
    del batch

    rng = random.Random(3)
    sequences = [status(index, f"w{number}").sequence for number in range(workers)]
    for event in workload.stored(1, workers, blocks):
        names_held[event.worker].extend(event.names)
    gone, removing = 0, 0.0
    for worker in range(workers):
        names = names_held[worker]
        order = rng.sample(range(len(names)), len(names) // 2)
        for start in range(0, len(order), 256):
            chosen = array("Q", (names[i] for i in order[start : start + 256]))
            log = pack("<BBHI", KvEventKind.REMOVED, Medium.DEVICE, 0, len(chosen)) + chosen.tobytes()
            sequences[worker] += 1
            kv = KvBatch(1, sequences[worker], log)
            removing += _timed(partial(index.apply, f"w{worker}", kv, 1.0))
            gone += len(chosen)
        names_held[worker] = array("Q")
    left = index.stats()
    gc.collect()
    return {
        "held": held,
        "ingest_s": spent / held,
        "memory_bytes": memory / held,
        "allocated_bytes": allocated / held,
        "unstore_s": removing / gone,
        "memory_after_bytes": (resident() - before) / left.blocks,
        "allocated_after_bytes": left.bytes / left.blocks,
    }


def lookup(blocks: int, workers: int) -> Figures:
    """Look up a prompt of 32,768 tokens that every worker holds, in a large index; hashing is excluded."""
    tree = PrefixTree(100_000_000, 1_000_000)
    groups = [tree.add_group() for _ in range(workers)]
    for event in workload.stored(1, workers, blocks):
        tree.apply([groups[event.worker]], stored_record(event.parent, event.names))
    prompts = workload.prompts(2, 32, PROMPT_BLOCKS)
    for prompt in prompts:
        for group in groups:
            tree.apply([group], stored_record(0, prompt))
    depths = array("I", bytes(16 * (max(groups) + 1)))
    warm, cold = [], []
    for prompt in prompts:
        # The prompts before it have evicted this one from the processor's caches.
        cold.append(_wall(partial(tree.match, prompt, depths)))
        warm.append(_wall(partial(_repeat, CALLS, tree.match, prompt, depths)) / CALLS)
        if depths[4 * groups[-1]] != PROMPT_BLOCKS:
            raise RuntimeError("the look-up did not find what was stored")
    tokens = token_ids(random.Random(4).randrange(128_000) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE))
    root = root_hash("bench")
    hashing = [_wall(partial(_repeat, 50, chain_hashes, tokens, BLOCK_SIZE, root)) / 50 for _ in range(20)]
    return {"warm_s": warm, "cold_s": cold, "hash_s": hashing, "prompt_blocks": PROMPT_BLOCKS}


def _wall(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _repeat(times: int, work: Callable[..., object], *args: object) -> None:
    for _ in range(times):
        work(*args)


def remove(blocks: int, workers: int) -> Figures:
    """Remove a worker that holds a million blocks from an index of ten times as many: the time until no match
    includes it, and how long one slice of reclaiming its memory delays decisions."""
    index = fleet_index(workers)
    sequences = [0] * workers
    # Worker 0 holds a tenth of all blocks.
    others = (blocks - blocks // 10) // (workers - 1)
    sizes = [blocks // 10, *[others] * (workers - 1)]
    for number, size in enumerate(sizes):
        held = 0
        while held < size:
            for event in workload.stored(number * 1000 + held, 1, min(50_000, size - held)):
                sequences[number] += 1
                held += len(event.names)
                kv = KvBatch(1, sequences[number], stored_record(event.parent, event.names))
                index.apply(f"w{number}", kv, 1.0)
    held = status(index, "w0").blocks
    removal = _wall(partial(index.remove, "w0"))
    slices, now = [], 2.0
    while index.stats().unswept:
        now += 1.0
        slices.append(_wall(partial(index.tick, now)))
    return {"held": held, "remove_s": removal, "slices_s": slices, "reclaim_s": sum(slices)}


def snapshot(blocks: int, _workers: int) -> Figures:
    """From a worker's shadow to EXACT at the router: parts built, encoded, decoded and applied, then a suffix
    of changes that arrived meanwhile. The work of both sides, in one process, without the network."""
    shadow = Shadow(1, lambda salt, adapter: root_hash("bench", salt, adapter))
    rng = random.Random(5)
    made = 0
    while made < blocks:
        count = 128
        keys = array("Q")
        keys.frombytes(rng.randbytes(8 * count))
        tokens = array("I", rng.choices(range(128_000), k=count * BLOCK_SIZE))
        shadow.store(0, Medium.DEVICE, None, keys, tokens, BLOCK_SIZE)
        made += count
    shadow.take_log()
    index = FleetIndex(capacity_blocks=100_000_000, predicted_blocks=1_000_000, predicted_ttl_s=300.0)
    index.add("w0", identity(0), IndexMode.HYBRID, 0.0)
    (fetch,) = [effect for effect in index.tick(0.0) if isinstance(effect, FetchSnapshot)]
    suffix = [
        KvBatch(1, number, stored_record(0, names))
        for number, names in enumerate(workload.prompts(6, 1000, 64), start=1)
    ]
    began, cpu = time.perf_counter(), time.process_time()
    cursor, stalls, waiting = 0, [], iter(suffix)
    while cursor >= 0:
        log, cursor = shadow.export(0, cursor, PART_BLOCKS)
        data = encode_snapshot_part(KvSnapshotPart(1, 0, log, last=cursor < 0))
        part_began = time.perf_counter()
        index.snapshot_part("w0", fetch.attempt, decode_snapshot_part(data), 1.0)
        stalls.append(time.perf_counter() - part_began)
        for kv in islice(waiting, 8):
            index.apply("w0", kv, 1.0)
    for kv in waiting:
        index.apply("w0", kv, 1.0)
    index.snapshot_ended("w0", fetch.attempt, None, 1.0)
    while (due := index.next_due()) is not None and index.state("w0") != "exact":
        # The pauses that let decisions run count as well.
        time.sleep(max(0.0, due - (1.0 + time.perf_counter() - began)))
        tick_began = time.perf_counter()
        index.tick(due)
        stalls.append(time.perf_counter() - tick_began)
    took, spent = time.perf_counter() - began, time.process_time() - cpu
    reached = status(index, "w0")
    if reached.state != "exact":
        raise RuntimeError(f"not exact: {reached}")
    return {"held": reached.blocks, "wall_s": took, "cpu_s": spent, "stalls_s": stalls}


def decision(_blocks: int, workers: int) -> Figures:
    """A decision over `workers` prefill and as many decode workers for a prompt of 32,768 tokens with given
    hashes."""
    index = FleetIndex(capacity_blocks=100_000_000, predicted_blocks=1_000_000, predicted_ttl_s=300.0)
    rng = random.Random(7)
    fleet = Fleet(
        CostPolicy(Disaggregation.ALWAYS, rng),
        index,
        RateBook(),
        hash_blocks=lambda request, size: chain_hashes(request.tokens, size, root_hash("bench")),
        expected_output_tokens=256,
    )
    for number in range(2 * workers):
        role = Role.PREFILL if number < workers else Role.DECODE
        fleet.add(f"w{number}", identity(number, role), 0.0)
    for effect in index.tick(0.0):
        if isinstance(effect, FetchSnapshot):
            part = KvSnapshotPart(1, 0, b"", last=True)
            index.snapshot_part(effect.worker_id, effect.attempt, part, 0.0)
            index.snapshot_ended(effect.worker_id, effect.attempt, None, 0.0)
    tokens = token_ids(rng.randrange(128_000) for _ in range(PROMPT_BLOCKS * BLOCK_SIZE))
    names = chain_hashes(tokens, BLOCK_SIZE, root_hash("bench"))
    for number in range(2 * workers):
        depth = rng.randrange(PROMPT_BLOCKS)
        index.apply(f"w{number}", KvBatch(1, 1, stored_record(0, names[:depth])), 1.0)
    request = Request("r", "bench", tokens)
    took, committing = [], []
    for number in range(1000):
        began = time.perf_counter()
        plan = fleet.plan(request, names, 1.0 + number)
        took.append(time.perf_counter() - began)
        if plan is None:
            raise RuntimeError("no plan")
        if number % 10 == 0:
            named = Request(f"r{number}", "bench", tokens)
            began = time.perf_counter()
            fleet.commit(named, names, plan, 1.0 + number)
            committing.append(time.perf_counter() - began)
    return {"pairs": workers * workers, "decision_s": took, "commit_s": committing}


def events(_blocks: int, _workers: int) -> Figures:
    """vLLM's event messages into a worker's shadow: decoding, hashing and recording, for each block size."""
    figures: Figures = {}
    rng = random.Random(8)
    for size in (16, 64, 128):
        shadow = Shadow(1, lambda salt, adapter: root_hash("bench", salt, adapter))
        samples = []
        for _ in range(7):
            payloads, count = _vllm_payloads(rng, size)

            def record(shadow: Shadow = shadow, payloads: list[bytes] = payloads) -> None:
                for payload in payloads:
                    shadow.ingest(0, payload)
                    shadow.take_log()

            samples.append(_timed(record) / count)
        figures[f"event_{size}_s"] = samples
    return figures


def _vllm_payloads(rng: random.Random, block_size: int) -> tuple[list[bytes], int]:
    """Steps of an engine with a token budget of 2,048: one prompt chunk, and one output block per
    `block_size` steps of each of 16 streams."""
    encoder = msgspec.msgpack.Encoder()
    payloads, blocks = [], 0
    for _ in range(64):
        chunk = max(1, 2048 // block_size)
        stored = [_vllm_stored(rng, chunk, block_size)]
        stored += [_vllm_stored(rng, 1, block_size) for _ in range(16) if rng.random() < 1 / block_size]
        blocks += chunk + len(stored) - 1
        payloads.append(encoder.encode([time.time(), stored, 0]))
    return payloads, blocks


def _vllm_stored(rng: random.Random, count: int, block_size: int) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": [rng.randbytes(32) for _ in range(count)],
        "parent_block_hash": None,
        "token_ids": [rng.randrange(128_000) for _ in range(count * block_size)],
        "block_size": block_size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * count,
        "group_idx": 0,
        "session_id": None,
    }


PARTS = {part.__name__: part for part in (ingest, lookup, remove, snapshot, decision, events)}


def main() -> None:
    part, blocks, workers = sys.argv[1:4]
    json.dump(PARTS[part](int(blocks), int(workers)), sys.stdout)


if __name__ == "__main__":
    main()
