"""Whether `kvasir bench` measures what aiperf measures (NVIDIA's load generator for LLM servers).

Both load the same server with as many requests and tokens, in turn, several rounds; at a rate, with the same
arrivals. The server's own times differ from run to run, so each figure is divided by what it was for the same
requests on the wire, where a relay between the two notes it. What is compared are the medians over the
rounds; a figure agrees if they differ by at most 5 %. The servers are a paced mock, whose times do not depend
on the load, and a deployment of `kvasir up` on this machine.

    make bench-agreement
    make bench-agreement ARGS='--only mock --rounds 3'
    make bench-agreement ARGS=--quick          one round of few requests, as a smoke test

aiperf is installed into build/aiperf on first use.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from load_tests.report import REPORTS, Row, read, write
from load_tests.scenarios.agreement.tools import AIPERF, Load, Measured, install_aiperf, run_aiperf, run_ours
from load_tests.scenarios.agreement.wire import Wire, relayed
from load_tests.scenarios.foundation import running_stack

ROOT = Path(__file__).resolve().parents[3]
AGREE_PERCENT = 5.0
ROUNDS = 3
MOCK, MOCK_RATE, KVASIR = "mock", "mock at a rate", "kvasir"
LOADS = {
    MOCK: Load(requests=100, concurrency=4, prompt_tokens=256, output_tokens=24),
    MOCK_RATE: Load(requests=100, concurrency=0, prompt_tokens=256, output_tokens=24, rate=4.0),
    # One stream at a time, nearly: engines of this machine take every core that they can get. Fewer requests
    # would make a 95th percentile of one or two.
    KVASIR: Load(requests=100, concurrency=0, prompt_tokens=128, output_tokens=32, rate=1.0),
}
_Tool = Callable[[str, str, Load, int], Measured]
RATES = ("output tokens/s", "requests/s")


@contextlib.contextmanager
def mock() -> Iterator[str]:
    """A server whose streams take 200 ms and then 40 ms for each token, with little spread: long beside what
    the load generators themselves take from the server's cores."""
    options = ("--first-ms", "200", "--gap-ms", "40", "--sigma", "0.1")
    command = [sys.executable, "-m", "tests.kit.openai_server", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()


@contextlib.contextmanager
def deployment() -> Iterator[str]:
    """A deployment of the model that ships with Kvasir."""
    up = (sys.executable, "-m", "kvasir_platform.cli.main", "up", "--port", "0", "-o", "json")
    with running_stack(ROOT, up) as stack:
        yield f"http://{stack.address}"


def rounds(wire: Wire, model: str, load: Load, count: int) -> list[tuple[Measured, Measured]]:
    """Measure with both, in turn, each round in the other order; ours first in each pair. Our prompts have as
    many tokens as the server counts for aiperf's, which leaves the template out of its lengths."""

    def measured(run: _Tool, asked: Load, seed: int) -> Measured:
        found = run(wire.url, model, asked, seed)
        return replace(found, wire=wire.take(asked.requests))

    pairs = []
    alike = load
    for number in range(count):
        seed = number + 1
        if number % 2:
            ours = measured(run_ours, alike, seed)
            theirs = measured(run_aiperf, load, seed)
        else:
            theirs = measured(run_aiperf, load, seed)
            alike = replace(load, prompt_tokens=round(theirs.prompt_tokens))
            ours = measured(run_ours, alike, seed)
        pairs.append((ours, theirs))
        shown = ", ".join(f"{each.figures['TTFT p50']:.1f}" for each in (ours, theirs))
        print(f"  round {seed} of {count}: TTFT p50 {shown} ms, ours first", flush=True)
    return pairs


def rows(name: str, load: Load, pairs: list[tuple[Measured, Measured]]) -> Iterator[Row]:
    """One row for each figure: by how much the medians differ."""
    pace = (
        f"{load.concurrency} at a time" if load.rate is None else f"{load.rate:g} per second, arrivals alike"
    )
    about = f"{len(pairs)} rounds of {load.requests} requests, {pace}"
    for figure in pairs[0][0].figures:
        sides = list(zip(*pairs, strict=True))
        ours, theirs = ([each.beside_wire(figure) for each in side] for side in sides)
        one, other = statistics.median(ours), statistics.median(theirs)
        apart = [percent(a, b) for a, b in zip(ours, theirs, strict=True)]
        shown = ", ".join(
            _shown(tool, figure, side) for tool, side in zip(("kvasir bench", AIPERF), sides, strict=True)
        )
        yield Row(
            f"{name}: {figure}, difference",
            abs(percent(one, other)),
            "%",
            "lower",
            target=AGREE_PERCENT,
            spread=(min(apart), max(apart)),
            note=f"{shown}; {about}",
        )


def _shown(tool: str, figure: str, side: Sequence[Measured]) -> str:
    said = statistics.median(each.figures[figure] for each in side)
    if figure in RATES:
        return f"{tool} {said:.4g}"
    wire = statistics.median(each.wire[figure] for each in side)
    return f"{tool} {said:.4g} ms, {wire:.4g} on the wire"


def percent(ours: float, theirs: float) -> float:
    """By how much ours is more; 100 % if they measured nothing at all."""
    if theirs:
        return (ours / theirs - 1.0) * 100
    return 100.0 if ours else 0.0


def main() -> None:
    """Run by the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=tuple(LOADS), help="measure one server; others keep their rows")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="one round of few requests, without a report")
    args = parser.parse_args()
    install_aiperf()
    found: list[Row] = []
    for name, load in LOADS.items():
        if args.only not in (None, name):
            found += [row for row in read(REPORTS / "agreement.json") if row.name.startswith(f"{name}: ")]
            continue
        asked = replace(load, requests=20, output_tokens=8) if args.quick else load
        print(f"{name}:", flush=True)
        with deployment() if name == KVASIR else mock() as url, relayed(url) as wire:
            model = "kvasir-tiny" if name == KVASIR else "scripted"
            found += rows(name, asked, rounds(wire, model, asked, 1 if args.quick else args.rounds))
    for row in found:
        print(f"{row.name}: {row.value:.2f} % ({row.note})")
    if not args.quick:
        print(write("agreement", "make bench-agreement", found))


if __name__ == "__main__":
    main()
