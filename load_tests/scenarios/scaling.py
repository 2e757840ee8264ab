"""How fast a pool follows its load: from the planner's decision to a serving replica, on real Ray Serve.

Starts the product with `make up` and an autoscaled pool, and varies the number of clients: one replica,
three, none, and back. With two replicas some clients would wait for longer than the SLO, and none is refused
for that. The scenario runs with simulated engines, whose start is that of the process alone, and with vLLM on
the shipped model. Every answer is checked; failed or truncated ones are counted, and none is allowed.

Single engines are started with and without what shortens a start (start_up.py), from a network volume and
from object storage (sources), and models that cannot start are refused (models/refused.py). `--only` measures
a part and keeps the other rows of the report, with the commit at which they were measured.

    make bench-scaling
    make bench-scaling ARGS='--only start-up'
    make bench-scaling ARGS='--rounds 1 --engines sim --no-report'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir_platform.bench.client.endpoint import CallResult
from load_tests.client import stream_completion
from load_tests.report import REPORTS, Row, median, merged, read, write
from load_tests.scenarios import start_up
from load_tests.scenarios.foundation import MODEL, ROOT, Stack, running_stack
from load_tests.scenarios.models import refused
from load_tests.scenarios.sources import node, streaming

SPEC: Mapping[str, Any] = {
    "disaggregation": "never",
    "slo": [{"name": "default", "ttft_s": 1, "itl_s": 0.5}],
    "admission": {"patience": 0},
    "scaling": {"interval_s": 2, "window_s": 6, "idle_s": 10, "start_s": 10, "stale_s": 6},
    "worker": {"drain_s": 10},
}
POOL = "workers"
SEATS = 4
ENGINES: Mapping[str, Mapping[str, Any]] = {
    "sim": {"kind": "sim", "max_num_seqs": SEATS, "sim": {"decode_step_s": 0.03}},
    "vllm": {"kind": "vllm", "max_num_seqs": SEATS, "threads": 1, "max_num_batched_tokens": 512},
}
TOKENS: Mapping[str, int] = {"sim": 60, "vllm": 200}
MOST = 3
CLIENTS = 3 * SEATS - 1
LONGEST_S = 240.0
LOOK_S = 0.05
_PARTS = ("pools", "start-up", "node-cache", "streaming", "refusals")
_STARTS = {"start-up": start_up.measure, "node-cache": node.measure, "streaming": streaming.measure}


@dataclass(slots=True)
class Round:
    """Seconds of one rise, fall, sleep and wake-up."""

    to_serving_s: list[float] = field(default_factory=list)
    grown_s: float = 0.0
    fallen_s: float = 0.0
    awake_s: float = 0.0
    answers: int = 0
    wrong: int = 0


@dataclass(slots=True)
class Load:
    """Clients that stream one answer after the other."""

    address: str
    tokens: int
    answers: int = 0
    wrong: int = 0
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def resize(self, count: int) -> None:
        """Set the number of clients; surplus clients finish their answers first."""
        self._wanted = count
        self._tasks = [task for task in self._tasks if not task.done()]
        for number in range(len(self._tasks), count):
            self._tasks.append(asyncio.create_task(self._run(number)))

    _wanted: int = 0

    async def one(self) -> CallResult:
        """One answer, checked."""
        self.answers += 1
        result = CallResult(0.0)
        try:
            result = await stream_completion(self.address, MODEL, "In the beginning", self.tokens)
            self.wrong += result.output_tokens != self.tokens
        except (RuntimeError, OSError) as error:
            print(f"  wrong: {error}", flush=True)
            self.wrong += 1
        return result

    async def _run(self, number: int) -> None:
        while number < self._wanted:
            await self.one()

    async def rest(self) -> None:
        """Stop all clients."""
        self.resize(0)
        await asyncio.gather(*self._tasks)


def _status(stack: Stack) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"http://{stack.address}/status", timeout=10) as answer:
        found: list[dict[str, Any]] = json.load(answer)["workers"]
    return found


def _asked(stack: Stack, *command: str) -> str:
    ran = subprocess.run(
        [sys.executable, "-m", "kvasir_platform.cli.main", "-o", "json", *command],
        env={**os.environ, "KVASIR_HOME": str(stack.home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return ran.stdout


def _story(stack: Stack) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_asked(stack, "explain", "scaling"))
    return found


async def _until(stack: Stack, true: Callable[[list[dict[str, Any]]], bool]) -> float:
    """The time at which the condition became true."""
    deadline = time.monotonic() + LONGEST_S
    while not true(await asyncio.to_thread(_status, stack)):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {LONGEST_S:.0f} s: {_story(stack)}")
        await asyncio.sleep(LOOK_S)
    return time.monotonic()


def _serving(workers: Sequence[Mapping[str, Any]]) -> int:
    return sum(worker["state"] == "ready" for worker in workers)


async def _round(stack: Stack, engine: str) -> Round:
    found, load = Round(), Load(stack.address, TOKENS[engine])
    # A woken pool with recent load gets more replicas: wait until it has settled at one.
    await asyncio.to_thread(_asked, stack, "scale", f"{POOL}=1")
    await _until(stack, lambda workers: len(workers) == _serving(workers) == 1)
    began = time.monotonic()
    load.resize(CLIENTS)
    await asyncio.to_thread(_asked, stack, "scale", f"{POOL}=auto")
    served: list[float] = []
    for count in range(2, MOST + 1):
        served.append(await _until(stack, lambda workers, count=count: _serving(workers) >= count))  # type: ignore[misc]
    found.grown_s = served[-1] - began
    story, now = await asyncio.to_thread(_story, stack), time.monotonic()
    starts = [now - act["ago_s"] for act in story["acts"] if act["what"] == "start" and act["done"]]
    asked = [
        at
        for at, act in zip(starts, [a for a in story["acts"] if a["what"] == "start"], strict=False)
        for _ in range(act["count"])
    ]
    found.to_serving_s = [at - since for since, at in zip(asked[-(MOST - 1) :], served, strict=True)]
    await load.rest()
    fell = time.monotonic()
    found.fallen_s = await _until(stack, lambda workers: not workers) - fell
    found.awake_s = (await load.one()).ttft_s
    found.answers, found.wrong = load.answers, load.wrong
    return found


def _rounds(engine: str, rounds: int) -> list[Round]:
    pool = {
        "name": POOL,
        "role": "both",
        "cpus": 0.1,
        "scaling": {"min": 0, "max": MOST},
        "engine": ENGINES[engine],
    }
    with tempfile.TemporaryDirectory(prefix="kvasir-scaling-") as folder:
        path = Path(folder) / "kvasir.yaml"
        path.write_text(json.dumps({**SPEC, "pools": [pool]}))
        command = ("make", "--no-print-directory", "up", f"FILE={path}", "ARGS=--port 0 -o json")
        with running_stack(ROOT, command) as stack:
            found = []
            for number in range(rounds):
                found.append(asyncio.run(_round(stack, engine)))
                print(f"  {engine}, round {number + 1}: {found[-1]}", flush=True)
            return found


def rows(engine: str, found: Sequence[Round]) -> list[Row]:
    """The report rows of one kind of engine."""
    serving, serving_spread = median([each for one in found for each in one.to_serving_s])
    grown, grown_spread = median([one.grown_s for one in found])
    fallen, fallen_spread = median([one.fallen_s for one in found])
    awake, awake_spread = median([one.awake_s for one in found])
    answers, wrong = sum(one.answers for one in found), sum(one.wrong for one in found)
    return [
        Row(f"decision to serving, {engine}", serving, "s", "lower", spread=serving_spread),
        Row(
            f"one replica to three, from the load's rise, {engine}", grown, "s", "lower", spread=grown_spread
        ),
        Row(
            f"three replicas to none, from the last answer, {engine}",
            fallen,
            "s",
            "lower",
            spread=fallen_spread,
            note=f"idle_s is {SPEC['scaling']['idle_s']}",
        ),
        Row(f"first token of a model that slept, {engine}", awake, "s", "lower", spread=awake_spread),
        Row(
            f"answers that failed or were cut, {engine}",
            wrong,
            "answers",
            "lower",
            target=0,
            note=f"of {answers}",
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="rises and falls, and starts, of each kind (3)")
    parser.add_argument("--engines", default="sim,vllm", help="sim, vllm, or both (both)")
    parser.add_argument("--only", choices=_PARTS, help="measure one part (all)")
    parser.add_argument("--no-report", action="store_true", help="only print")
    args = parser.parse_args(argv)
    parts = _PARTS if args.only is None else (args.only,)
    if "pools" in parts:
        for engine in args.engines.split(","):
            _report(rows(engine, _rounds(engine, args.rounds)), keep=not args.no_report)
    load = f"load average {os.getloadavg()[0]:.1f} before"
    for part in filter(_STARTS.__contains__, parts):
        for found in _STARTS[part](args.rounds):
            _report(found, keep=not args.no_report, settings=load)
    if "refusals" in parts:
        _report(list(refused.measure(args.rounds)), keep=not args.no_report)
    return 0


def _report(found: Sequence[Row], *, keep: bool, settings: str = "") -> None:
    """Print rows and, with `keep`, put them into the report at once: what follows takes minutes, and may be
    interrupted. `settings` are those of `write`."""
    for row in found:
        print(f"{row.name}: {row.value:.3g} {row.unit} {row.spread or ''} {row.note}", flush=True)
    if keep:
        written = merged(read(REPORTS / "scaling.json"), found)
        print(write("scaling", "make bench-scaling", written, settings=settings))


if __name__ == "__main__":
    sys.exit(main())
