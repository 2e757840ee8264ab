"""Corrupt blobs in a tier: garbage, a flipped bit, truncation, an old version, another model's, another
tenant's. Real vLLM, disk and a real Redis.

A worker computes prompts and exits. Every blob of each prompt is then corrupted in one of its tiers and
deleted from the other. A second worker with the same tiers serves the same prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import redis
from tests.kit.lab import gateway
from tests.kit.lab.redis_server import RedisServer
from tests.kit.programs import missing

from kvasir.config.spec.tiers import CpuTierSpec, DiskTierSpec, RedisTierSpec, TiersSpec
from kvasir.core.kv import Medium
from kvasir_workers.tiers.blob import FINGERPRINT_BYTES, HEADER_BYTES, make_header, read_header
from load_tests.scenarios.scorecard import real_engines
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial
from load_tests.scenarios.scorecard.real_engines import Heard, Stage

PROMISE = "a miss"
TOKENS = 12
WAIT_S = 20.0
UNTOUCHED = "untouched"
Tamper = Callable[[bytes, bytes, Random], bytes]
"""Builds a corrupt blob from a blob, a blob of another tenant, and a random generator."""


def _flipped(blob: bytes, _other: bytes, rng: Random) -> bytes:
    at = rng.randrange(HEADER_BYTES, len(blob))
    return blob[:at] + bytes([blob[at] ^ 1 << rng.randrange(8)]) + blob[at + 1 :]


def _of_another_model(blob: bytes, _other: bytes, rng: Random) -> bytes:
    data = blob[HEADER_BYTES:]
    return make_header(rng.randbytes(FINGERPRINT_BYTES), read_header(blob).block, data) + data


TAMPERS: dict[str, Tamper] = {
    UNTOUCHED: lambda blob, other, rng: blob,
    "garbage": lambda blob, other, rng: rng.randbytes(len(blob)),
    "truncated": lambda blob, other, rng: blob[: len(blob) // 2],
    "a flipped bit": _flipped,
    # The version is the field after the magic of eight bytes.
    "an old version": lambda blob, other, rng: blob[:8] + b"\0\0" + blob[10:],
    "another model's": _of_another_model,
    "another tenant's": lambda blob, other, rng: other,
}
MEDIA = {"disk": Medium.DISK, "Redis": Medium.REMOTE}


@dataclass(frozen=True, slots=True)
class Size:
    """`rounds` prompts of `words` words for each corruption and each tier."""

    rounds: int = 2
    words: int = 300


@dataclass(slots=True)
class Case:
    """A prompt, its corruption and tier, and its blobs in each tier, by key or file."""

    how: str
    where: str
    text: str
    right: Heard
    files: set[str]
    keys: set[str]


class Stores:
    """Direct access to the disk's folder and to Redis."""

    def __init__(self, folder: Path, server: RedisServer) -> None:
        self._folder = folder
        self._redis = redis.Redis(port=server.port)

    def files(self) -> set[str]:
        """All blobs on disk."""
        return {str(path) for path in self._folder.glob("slot-*/kv*/??/*")}

    def keys(self) -> set[str]:
        """All keys in Redis."""
        found: Any = self._redis.keys()
        return {key.decode() for key in found}

    def tamper(self, case: Case, other: bytes, rng: Random) -> int:
        """Corrupt a prompt's blobs in its tier and delete those in the other tier; return how many blobs
        changed."""
        changed = 0
        for name in sorted(case.files | case.keys):
            on_disk = name in case.files
            if on_disk != (case.where == "disk"):
                self._delete(name, on_disk)
                continue
            blob = self.read(name, on_disk)
            instead = TAMPERS[case.how](blob, other, rng)
            changed += instead != blob
            if on_disk:
                Path(name).write_bytes(instead)
            else:
                self._redis.set(name, instead)
        return changed

    def read(self, name: str, on_disk: bool) -> bytes:
        """Read one blob."""
        if on_disk:
            return Path(name).read_bytes()
        found: Any = self._redis.get(name)
        return bytes(found)

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()

    def _delete(self, name: str, on_disk: bool) -> None:
        if on_disk:
            Path(name).unlink()
        else:
            self._redis.delete(name)


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    if (reason := missing("redis-server")) is not None:
        raise NotProven(reason)
    disk = trial.folder / "disk"
    disk.mkdir(mode=0o700)
    with RedisServer(trial.folder) as server:
        tiers = TiersSpec(
            cpu=CpuTierSpec(bytes=64 << 20),
            # The trial tests the blobs, not whether a loaded machine meets the deadline.
            disk=DiskTierSpec(path=str(disk), lookup_timeout_s=1.0, timeout_s=10.0),
            redis=RedisTierSpec(url=server.url, lookup_timeout_s=1.0, timeout_s=10.0),
        )
        stores = Stores(disk, server)
        try:
            trial.say("the worker that writes is starting")
            cases, other = await _written(trial, size, tiers, stores)
            rng = trial.rng(1)
            changed = sum([stores.tamper(case, other, rng) for case in cases])
            if not changed:
                raise NotProven("nothing was tampered with")
            trial.say(f"{changed} blobs were tampered with; the worker that reads is starting")
            return await _read(trial, tiers, stores, cases, changed)
        finally:
            stores.close()


async def _written(trial: Trial, size: Size, tiers: TiersSpec, stores: Stores) -> tuple[list[Case], bytes]:
    """Return prompts that are in both tiers, and a blob of another tenant."""
    folder = trial.folder / "writer"
    folder.mkdir()
    ways = [(how, where) for how in TAMPERS for where in MEDIA] * size.rounds
    texts = real_engines.prompts(trial.seed, len(ways) + 1, size.words)
    cases = []
    async with real_engines.stage(folder, real_engines.together(tiers=tiers), ("both",)) as stage:
        before = stores.files(), stores.keys()
        await stage.one(texts[-1], TOKENS, salt="another tenant")
        files, _ = await _kept(stage, stores, before, blocks=1)
        other = await asyncio.to_thread(stores.read, min(files), True)
        for (how, where), text in zip(ways, texts, strict=False):
            before = stores.files(), stores.keys()
            right = await stage.one(text, TOKENS)
            found = await _kept(stage, stores, before, blocks=right.usage[0] // 32)
            cases.append(Case(how, where, text, right, *found))
    return cases, other


async def _kept(
    stage: Stage, stores: Stores, before: tuple[set[str], set[str]], blocks: int
) -> tuple[set[str], set[str]]:
    """Return the new blobs of both tiers, once there are at least that many in each."""
    found: tuple[set[str], set[str]] = (set(), set())

    async def written() -> bool:
        nonlocal found
        seen = found
        found = (stores.files() - before[0], stores.keys() - before[1])
        return min(map(len, found)) >= blocks and seen == found

    await gateway.until(written, WAIT_S, f"{blocks} blocks are kept", stage.clock, 0.1)
    return found


async def _read(
    trial: Trial, tiers: TiersSpec, stores: Stores, cases: list[Case], changed: int
) -> list[Figure]:
    """Send the same prompts to a worker that has computed none of them."""
    folder = trial.folder / "reader"
    folder.mkdir()
    wrong, believed = [], []
    async with real_engines.stage(folder, real_engines.together(tiers=tiers), ("both",)) as stage:
        await stage.one("the king", TOKENS)
        await _taken_over(stage, stores)
        for case in cases:
            heard = await stage.one(case.text, TOKENS)
            name = f"{case.how} in {case.where}"
            if not heard.same(case.right):
                wrong.append(name)
            if case.how != UNTOUCHED and heard.cached:
                believed.append(name)
            if case.how == UNTOUCHED and not heard.cached:
                raise NotProven(f"an untouched prompt was not read from {case.where}")
        tampered = [case for case in cases if case.how != UNTOUCHED]
        uncounted = 0
        for where in MEDIA:
            uncounted += await _uncounted(stage, where, sum(case.where == where for case in tampered))
    note = f"of {len(tampered)}, {changed} blobs in all: " + ", ".join(
        how for how in TAMPERS if how != UNTOUCHED
    )
    return [
        Figure("prompts with a wrong token", len(wrong), "prompts", "lower", 0.0,
               f"of {len(cases)}; {', '.join(wrong)}".rstrip("; ")),
        Figure("tampered prompts of which a block was used", len(believed), "prompts", "lower", 0.0,
               f"{note}; {', '.join(believed)}".rstrip("; ")),
        Figure("tampered prompts, less what the tiers counted as corrupt", uncounted, "prompts", "lower", 0.0,
               note),
    ]  # fmt: skip


async def _taken_over(stage: Stage, stores: Stores) -> None:
    """Wait until the worker has found all files that were not deleted: until then they count as ordinary
    misses."""

    async def all_found() -> bool:
        (load,) = await stage.loads("both")
        held = [tier["blocks"] for tier in load["tiers"] if tier["medium"] == Medium.DISK]
        return held == [len(stores.files())]

    await gateway.until(all_found, WAIT_S, "the disk's blocks are found", stage.clock, 0.05)


async def _uncounted(stage: Stage, where: str, prompts: int) -> int:
    """Prompts minus the corrupt blocks that a tier has counted. A disk detects many when it starts."""
    counted = 0

    async def in_all() -> bool:
        nonlocal counted
        (load,) = await stage.loads("both")
        counted = sum(tier["corrupt_blocks"] for tier in load["tiers"] if tier["medium"] == MEDIA[where])
        return counted >= prompts

    # The engine reports these with a later step or heartbeat.
    with contextlib.suppress(TimeoutError):
        await gateway.until(in_all, WAIT_S, "corrupt blocks are counted", stage.clock, 0.05)
    return max(0, prompts - counted)
