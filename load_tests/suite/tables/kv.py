"""What is measured of KV that moves: between workers, to the tiers, and while a prompt is computed."""

from __future__ import annotations

from load_tests.suite.scenario import Scenario, names
from load_tests.suite.tables.paths import ENGINES, FUNCTION, MODULE, MOVEMENT, NATIVE, measuring

_LARGE = ("2 MiB", "32 MiB", "256 MiB")
_ADJACENT = ("32 MiB in 16 KiB pieces, neighbours", "32 MiB in 64 KiB pieces, neighbours")
_SCATTERED = ("32 MiB in 16 KiB pieces, scattered", "32 MiB in 64 KiB pieces, scattered")
_SHAPES = (*_LARGE, *_ADJACENT, *_SCATTERED)
_KINDS = ("", ", CPU")
_MEMCPY = "memcpy to shared memory"
_LENGTHS = (256, 512, 1024, 2048, 3800)

_SHM = (
    _MEMCPY,
    "NIXL alone",
    "NIXL adapter",
    "NIXL adapter as an idle engine polls it",
    "NIXL adapter as an idle engine polls it, checksum",
)
_TCP = (
    "raw TCP",
    "NIXL alone, TCP",
    "NIXL adapter, TCP",
    "NIXL adapter, TCP, checksum",
    "nccl adapter, socket",
    "nccl adapter, socket, checksum",
)
_TIERS = (
    _MEMCPY,
    *names(
        "{tier}, {direction}",
        tier=("CPU tier", "disk tier", "disk tier without the page cache", "Redis tier"),
        direction=("store", "load"),
    ),
)

MOVED = Scenario(
    "kv",
    "make bench-kv",
    "load_tests.scenarios.kv",
    (
        *names("{part}: load average of the machine before", part=("shm", "tcp", "tiers")),
        *names("shm: {who}, {shape}{kind}", who=_SHM, shape=_SHAPES, kind=_KINDS),
        *names("shm: NIXL alone, a descriptor for each piece, {shape}{kind}", shape=_ADJACENT, kind=_KINDS),
        *names("tcp: {who}, {shape}{kind}", who=_TCP, shape=_SHAPES, kind=_KINDS),
        *names("tiers: {who}, {shape}{kind}", who=_TIERS, shape=_SHAPES, kind=_KINDS),
        *names("ttft: from {tier}, {tokens} tokens", tier=("Redis", "disk"), tokens=_LENGTHS),
        *names("ttft: from {tier}, faster from", tier=("Redis", "disk")),
    ),
    (*MOVEMENT, *NATIVE, *measuring("scenarios/kv.py", "scenarios/kv_parts/*.py", "page_cache.py")),
    lines=MODULE,
    minutes=30,
)

OVERLAP = Scenario(
    "overlap",
    "make bench-overlap",
    "load_tests.scenarios.overlap",
    names(
        "{figure}, {tokens} tokens in chunks of {chunk}",
        chunk=(256, 512),
        tokens=(1024, 2048, 4000),
        figure=(
            "TTFT",
            "TTFT saved",
            "prefill's end to first token",
            "CPU of the decode engine",
        ),
    ),
    (*ENGINES, *measuring("scenarios/overlap.py")),
    lines=MODULE,
    minutes=8,
)

_POLICIES = ("lru", "lfu", "s3fifo")
_SHARES = ("1%", "2%", "5%", "10%", "25%", "50%")
_FLEETS = ("1 worker", "4 workers", "1 worker, halves of the trace swapped")

EVICTION = Scenario(
    "eviction",
    "make bench-eviction TRACE=mooncake_conversation.jsonl",
    "load_tests.scenarios.eviction",
    (
        *names(
            "hits, {who}, {share} of the blocks, {fleet}",
            fleet=_FLEETS,
            share=_SHARES,
            who=(*_POLICIES, "with foresight"),
        ),
        *names("CPU per block, {who}, {fleet}", fleet=_FLEETS, who=_POLICIES),
        *names(
            "hits, {order}, {who}, {share} of the blocks, 1 worker",
            order=("used from the front", "brought in from the end too"),
            who=_POLICIES,
            share=_SHARES,
        ),
    ),
    (
        "workers/kvasir_workers/tiers/arena.py",
        "workers/kvasir_workers/tiers/eviction*.py",
        "platform/kvasir_platform/workload/files.py",
        *measuring("scenarios/eviction.py"),
    ),
    lines=FUNCTION // 2,
    minutes=8,
    arguments=("{trace}",),
    needs=("trace",),
)
