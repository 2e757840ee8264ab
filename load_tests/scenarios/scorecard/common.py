"""Shared code of the scorecard's rows: a trial's resources, the format of a figure, and the usual fleets."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Literal

from tests.kit.lab import gateway
from tests.kit.lab.fleet import Fleet, LabWorker, Layout
from tests.kit.lab.invariants import Descriptors
from tests.kit.lab.load import asks, tally
from tests.kit.lab.stream import Ask, Outcome, Stream, open_stream

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec, SimSpec, SloSpec
from kvasir.core.requests import Role

STREAM_S = 120.0
"""Upper bound of a stream in a trial."""
PATIENT = (SloSpec(name="default", ttft_s=30.0, itl_s=1.0),)
"""Long deadlines, so that a trial measures the fault and not the machine's load. Refusals have their own
rows."""


class NotProven(AssertionError):
    """The fault of a row did not happen, so its figures would prove nothing."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured promise. With `target` None the figure has no target."""

    what: str
    value: float
    unit: str
    better: Literal["lower", "higher"]
    target: float | None = None
    note: str = ""


@dataclass(slots=True)
class Trial:
    """The resources of a row: a folder, the clock, a seed, and a progress output."""

    folder: Path
    seed: int
    clock: MonotonicClock = field(default_factory=MonotonicClock)
    quiet: bool = False

    def rng(self, salt: int = 0) -> Random:
        """Randomness of this trial; `salt` separates its uses."""
        return Random(self.seed * 1_000_003 + salt)

    def say(self, text: str) -> None:
        """Print progress."""
        if not self.quiet:
            sys.stderr.write(f"    {text}\n")


def engine(**changes: Any) -> EngineSpec:
    """A simulated engine that steps every 30 ms, so that many of them fit on a small machine. `sim` maps
    SimSpec fields to values."""
    sim = SimSpec(**({"decode_step_s": 0.03} | dict(changes.pop("sim", {}))))
    return EngineSpec(kind="sim", sim=sim, **changes)


def split(prefill: EngineSpec | None = None, decode: EngineSpec | None = None, **fields: Any) -> Deployment:
    """Separate prefill and decode pools."""
    pools = (
        PoolSpec(name="prefill", role=Role.PREFILL, engine=prefill or engine()),
        PoolSpec(name="decode", role=Role.DECODE, engine=decode or engine()),
    )
    return Deployment(**{"name": "scorecard", "pools": pools, "slo": PATIENT, **fields})


def whole(spec: EngineSpec | None = None, **fields: Any) -> Deployment:
    """One pool with role BOTH."""
    pools = (PoolSpec(name="both", role=Role.BOTH, engine=spec or engine()),)
    usual = {"name": "scorecard", "disaggregation": "never", "pools": pools, "slo": PATIENT}
    return Deployment(**{**usual, **fields})


@asynccontextmanager
async def exercise(
    trial: Trial, deployment: Deployment, layout: Layout, rest_s: float = 15.0, key: str = ""
) -> AsyncIterator[Fleet]:
    """A fleet for the trial; all invariants are checked when the context ends. Raise Violated. `key` as in
    Fleet."""
    made = Fleet(trial.folder, deployment, layout, clock=trial.clock, seed=trial.seed, key=key, rest_s=rest_s)
    async with made as fleet:
        trial.say(f"{len(fleet.pids())} processes are up")
        # The first connections and requests allocate what stays allocated.
        headers = (f"Authorization: Bearer {key}",) if key else ()
        warm = (replace(ask, headers=headers) for ask in asks(trial.rng(99), 8, 2))
        for router in fleet.routers:
            await finished([await open_stream(router.address, next(warm), trial.clock) for _ in range(32)])
        fleet.before = Descriptors(fleet)
        yield fleet


async def begin(fleet: Fleet, address: str, work: Iterator[Ask], count: int) -> list[Stream]:
    """Start `count` streams; return when each has its first token."""
    streams = [await open_stream(address, next(work), fleet.clock) for _ in range(count)]
    async with asyncio.timeout(STREAM_S):
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
    return streams


async def finished(streams: Sequence[Stream]) -> list[Outcome]:
    """Wait for all of them to end. Raise TimeoutError."""
    async with asyncio.timeout(STREAM_S):
        await asyncio.gather(*(stream.ended.wait() for stream in streams))
    return [stream.outcome for stream in streams]


async def decoded_on(address: str, streams: Sequence[Stream]) -> list[str]:
    """Return the id of the worker that decodes each stream; empty if there is no record."""
    found = []
    for stream in streams:
        page = await gateway.decision(address, stream.outcome.request_id)
        found.append(str(page["decisions"][0]["decode_worker"]))
    return found


async def seen(address: str, worker: LabWorker) -> dict[str, Any]:
    """Return the router's view of a worker."""
    return (await gateway.workers(address))[worker.address]


async def migrations(fleet: Fleet) -> float:
    """Requests that failed over after their worker was lost or drained, as counted by the routers."""
    pages = [await gateway.metrics(router.address) for router in fleet.routers if router.process.alive]
    return sum(gateway.metric(page, "kvasir_migrations_total") for page in pages)


def usable(view: dict[str, Any]) -> bool:
    """Whether the router assigns new requests to the worker."""
    return view["state"] == "ready" and view.get("health", {}).get("state", "healthy") in (
        "healthy",
        "slow_start",
    )


def exactness(outcomes: Sequence[Outcome], note: str = "") -> Figure:
    """The number of streams that did not get exactly their tokens."""
    result = tally(outcomes)
    errors = ", ".join(f"{code}: {count}" for code, count in sorted(result.errors.items()))
    first = next((each.detail for each in outcomes if each.detail), "")[:200]
    reported = "; ".join(
        filter(None, (f"{result.streams} streams, {result.tokens} tokens", errors, note, first))
    )
    return Figure(
        "streams with an error, or a lost, repeated or wrong token",
        result.streams - result.exact,
        "streams",
        "lower",
        0.0,
        reported,
    )
