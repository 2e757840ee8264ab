"""Instructions that a router executes for a request, counted by valgrind: figures that do not change with the
speed of the machine.

The CPU time of the same code differs by a factor of three between machines, and by a few percent between two
processes on one machine; the number of its instructions hardly differs. So small costs can be told apart,
such as that of observing a router, and routers of different days can be compared. Instructions are not time:
one that waits for memory lasts as long as hundreds of others. What a request costs in CPU time is measured by
`make bench-gateway`.

The router runs in valgrind and is about as many times slower as SLOWDOWN says. So the clocks of all processes
but the client's are slowed down as much, by libfaketime, and what happens once a second has the share that it
has in a router at its full rate.

    make bench-instructions
    make bench-instructions ARGS='--passes 20'      smaller errors
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from load_tests.report import Row, write
from load_tests.scenarios.gateway.bodies import SIZES, WARM
from load_tests.scenarios.gateway.in_turn.observability import BEGINNING, MOST_RATIO
from load_tests.scenarios.gateway.measure import say
from load_tests.scenarios.gateway.packages import Packages
from load_tests.scenarios.gateway.processes import ROOT, Child, ProcessError
from load_tests.scenarios.gateway.systems import Stand, System, await_serving
from load_tests.vocabulary import large_model

SLOWDOWN = 45
"""A router in valgrind executes about as many instructions in this many seconds as one alone in a second."""
PASSES = 8
UNIT = "M instructions"
_SHORT = SIZES[0].name
_ROUTER = "kvasir_platform.apps.router_app"
_CLIENT = "client"
_LIBRARIES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib*/faketime/libfaketimeMT.so.1")
_PASS_SCALE = 0.25
_PASS_S = 900.0
_CONTROL_S = 120.0
_TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)


class Pass(NamedTuple):
    """What one pass over the bodies of a size took."""

    requests: int
    instructions: int


class Tools(NamedTuple):
    """The programs of the Debian packages valgrind and faketime, where this machine has them."""

    valgrind: str
    control: str
    slow_clock: Path


def tools() -> Tools:
    """Find the programs. Raise ProcessError that names the packages of missing ones."""
    valgrind, control = shutil.which("valgrind"), shutil.which("callgrind_control")
    libraries = [each for place in _LIBRARIES for each in Path("/").glob(place.lstrip("/"))]
    found = {"valgrind": valgrind and control, "faketime": libraries}
    missing = [package for package, there in found.items() if not there]
    if missing or valgrind is None or control is None:
        raise ProcessError(f"a package is missing: apt-get install {' '.join(missing)}")
    return Tools(valgrind, control, libraries[0])


class SlowStand(Stand):
    """A stand whose routers run in valgrind, and whose processes, other than clients, have slow clocks."""

    def __init__(self, folder: Path, found: Tools) -> None:
        super().__init__(folder, large_model(), Packages())
        self._counts = folder / "counts"
        self._counts.mkdir()
        self._tools = found

    def child(
        self,
        name: str,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        talks: bool = True,
        tree: Path = ROOT,
    ) -> Child:
        """Start a process in the checkout `tree`."""
        if name == _CLIENT:
            return super().child(name, argv, env, talks=talks, tree=tree)
        env = {
            **(env or {}),
            "LD_PRELOAD": str(self._tools.slow_clock),
            "FAKETIME": f"+0 x{1 / SLOWDOWN:.5f}",
        }
        if _ROUTER in argv:
            file = f"--callgrind-out-file={self._counts / name}"
            # Threads take turns: one that waits for the lock of valgrind could do so forever.
            options = ("--tool=callgrind", "--instr-atstart=no", "--fair-sched=yes", file)
            argv = [self._tools.valgrind, *options, *argv]
            env["PYTHONHASHSEED"] = "0"
        return super().child(name, argv, env, talks=talks, tree=tree)

    def counter(self, system: System) -> Counter:
        """Count the instructions of a router from now on."""
        return Counter(self._tools.control, system.process.pid, self._counts, system.name)


class Counter:
    """Counts the instructions of a process in valgrind."""

    def __init__(self, control: str, pid: int, folder: Path, name: str) -> None:
        self._control, self._pid = control, pid
        self._folder, self._name = folder, name
        self._order("-i", "on")
        self.read()

    def read(self) -> int:
        """Return the instructions since it was read last. Raise ProcessError."""
        self._order("-d")
        dumps = list(self._folder.glob(f"{self._name}.*"))
        if not dumps:
            raise ProcessError(f"{self._name}: valgrind wrote no counts")
        instructions = sum(total(dump.read_text(errors="replace")) for dump in dumps)
        for dump in dumps:
            dump.unlink()
        return instructions

    def _order(self, *arguments: str) -> None:
        command = [self._control, *arguments, str(self._pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_CONTROL_S, check=False)
        if done.returncode:
            raise ProcessError(f"{' '.join(command)}: {done.stdout[-300:]} {done.stderr[-300:]}")


def total(dump: str) -> int:
    """Return the instructions of one dump of callgrind. Raise ProcessError if it has no sum."""
    found = _TOTAL.search(dump)
    if found is None:
        raise ProcessError("valgrind wrote no sum of instructions")
    return int(found[1])


def measure(folder: Path, found: Tools, passes: int) -> list[Row]:
    """All rows. Raise ProcessError."""
    counted: dict[str, dict[str, list[Pass]]] = {}
    stand = SlowStand(folder, found)
    with stand:
        client = stand.client()
        short = [_SHORT]
        routers: Mapping[str, tuple[Callable[[], System], Sequence[str]]] = {
            "up": (stand.as_up, [each.name for each in (*SIZES, WARM)]),
            "off": (lambda: stand.unobserved("off"), short),
            "observed": (lambda: stand.observed("all"), short),
            "control": (lambda: stand.unobserved("control"), short),
        }
        for number, (kind, (start, sizes)) in enumerate(routers.items(), 1):
            say(f"router {number} of {len(routers)}, {kind}: starting in valgrind, which takes a minute")
            system = start()
            await_serving(client, system)
            counted[kind] = _counted(client, system, stand.counter(system), sizes, passes)
            system.process.stop()
    return rows_of(counted)


def _counted(
    client: Child, system: System, counter: Counter, sizes: Sequence[str], passes: int
) -> dict[str, list[Pass]]:
    made: dict[str, list[Pass]] = {size: [] for size in sizes}
    # The first pass fills caches and heaps.
    for number in range(passes + 1):
        client.ask({"do": "round", "scale": _PASS_SCALE})
        for size in sizes:
            counter.read()
            figures = client.ask(system.order("requests", size=size), _PASS_S)
            if "error" in figures:
                raise ProcessError(f"{system.name}, {size}: {figures['error']}")
            one = Pass(figures["count"], counter.read())
            clock_s = figures["wall_s"] / SLOWDOWN
            say(
                f"  pass {number} of {passes}, {size}: {per_request([one]):.4g} {UNIT}"
                f" a request, {one.requests / clock_s:.0f} requests a second of its clock"
            )
            if number:
                made[size].append(one)
    return made


def per_request(passes: Sequence[Pass]) -> float:
    """Return the millions of instructions of a request."""
    return sum(each.instructions for each in passes) / sum(each.requests for each in passes) / 1e6


def rows_of(counted: Mapping[str, Mapping[str, Sequence[Pass]]]) -> list[Row]:
    """Return the rows from the passes by router and size."""
    rows = [_row(f"request, {size}", passes, "as `kvasir up`") for size, passes in counted["up"].items()]
    off, observed, control = (counted[kind][_SHORT] for kind in ("off", "observed", "control"))
    everything = "costs, traces, exemplars, records of decisions, the console open and metrics scraped"
    return [
        *rows,
        replace(
            _row(f"{BEGINNING}{_SHORT}, default", observed, f"{everything}; peer: two routers with all off"),
            peer=(both := per_request([*off, *control])),
            ratio=per_request(observed) / both,
            target_ratio=MOST_RATIO,
        ),
        replace(
            _row(f"{BEGINNING}{_SHORT}, control", control, "a second router with all off; peer: the first"),
            peer=per_request(off),
            ratio=per_request(control) / per_request(off),
        ),
    ]


def _row(name: str, passes: Sequence[Pass], note: str) -> Row:
    each = [per_request([one]) for one in passes]
    made = f"{note}; {sum(one.requests for one in passes)} requests in {len(passes)} passes"
    return Row(name, per_request(passes), UNIT, "lower", spread=(min(each), max(each)), note=made)


def main() -> None:
    """Measure, write the report and print its table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--passes", type=int, default=PASSES, help=f"passes that are counted of each size ({PASSES})"
    )
    args = parser.parse_args()
    if args.passes < 1:
        parser.error("--passes must be at least 1")
    try:
        with tempfile.TemporaryDirectory(prefix="kvasir-instructions-") as folder:
            rows = measure(Path(folder), tools(), args.passes)
    except ProcessError as error:
        sys.exit(f"error: {error}")
    print(write("instructions", "make bench-instructions", rows).with_suffix(".md").read_text())
