"""Runs scenarios one after the other on an idle machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvasir_platform.cluster.local.processes import tail
from load_tests.report import CHANGES, Row, read
from load_tests.suite.freshness import Freshness
from load_tests.suite.history import ROOT
from load_tests.suite.idle import BUSY, LOAD, busy_share, load_average, other_processes
from load_tests.suite.scenario import Scenario

_POLL_S, _TELL_S, _LOOK_S = 1.0, 30.0, 5.0
_PATIENCE_S = 600.0
_STOPPING_S = 60.0
_TIMES_LONGER, _MORE_S = 4, 600.0
_SHOWN = 100
Say = Callable[[str], None]


class NotIdle(Exception):
    """Something else runs on the machine."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the run of one scenario ended; `problem` is empty if all its rows were measured."""

    scenario: Scenario
    seconds: float
    problem: str = ""


def plan(
    states: Sequence[Freshness], head: str, *, only: Sequence[str] = (), everything: bool = False
) -> list[Scenario]:
    """The scenarios to run, in order: those of `only`, else all that are stale, or with `everything` all that
    were not measured wholly at `head`."""
    if only:
        return [each.scenario for each in states if each.scenario.report in only]
    if everything:
        return [each.scenario for each in states if each.missing or not _all_at(each.commits, head)]
    return [each.scenario for each in states if not each.fresh]


def lacking(scenario: Scenario, given: Mapping[str, str]) -> tuple[str, ...]:
    """What the scenario needs and is not given."""
    return tuple(each for each in scenario.needs if not given.get(each))


def await_idle(say: Say, *, first: bool) -> None:
    """Wait until nothing else runs. Before the first scenario the load average counts as well, and processes
    that serve are not waited for. Raise NotIdle."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        others = other_processes()
        reasons = [f"{each.what}, process {each.pid}: {each.command}" for each in others]
        if others and first:
            raise NotIdle("\n  ".join(("the machine is not idle:", *reasons)))
        if (share := busy_share(_LOOK_S)) > BUSY:
            reasons.append(f"{share:.0%} of the CPUs are in use")
        if first and (load := load_average()) > LOAD:
            reasons.append(f"the load average is {load:.2f}, above {LOAD:g}")
        if not reasons:
            return
        if time.monotonic() > deadline:
            raise NotIdle("\n  ".join((f"the machine is not idle after {_PATIENCE_S:.0f} s:", *reasons)))
        say(f"waiting for an idle machine: {'; '.join(reasons)}")


def run_scenario(
    scenario: Scenario, given: Mapping[str, str], head: str, say: Say, *, root: Path = ROOT
) -> Outcome:
    """Run one scenario, its output in build/reports/NAME.log, and look at the report that it wrote."""
    log = root / "build" / "reports" / f"{scenario.report}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = [each.format(**given) for each in scenario.arguments]
    began = time.monotonic()
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [sys.executable, "-m", scenario.module, *arguments],
            cwd=root,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            ended = _watch(process, scenario, log, say)
            seconds = time.monotonic() - began
        finally:
            _stop(process)
    if not ended:
        return Outcome(scenario, seconds, f"not done in {seconds / 60:.0f} min, and stopped; see {log}")
    rows = read(root / "load_tests" / "reports" / f"{scenario.report}.json")
    problem = _problem(scenario, rows, head)
    return Outcome(scenario, seconds, f"{problem}; see {log}" if problem else "")


def _problem(scenario: Scenario, rows: Sequence[Row], head: str) -> str:
    """What lacks. A scenario's exit status says only whether a target was missed."""
    old = [row for row in rows if row.run is None or not _all_at((row.run.commit,), head)]
    if missing := scenario.missing(row.name for row in rows if row not in old):
        return f"{len(missing)} of its rows were not measured, as {missing[0]!r}"
    return ""


def _all_at(commits: Sequence[str], head: str) -> bool:
    """Whether all are that commit, without changes; the abbreviations may differ in length."""
    same = (each.startswith(head) or head.startswith(each) for each in commits)
    return bool(commits) and all(same) and not any(each.endswith(CHANGES) for each in commits)


def _watch(process: subprocess.Popen[bytes], scenario: Scenario, log: Path, say: Say) -> bool:
    """Wait for the end, with progress; return whether it came in time."""
    began = shown = time.monotonic()
    limit_s = _TIMES_LONGER * 60 * scenario.minutes + _MORE_S
    while True:
        try:
            process.wait(_POLL_S)
            return True
        except subprocess.TimeoutExpired:
            now = time.monotonic()
        if now - began > limit_s:
            return False
        if now - shown > _TELL_S:
            shown = now
            say(f"  {(now - began) / 60:.1f} of about {scenario.minutes} min: {_last_line(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started, if they still run."""
    for number, patience in ((signal.SIGINT, _STOPPING_S), (signal.SIGKILL, _STOPPING_S)):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue


def _last_line(log: Path) -> str:
    return "".join(tail(log, lines=1)).strip()[:_SHOWN]
