"""`kvasir sim showcase`: runs the experiments on two processes, and writes their page."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.common.output import CommandOutput, table
from kvasir_platform.cli.showcase.batching import breaking_point, continuous_batching, static_batching
from kvasir_platform.cli.showcase.bench import ShowcaseResult
from kvasir_platform.cli.showcase.engines import model_sizes, prefix_caching, several_gpus, speculation
from kvasir_platform.cli.showcase.page import showcase_page
from kvasir_platform.reports.files import write_file

EXPERIMENTS: tuple[Callable[[], ShowcaseResult], ...] = (
    static_batching,
    continuous_batching,
    prefix_caching,
    speculation,
    several_gpus,
    breaking_point,
    model_sizes,
)
PAGE = Path("kvasir-showcase.html")
_MOST_PROCESSES = 4


def showcase(args: argparse.Namespace, output: CommandOutput) -> int:
    """Run all experiments, print what they found, and write the page. Raises ConfigError if it cannot be
    written."""
    path: Path = args.html or PAGE
    if not path.parent.is_dir():
        raise ConfigError(f"--html {path}: {path.parent} is not a folder")
    found = run_all(output)
    for each in found:
        output.text(f"\n{each.title}\n\n{each.finding}\n")
        output.text(table(each.head, each.rows, range(1, len(each.head))))
    output.data(
        {
            "format": "kvasir-sim-showcase/1",
            "page": str(path),
            "experiments": [
                {"name": each.name, "finding": each.finding, "figures": each.figures} for each in found
            ],
        }
    )
    write_file(path, showcase_page(found), "--html")
    output.text(f"\npage: {path}")
    return 0


def run_all(output: CommandOutput) -> list[ShowcaseResult]:
    """Return the results in order, and tell which have ended."""
    processes = min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        running = [pool.submit(experiment) for experiment in EXPERIMENTS]
        found = []
        for number, each in enumerate(running, 1):
            found.append(each.result())
            output.text(f"... {number} of {len(running)}: {found[-1].title}")
    return found
