"""Faults of a KV transfer: its sender is stopped or its link is cut, also in mid-transfer, the sender is
killed, or a bit is flipped. Real vLLM.

The decode worker is stopped until the hand-off has arrived, so that the fault exists before, or just after,
it begins to pull. A link is cut by breaking every TCP connection between the two workers, as a router on the
way does that forgets them; a link over which nothing comes any more looks like a stopped sender.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import statistics
import subprocess
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil
from tests.kit.lab import gateway
from tests.kit.lab.processes import LabProcess, proc_state
from tests.kit.programs import program

from kvasir.config.spec.deployment import TransferSpec
from kvasir.config.spec.workers import WorkerSpec
from load_tests.scenarios.scorecard import real_engines
from load_tests.scenarios.scorecard.common import Figure, NotProven, Trial
from load_tests.scenarios.scorecard.real_engines import Heard, Stage
from load_tests.scenarios.scorecard.workers.flipping_worker import (
    FLIP_AT,
    FLIP_FILE,
    PROGRAM,
    RECEIVER,
    SENDER,
)

PROMISE = "detected, recomputed"
DEADLINE_S = 1.0
"""Deadline of a pull."""
LIVENESS_TIMEOUT_S = 8.0
"""Longer than any worker is stopped, so that the trial tests the pull and not ejection by the router."""
TOKENS = 16
WAIT_S = 5.0
SETTLED_S = 1.5
CERTAIN = ("stopped", "flipped bit", "killed")
"""Faults that fail every pull. A transfer in progress may complete before its link is cut, and then the next
one finds a broken connection; one that begins after that may connect again."""
IN_MID_TRANSFER = " in mid-transfer"
Kind = Literal["nixl", "nccl"]


@dataclass(frozen=True, slots=True)
class Size:
    """`rounds` of each fault with each adapter, with prompts of `words` words; the kill comes once, at the
    end. In mid-transfer, a fault comes at most `within_s` after the receiver continued."""

    kinds: tuple[Kind, ...] = ("nixl", "nccl")
    rounds: int = 4
    words: int = 1500
    within_s: float = 0.01


@dataclass(slots=True)
class Outcome:
    """Results of one adapter: by fault, the number of trials and of failed pulls; wrong streams; the added
    TTFT; and the fault after which the sender had exited."""

    tried: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    added_s: list[float] = field(default_factory=list)
    wrong: int = 0
    lost: str = ""


async def measure(trial: Trial, size: Size = Size()) -> list[Figure]:
    """Measure the row."""
    figures = []
    for kind in size.kinds:
        folder = trial.folder / kind
        folder.mkdir()
        trial.say(f"{kind}: two engines are starting")
        outcome = await _adapter(trial, folder, kind, size)
        figures += _figures(kind, outcome)
    return figures


def _figures(kind: Kind, outcome: Outcome) -> list[Figure]:
    for fault, tried in outcome.tried.items():
        if fault in CERTAIN and outcome.failed[fault] != tried:
            raise NotProven(f"{kind}: {fault}: {outcome.failed[fault]} pulls of {tried} failed")
    if outcome.failed["none"]:
        raise NotProven(f"{kind}: {outcome.failed['none']} pulls failed of no fault")
    reported = ", ".join(
        f"{fault}: {outcome.failed[fault]} of {tried}" for fault, tried in outcome.tried.items()
    )
    streams = sum(outcome.tried.values())
    worst = max(outcome.added_s) * 1e3
    return [
        Figure(f"{kind}: streams with a wrong token", outcome.wrong, "streams", "lower", 0.0,
               f"of {streams}; pulls that failed, {reported}"),
        Figure(f"{kind}: time to first token beyond that without a fault", worst, "ms", "lower",
               DEADLINE_S * 1e3, f"the longest; median {statistics.median(outcome.added_s) * 1e3:.0f} ms"),
        Figure(f"{kind}: prefill workers that ended of a pull that failed", bool(outcome.lost), "workers",
               "lower", 0.0, f"{outcome.lost}: see its log; no more was tried" if outcome.lost else ""),
    ]  # fmt: skip


async def _adapter(trial: Trial, folder: Path, kind: Kind, size: Size) -> Outcome:
    """Run every fault in turn."""
    faults = ["none", "flipped bit"] * size.rounds
    faults += ["none", "cut"] * size.rounds
    faults += ["stopped", f"stopped{IN_MID_TRANSFER}"] * size.rounds
    faults += ["none", f"cut{IN_MID_TRANSFER}", "after a cut"] * size.rounds + ["killed"]
    texts = real_engines.prompts(trial.seed, len(faults), size.words)
    flag = folder / "flip"
    deployment = real_engines.apart(
        transfer=TransferSpec(kind=kind, timeout_s=DEADLINE_S),
        worker=WorkerSpec(liveness_timeout_s=LIVENESS_TIMEOUT_S),
    )
    # With shared memory, a receiver can read while the sender is stopped.
    flips_at = RECEIVER if kind == "nixl" else SENDER
    env = {"UCX_TLS": "tcp,self", FLIP_FILE: str(flag), FLIP_AT: flips_at}
    outcome = Outcome()
    async with real_engines.stage(
        folder, deployment, ("prefill", "decode"), env, {flips_at: PROGRAM}
    ) as stage:
        expected = [await stage.one(text, TOKENS, salt="for comparison") for text in texts]
        usual_s = statistics.median(each.ttft_s for each in expected[1:])
        trial.say(f"{kind}: {usual_s * 1e3:.0f} ms to the first token")
        for fault, text, right in zip(faults, texts, expected, strict=True):
            delay_s = trial.rng(len(outcome.added_s)).random() * size.within_s
            before = await _failures(stage)
            heard, after_s = await _struck(stage, text, fault, flag, delay_s)
            failed = await _failed_since(stage, before, fault)
            outcome.tried[fault] = outcome.tried.get(fault, 0) + 1
            outcome.failed[fault] = outcome.failed.get(fault, 0) + failed
            outcome.wrong += not heard.same(right)
            if fault != "none":
                outcome.added_s.append(after_s - usual_s)
            result = "a failed pull" if failed else "pulled"
            result += "" if heard.same(right) else ", WRONG TOKENS"
            trial.say(f"{kind}: {fault}: {result}, first token after {after_s * 1e3:.0f} ms")
            if fault != "killed" and not await _sender_lives(stage):
                outcome.lost = fault
                break
    return outcome


async def _struck(stage: Stage, text: str, fault: str, flag: Path, delay_s: float) -> tuple[Heard, float]:
    """Run one stream with a fault at its hand-off. Return the seconds from when the receiver could begin to
    pull to its first token."""
    sender, receiver = stage.worker("prefill"), stage.worker("decode")
    async with _still(stage, receiver):
        heard, ended = stage.begin([{"prompt": text, "max_tokens": TOKENS}])

        async def handed_over() -> bool:
            views = (await gateway.workers(stage.address)).values()
            in_flight = {view["pool"]: view["in_flight"] for view in views}
            return bool(in_flight["decode"] and not in_flight["prefill"])

        await gateway.until(handed_over, WAIT_S, "the prompt is handed over", stage.clock, 0.005)
        links = await asyncio.to_thread(_connections, sender, receiver)
        if fault == "flipped bit":
            await asyncio.to_thread(flag.touch)
        if not fault.endswith(IN_MID_TRANSFER):
            await _strike(stage, sender, fault, links)
    began = stage.clock.now()
    if fault.endswith(IN_MID_TRANSFER):
        await asyncio.sleep(delay_s)
        await _strike(stage, sender, fault.removesuffix(IN_MID_TRANSFER), links)
    try:
        await ended
    finally:
        if fault.startswith("stopped"):
            await _signal(stage, sender, signal.SIGCONT, "SRD")
    if await asyncio.to_thread(flag.exists):
        raise NotProven("no bit was flipped")
    if fault.startswith("cut") and (left := links & await asyncio.to_thread(_connections, sender, receiver)):
        raise NotProven(f"{len(left)} of {len(links)} connections were not cut")
    return heard[0], heard[0].times_s[0] - began


async def _strike(stage: Stage, sender: LabProcess, fault: str, links: Set[tuple[int, int]]) -> None:
    if fault == "stopped":
        await _signal(stage, sender, signal.SIGSTOP, "T")
    if fault == "cut":
        await asyncio.to_thread(_cut, links)
    if fault == "killed":
        await sender.kill()


@asynccontextmanager
async def _still(stage: Stage, process: LabProcess) -> AsyncIterator[None]:
    """Stop a worker and its engine."""
    await _signal(stage, process, signal.SIGSTOP, "T")
    try:
        yield
    finally:
        await _signal(stage, process, signal.SIGCONT, "SRD")


async def _signal(stage: Stage, process: LabProcess, number: signal.Signals, states: str) -> None:
    """Send a signal to a worker and its engine, and wait until they are in one of `states`. Raise
    TimeoutError."""
    family = [each.pid for each in _family(process)]
    for pid in family:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    async def all_are() -> bool:
        # A zombie process counts as stopped.
        return all(proc_state(pid) in ("", "Z", *states) for pid in family)

    await gateway.until(all_are, WAIT_S, f"{process.name} is in one of {states}", stage.clock, 0.001)


def _family(process: LabProcess) -> list[psutil.Process]:
    """A worker and its engine, as far as they run."""
    try:
        root = psutil.Process(process.pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _cut(links: Set[tuple[int, int]]) -> None:
    """Break connections, all at once. Raise NotProven if there are none."""
    if not links:
        raise NotProven("no connection was there to be cut")
    wanted = " or ".join(f"( sport = :{mine} and dport = :{theirs} )" for mine, theirs in links)
    subprocess.run([program("ss"), "-K", "-t", wanted], check=True, capture_output=True)


def _connections(sender: LabProcess, receiver: LabProcess) -> set[tuple[int, int]]:
    """The ports of both ends, the sender's first, of the connections between two workers."""
    theirs = _ports(receiver)
    return {ports for ports in _ports(sender) if ports[::-1] in theirs}


def _ports(worker: LabProcess) -> set[tuple[int, int]]:
    found = set()
    for process in _family(worker):
        # A child that ends meanwhile has no connections.
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in process.net_connections("tcp"):
                if each.status == psutil.CONN_ESTABLISHED:
                    found.add((each.laddr.port, each.raddr.port))
    return found


async def _sender_lives(stage: Stage) -> bool:
    """Whether the prefill worker recovers. It detects the fault when it sends to a receiver that no longer
    waits, or over a link that is cut."""

    async def gone() -> bool:
        return not stage.worker("prefill").alive

    try:
        await gateway.until(gone, SETTLED_S, "the sender has ended", stage.clock, 0.05)
    except TimeoutError:
        return True
    return False


async def _failures(stage: Stage) -> int:
    return sum(int(load.get("transfers_failed", 0)) for load in await stage.loads("decode"))


async def _failed_since(stage: Stage, before: int, fault: str) -> bool:
    """Whether a pull has failed since; reported with a later step or heartbeat."""

    async def reported() -> bool:
        return await _failures(stage) > before

    patience_s = WAIT_S if fault in CERTAIN else 1.2
    try:
        await gateway.until(reported, patience_s, "a failed pull is told", stage.clock)
    except TimeoutError:
        return False
    return True
