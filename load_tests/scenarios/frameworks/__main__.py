"""Runs the suites of client frameworks, unmodified, and writes the table of docs/API.md.

    make frameworks-check
    make frameworks-check ARGS='--only suite_litellm.py'

Each suite runs twice: against the real gateway in front of a scripted model that follows instructions, where
every test has to pass, and against `kvasir up` with the model that ships with Kvasir, where no request may be
refused. What that model fails otherwise is its own ability.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

from load_tests.report import REPORTS, Row, read, write
from load_tests.scenarios.foundation import running_stack
from load_tests.scenarios.frameworks.suites import (
    ALL,
    LOCK,
    ROOT,
    Outcome,
    Suite,
    install,
    reasons,
    run,
    version,
)
from load_tests.scenarios.frameworks.table import merged, write_table

SCRIPTED, TINY = "scripted model", "kvasir-tiny"
_MODEL = "kvasir-tiny"


@contextlib.contextmanager
def scripted() -> Iterator[str]:
    """A gateway in front of a scripted model that follows instructions."""
    command = [sys.executable, "-m", "tests.kit.frameworks.capable_server"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


@contextlib.contextmanager
def embedded() -> Iterator[str]:
    """A deployment of the model that ships with Kvasir, with defaults."""
    up = (sys.executable, "-m", "kvasir_platform.cli.main", "up", "--port", "0", "-o", "json")
    with running_stack(ROOT, up) as stack:
        yield f"http://{stack.address}"


def rows(suite: Suite, brain: str, found: Outcome, lock: str) -> Iterator[Row]:
    """The rows of one suite: tests that passed, and those that the server refused or that failed."""
    name = f"{suite.framework} {version(suite.package, lock)}, {brain}"
    yield Row(
        f"{name}: passed",
        found.passed,
        "tests",
        "higher",
        note=f"{len(found.skipped)} skipped: {reasons(found.skipped)}" if found.skipped else "",
    )
    yield Row(
        f"{name}: refused", len(found.refused), "tests", "lower", target=0, note=", ".join(found.refused)
    )
    yield Row(
        f"{name}: failed",
        len(found.failed),
        "tests",
        "lower",
        target=0 if brain == SCRIPTED else None,
        note=", ".join(found.failed),
    )


def check(suites: Sequence[Suite], brains: Sequence[str]) -> Iterator[list[Row]]:
    """Run the suites against each model; yield the rows of each as soon as it has run. Raises as `install`
    and `run`."""
    python, lock = install(), LOCK.read_text()
    for brain in brains:
        with scripted() if brain == SCRIPTED else embedded() as url:
            for suite in suites:
                print(f"{suite.file}, {brain}", flush=True)
                yield list(rows(suite, brain, run(python, suite, url, _MODEL), lock))


def report(found: Sequence[Row]) -> None:
    """Put the rows into the report and the page."""
    path = REPORTS / "frameworks.json"
    write("frameworks", "make frameworks-check", merged(read(path), found))
    write_table(read(path))


def main() -> None:
    """Run by the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="files of suites, separated by commas")
    parser.add_argument("--brains", default=f"{SCRIPTED},{TINY}", help="the models, separated by commas")
    args = parser.parse_args()
    suites = [suite for suite in ALL if not args.only or suite.file in args.only.split(",")]
    unmet = False
    for found in check(suites, args.brains.split(",")):
        for row in found:
            print(f"{row.name}: {row.value:g} ({row.note})", flush=True)
        report(found)
        unmet = unmet or any(row.met is False for row in found)
    sys.exit(unmet)


if __name__ == "__main__":
    main()
