"""Replay seeds: print the faults, the outcomes, and the digest of the history.

Exits with 1 if a promise was broken, and names the seed.
"""

from __future__ import annotations

import argparse
import sys

from kvasir_platform.sim.chaos.run import ChaosOutcome, play
from kvasir_platform.sim.chaos.schedule import draw


def main(argv: list[str] | None = None) -> int:
    """Run the seeds that the arguments name; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m kvasir_platform.sim.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many seeds from there on")
    parser.add_argument("--verbose", action="store_true", help="tell what happens, and when")
    args = parser.parse_args(argv)
    failed = 0
    for seed in range(args.seed, args.seed + args.count):
        outcome = play(draw(seed), keep=args.verbose)
        failed += bool(outcome.broken)
        sys.stdout.write(_report(outcome, verbose=args.verbose))
    return 1 if failed else 0


def _report(outcome: ChaosOutcome, *, verbose: bool) -> str:
    schedule = outcome.schedule
    lines = []
    if verbose:
        lines += [
            f"{schedule.shape}",
            *(f"{fault.at_s:10.4f}  will be: {fault}" for fault in schedule.faults),
        ]
        lines += outcome.story
    ends = ", ".join(f"{count} {name}" for name, count in sorted(outcome.outcomes.items()))
    lines.append(
        f"seed {schedule.seed}: {outcome.digest}, {outcome.events} events in {outcome.virtual_s:.3f} s, "
        f"{ends}, {outcome.retries} retries, {outcome.migrations} migrations"
    )
    lines += [f"seed {schedule.seed} broke a promise: {broken}" for broken in outcome.broken]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
