"""Cost of moving KV between workers, and to and from the tiers.

Host memory to host memory on one machine, compared with the machine's limits: memcpy, raw sockets, and NIXL
alone with the same descriptors, in turn in one run. Then whether loading is faster than computing: TTFT of a
prompt that is in a tier compared with a cold prompt, with real vLLM.

    make bench-kv
    make bench-kv ARGS=--quick              small sizes and few rounds, as a smoke test; writes no report
    make bench-kv ARGS="--parts tcp,tiers"  some of shm, tcp, tiers, ttft; the others' rows stay
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.kit.lab.redis_server import RedisServer

from kvasir import native
from load_tests.report import REPORTS, Row, read, write
from load_tests.scenarios.kv_parts.contenders import (
    GB,
    Adapter,
    BareNixl,
    Contender,
    Memcpy,
    RawTcp,
    Samples,
    TierTurn,
    take_turns,
)
from load_tests.scenarios.kv_parts.memory import MIB, Case, cases
from load_tests.scenarios.kv_parts.remote import Remote

ENGINE_NAP_S = 0.0002
"""How often an idle engine polls for a pull."""
ROUNDS = 15
ROUNDS_OF_LARGE = 7
LARGE_BYTES = 64 * MIB
DEFAULT_RATIO = 0.9
SOON_BYTES, LATE_S = 16 * MIB, 0.0003
MEMCPY = "memcpy to shared memory"
BARE = "NIXL alone"
PIECES = "NIXL alone, a descriptor for each piece"
RAW = "raw TCP"
UCX_TCP = {"UCX_TLS": "tcp,self"}


@dataclass(frozen=True, slots=True)
class Entry:
    """What a contender is compared with: `floor` names the peer, `ratio` and `small_gbs` (for many adjacent
    pieces) are the targets. What is the `default` has those of the whole as well: see `aims`."""

    contender: Contender
    floor: str = ""
    ratio: float | None = None
    small_gbs: float | None = None
    default: bool = False
    note: str = ""


def shm(stack: ExitStack, folder: Path) -> list[Entry]:
    """Two processes on one host with UCX's default transports."""
    return [
        Entry(Memcpy(MEMCPY, stack), note="one process, one core"),
        Entry(BareNixl(BARE, stack, merged=True, env={}), MEMCPY),
        Entry(BareNixl(PIECES, stack, merged=False, env={}), note="what merging neighbours spares"),
        Entry(_nixl("NIXL adapter", stack, checksum=False), BARE, ratio=0.95, note="polled without rest"),
        Entry(
            _nixl("NIXL adapter as an idle engine polls it", stack, checksum=False, nap_s=ENGINE_NAP_S),
            BARE,
            note=f"every {ENGINE_NAP_S * 1e3:g} ms",
        ),
        Entry(
            _nixl("NIXL adapter as an idle engine polls it, checksum", stack, nap_s=ENGINE_NAP_S),
            BARE,
            small_gbs=6.0,
            default=True,
            note="the default; the time has the sums of both sides, those of the sender when it offers",
        ),
    ]


def tcp(stack: ExitStack, folder: Path) -> list[Entry]:
    """Two processes over sockets on the loopback interface."""
    sent = "nccl adapter, socket"
    return [
        Entry(RawTcp(RAW, stack), note="one piece of memory on both sides"),
        Entry(BareNixl(f"{BARE}, TCP", stack, merged=True, env=UCX_TCP), RAW),
        Entry(_nixl("NIXL adapter, TCP", stack, checksum=False, env=UCX_TCP), f"{BARE}, TCP", ratio=0.95),
        Entry(
            _nixl("NIXL adapter, TCP, checksum", stack, nap_s=ENGINE_NAP_S, env=UCX_TCP),
            f"{BARE}, TCP",
            note="as an idle engine polls it",
        ),
        Entry(_sent(sent, stack, checksum=False), RAW, ratio=0.7),
        Entry(_sent(f"{sent}, checksum", stack, checksum=True), RAW, default=True, note="the default"),
    ]


def tiers(stack: ExitStack, folder: Path) -> list[Entry]:
    """To the tiers and back, and the disk both with the page cache, as it is used, and without."""
    for name in ("redis", "disk", "cold"):
        (folder / name).mkdir()
    server = stack.enter_context(RedisServer(folder / "redis"))
    where = "load_tests.scenarios.kv_parts.tiers"
    host = Remote(f"{where}:HostBench")
    disk = Remote(f"{where}:LowerBench", "disk", str(folder / "disk"))
    cold = Remote(f"{where}:LowerBench", "disk", str(folder / "cold"), True)
    redis = Remote(f"{where}:LowerBench", "redis", server.url)
    for each in (host, disk, cold, redis):
        stack.callback(each.end)
    found = [Entry(Memcpy(MEMCPY, stack), note="one process, one core")]
    for name, process, pid, note in (
        ("CPU tier", host, None, "between the engine's KV and a slot, in one process"),
        ("disk tier", disk, None, "between a slot and files in the page cache, with checksums"),
        (
            "disk tier without the page cache",
            cold,
            None,
            "between a slot and the disk itself: stores are written through, loads find nothing in memory",
        ),
        ("Redis tier", redis, server.pid, "between a slot and a real server, with checksums"),
    ):
        for direction in ("store", "load"):
            entry = TierTurn(f"{name}, {direction}", process, direction, pid)
            found.append(Entry(entry, MEMCPY, note=note))
    return found


PARTS: dict[str, Callable[[ExitStack, Path], list[Entry]]] = {"shm": shm, "tcp": tcp, "tiers": tiers}
TTFT = "ttft"


def _nixl(
    name: str,
    stack: ExitStack,
    *,
    checksum: bool = True,
    nap_s: float = 0.0,
    env: dict[str, str] | None = None,
) -> Adapter:
    return Adapter(name, stack, "nixl", checksum=checksum, nap_s=nap_s, env=env or {})


def _sent(name: str, stack: ExitStack, *, checksum: bool) -> Adapter:
    # The tier's threads do the work: a busy polling loop would hold the interpreter lock.
    return Adapter(name, stack, "nccl", checksum=checksum, nap_s=ENGINE_NAP_S, env={})


def measure(part: str, shapes: Sequence[Case], rounds: tuple[int, int]) -> list[Row]:
    """The rows of one part, `rounds` rounds of small shapes and of large ones."""
    # Other load on this machine slows all contenders, and some more than others.
    busy = os.getloadavg()[0]
    rows = [Row(f"{part}: load average of the machine before", busy, "", "lower")]
    with tempfile.TemporaryDirectory(prefix="kvasir-bench-kv-") as folder, ExitStack() as stack:
        entries = PARTS[part](stack, Path(folder))
        for case in shapes:
            turns = rounds[case.total > LARGE_BYTES]
            found = take_turns([entry.contender for entry in entries], case, turns, _say)
            for entry in entries:
                if entry.contender.name in found:
                    rows += _rows(part, entry, case, found)
    return rows


def _rows(part: str, entry: Entry, case: Case, found: dict[str, Samples]) -> list[Row]:
    samples = found[entry.contender.name]
    rates = samples.rates(case)
    rate = statistics.median(rates)
    floor = statistics.median(found[entry.floor].rates(case)) if entry.floor else None
    target, target_ratio = aims(entry, case, floor)
    named = f"{part}: {entry.contender.name}, {case.name}"
    against = f"beside {entry.floor}" if entry.floor else ""
    note = "; ".join(filter(None, (entry.note, against)))
    return [
        Row(
            named,
            rate,
            "GB/s",
            "higher",
            target=target,
            peer=floor,
            ratio=None if floor is None else rate / floor,
            target_ratio=target_ratio,
            spread=(min(rates), max(rates)),
            note=note,
        ),
        Row(f"{named}, CPU", samples.cpu_per_gb(case), "s/GB", "lower"),
    ]


def aims(entry: Entry, case: Case, floor: float | None) -> tuple[float | None, float | None]:
    """The target in GB/s and as a ratio to the floor. A default reaches DEFAULT_RATIO of the floor, and
    `small_gbs` as well, with neighbouring blocks; what takes hardly any time is at most LATE_S later."""
    target = entry.small_gbs if case.small and not case.scattered else None
    if not entry.default or floor is None or case.scattered:
        return target, entry.ratio
    if case.total < SOON_BYTES:
        size = case.total / GB
        return size / (size / floor + LATE_S), None
    return target, max(DEFAULT_RATIO, 0.0 if target is None else target / floor)


def _part(row: Row) -> str:
    return row.name.partition(":")[0]


def _say(text: str) -> None:
    sys.stderr.write(f"    {text}\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, few turns, no report")
    parser.add_argument("--parts", help="of shm, tcp, tiers and ttft; by default all")
    args = parser.parse_args()
    if not native.IS_NATIVE:
        sys.exit("the native extension is not built; figures of its Python twin do not count: make install")
    everything = [*PARTS, TTFT]
    parts = everything if args.parts is None else args.parts.split(",")
    if unknown := [part for part in parts if part not in everything]:
        parser.error(f"no such part: {unknown}; there are {', '.join(everything)}")
    rows: list[Row] = []
    for part in parts:
        sys.stderr.write(f"{part}\n")
        if part == TTFT:
            from load_tests.scenarios.kv_parts import ttft

            rows += asyncio.run(ttft.measure(quick=args.quick, say=_say))
        else:
            rows += measure(
                part, cases(8 if args.quick else 1), (3, 2) if args.quick else (ROUNDS, ROUNDS_OF_LARGE)
            )
    if args.quick:
        for row in rows:
            print(
                f"{row.name}: {row.value:.4g} {row.unit} (peer {row.peer}, ratio {row.ratio}, met {row.met})"
            )
        return 0
    rows += [row for row in read(REPORTS / "kv.json") if _part(row) not in parts]
    rows.sort(key=lambda row: everything.index(_part(row)))
    print(write("kv", "make bench-kv", rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
