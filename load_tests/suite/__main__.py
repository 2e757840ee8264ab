"""Measures all reports in order, on an idle machine.

    make reports ARGS=--list                  what each report has, and what is stale and why
    make reports TRACE=FILE AZURE=FILE BASE=COMMIT
    make reports ARGS="--only edge,kv"        these, fresh or not
    make reports ARGS=--all                   all that were not measured at this very commit

Without options everything that is stale is measured. A run that was interrupted continues where it was when
it is started again. Nothing else may run on the machine, and all changes must be committed: a report names
the commit that it measured. The rows that miss their target are listed at the end.

Exit status: 0 if every scenario was measured, whether or not targets are met; 1 if one was not; 2 if nothing
can be measured as things are.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from load_tests.report import CHANGES, REPORTS, checkout, read
from load_tests.suite.catalog import SCENARIOS
from load_tests.suite.freshness import Freshness, freshness
from load_tests.suite.history import GitError, History
from load_tests.suite.pages import missed_table, outcome_line, state_json, state_table
from load_tests.suite.run import NotIdle, Outcome, await_idle, lacking, plan, run_scenario
from load_tests.suite.scenario import Scenario


def states(history: History) -> list[Freshness]:
    """The state of every report. Raise GitError."""
    return [freshness(each, read(REPORTS / f"{name}.json"), history) for name, each in SCENARIOS.items()]


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make reports", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--list", action="store_true", help="show the state of each report, and measure nothing"
    )
    what.add_argument("--only", default="", help=f"some of {','.join(SCENARIOS)}")
    what.add_argument("--all", action="store_true", help="also what is fresh, unless it is of this commit")
    parser.add_argument("--json", action="store_true", help="with --list: as JSON")
    parser.add_argument("--trace", default="", help="mooncake_conversation.jsonl, for policies and others")
    parser.add_argument("--azure", default="", help="azure_2023_conv.csv, for policies")
    parser.add_argument("--base", default="", help="the commit that `paired` compares with")
    args = parser.parse_args(argv)
    args.names = [each for each in args.only.split(",") if each]
    if unknown := [each for each in args.names if each not in SCENARIOS]:
        parser.error(f"no report {', '.join(unknown)}; there are {', '.join(SCENARIOS)}")
    if args.json and not args.list:
        parser.error("--json is for --list")
    for name in ("trace", "azure"):
        if (path := getattr(args, name)) and not Path(path).is_file():
            parser.error(f"--{name}: {path} is no file")
    return args


def measure(chosen: Sequence[Scenario], given: dict[str, str], head: str) -> list[Outcome]:
    """Run the scenarios one after the other. Raise NotIdle."""
    outcomes = []
    for number, scenario in enumerate(chosen, 1):
        left = sum(each.minutes for each in chosen[number - 1 :])
        place = f"{number} of {len(chosen)}"
        if lack := lacking(scenario, given):
            needed = " ".join(f"{each.upper()}=" for each in lack)
            outcomes.append(Outcome(scenario, 0.0, f"not measured: it needs {needed}; {scenario.command}"))
        else:
            await_idle(say, first=not any(each.seconds for each in outcomes))
            say(
                f"{place}: {scenario.report}, about {scenario.minutes} min; all that is left about {left} min"
            )
            outcomes.append(run_scenario(scenario, given, head, say))
        say(outcome_line(outcomes[-1]))
    return outcomes


def say(text: str) -> None:
    """Print progress."""
    sys.stderr.write(f"{datetime.now(UTC):%H:%M:%S} {text}\n")
    sys.stderr.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """List or measure; return the exit status."""
    args = _parse(argv)
    # Scenarios inherit it: those that a shell's background job starts would not be interrupted.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    history = History()
    try:
        if not history.whole():
            raise GitError("this checkout has not its whole history: git fetch --unshallow")
        found, head = states(history), history.head()
    except GitError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    now = datetime.now(UTC)
    if args.list:
        print(json.dumps(state_json(found, now), indent=1) if args.json else state_table(found, now))
        return 0
    if checkout().endswith(CHANGES):
        print(
            "error: files differ from the last commit, which a report must name: commit first",
            file=sys.stderr,
        )
        return 2
    chosen = plan(found, head, only=args.names, everything=args.all)
    try:
        outcomes = measure(chosen, {name: getattr(args, name) for name in ("trace", "azure", "base")}, head)
    except NotIdle as error:
        print(f"error: {error}\nEnd it, and start again: what was measured is kept.", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command continues", file=sys.stderr)
        return 1
    names = [each.report for each in chosen] or list(SCENARIOS)
    print(missed_table({name: read(REPORTS / f"{name}.json") for name in names}))
    return 1 if any(each.problem for each in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
