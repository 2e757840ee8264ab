"""What the rows of the scorecard share: a trial's means, the form of a figure, and the usual fleets."""

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
from tests.kit.lab.invariants import Descriptors, at_rest
from tests.kit.lab.load import asks, tally
from tests.kit.lab.stream import Ask, Outcome, Stream, open_stream

from kvasir.clock import MonotonicClock
from kvasir.config.spec.deployment import Deployment, EngineSpec, PoolSpec, SimSpec, SloSpec
from kvasir.core.requests import Role

STREAM_S = 120.0
"""No stream of a trial may take longer."""
PATIENT = (SloSpec(name="default", ttft_s=30.0, itl_s=1.0),)
"""So that faults are tried, and not whether a loaded machine is in time: refusals have rows of their own."""


class NotProven(AssertionError):
    """The fault that a row is about did not happen, so its figures would say nothing."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured promise. `target` None: shown beside the promise, and no promise itself."""

    what: str
    value: float
    unit: str
    better: Literal["lower", "higher"]
    target: float | None = None
    note: str = ""


@dataclass(slots=True)
class Trial:
    """What a row gets: a folder of its own, the clock, a seed, and somebody to tell how it goes."""

    folder: Path
    seed: int
    clock: MonotonicClock = field(default_factory=MonotonicClock)
    quiet: bool = False

    def rng(self, salt: int = 0) -> Random:
        """Randomness of this trial; `salt` tells its uses apart."""
        return Random(self.seed * 1_000_003 + salt)

    def say(self, text: str) -> None:
        """Progress, for whoever watches."""
        if not self.quiet:
            sys.stderr.write(f"    {text}\n")


def engine(**changes: Any) -> EngineSpec:
    """A simulated engine that steps every 30 ms, so that many of them fit on a small machine; `sim` is a
    mapping of SimSpec's fields."""
    sim = SimSpec(**({"decode_step_s": 0.03} | dict(changes.pop("sim", {}))))
    return EngineSpec(kind="sim", sim=sim, **changes)


def split(prefill: EngineSpec | None = None, decode: EngineSpec | None = None, **fields: Any) -> Deployment:
    """Prefill and decode apart."""
    pools = (
        PoolSpec(name="prefill", role=Role.PREFILL, engine=prefill or engine()),
        PoolSpec(name="decode", role=Role.DECODE, engine=decode or engine()),
    )
    return Deployment(**{"name": "scorecard", "pools": pools, "slo": PATIENT, **fields})


def whole(spec: EngineSpec | None = None, **fields: Any) -> Deployment:
    """One pool that does both."""
    pools = (PoolSpec(name="both", role=Role.BOTH, engine=spec or engine()),)
    usual = {"name": "scorecard", "disaggregation": "never", "pools": pools, "slo": PATIENT}
    return Deployment(**{**usual, **fields})


@asynccontextmanager
async def exercise(
    trial: Trial, deployment: Deployment, layout: Layout, rest_s: float = 15.0, key: str = ""
) -> AsyncIterator[Fleet]:
    """A fleet for the trial; afterwards all invariants are checked. Raises Violated. `key` as of Fleet."""
    async with Fleet(trial.folder, deployment, layout, clock=trial.clock, seed=trial.seed, key=key) as fleet:
        trial.say(f"{len(fleet.pids())} processes are up")
        # First connections and first requests open what stays open.
        headers = (f"Authorization: Bearer {key}",) if key else ()
        warm = (replace(ask, headers=headers) for ask in asks(trial.rng(99), 8, 2))
        for router in fleet.routers:
            await finished([await open_stream(router.address, next(warm), trial.clock) for _ in range(32)])
        before = Descriptors(fleet)
        yield fleet
        await at_rest(fleet, rest_s)
        await before.check(trial.clock)


async def begin(fleet: Fleet, address: str, work: Iterator[Ask], count: int) -> list[Stream]:
    """`count` streams at once, each of which has its first token when this returns."""
    streams = [await open_stream(address, next(work), fleet.clock) for _ in range(count)]
    async with asyncio.timeout(STREAM_S):
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
    return streams


async def finished(streams: Sequence[Stream]) -> list[Outcome]:
    """Wait for the end of all. Raises TimeoutError."""
    async with asyncio.timeout(STREAM_S):
        await asyncio.gather(*(stream.ended.wait() for stream in streams))
    return [stream.outcome for stream in streams]


async def decoded_on(address: str, streams: Sequence[Stream]) -> list[str]:
    """The id of the worker that decodes each stream; empty where nothing is on record."""
    found = []
    for stream in streams:
        page = await gateway.decision(address, stream.outcome.request_id)
        found.append(str(page["decisions"][0]["decode_worker"]))
    return found


async def seen(address: str, worker: LabWorker) -> dict[str, Any]:
    """What a router says of a worker."""
    return (await gateway.workers(address))[worker.address]


async def migrations(fleet: Fleet) -> float:
    """Requests that went on elsewhere after their worker was lost or drained, as the routers count them."""
    pages = [await gateway.metrics(router.address) for router in fleet.routers if router.process.alive]
    return sum(gateway.metric(page, "kvasir_migrations_total") for page in pages)


def usable(view: dict[str, Any]) -> bool:
    """Whether the router gives the worker new requests, as far as it says."""
    return view["state"] == "ready" and view.get("health", {}).get("state", "healthy") in (
        "healthy",
        "slow_start",
    )


def exactness(outcomes: Sequence[Outcome], note: str = "") -> Figure:
    """How many streams did not get exactly their tokens."""
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
