"""The options of `kvasir bench`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir_platform.cli.help_texts import BENCH_EPILOG
from kvasir_platform.workload.text import workload_help

if TYPE_CHECKING:
    from kvasir_platform.cli.common.output import CommandOutput

COMPARE = "compare"


def add_bench(commands: argparse._SubParsersAction[Any], shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    bench = commands.add_parser(
        "bench",
        parents=[shared],
        help="load an OpenAI-compatible endpoint and measure it, or compare two runs",
        description="Load an OpenAI-compatible endpoint and measure it, or compare two runs.",
        epilog=BENCH_EPILOG + workload_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument(
        "target",
        metavar="URL",
        nargs="?",
        help="http://HOST:PORT, with or without /v1 (default: the deployment on this machine); or the word "
        f"{COMPARE}",
    )
    bench.add_argument("files", metavar="FILE", nargs="*", help=f"two results, after {COMPARE}")
    _add_load(bench.add_argument_group("load"))
    _add_server(bench.add_argument_group("server"))
    report = bench.add_argument_group("report")
    report.add_argument(
        "--slo",
        metavar="ttft=T,itl=T,e2e=T",
        help="what goodput counts, with units: ttft=500ms,itl=50ms (ttft=2s,itl=100ms)",
    )
    report.add_argument("--json", type=Path, metavar="FILE", help=f"write the result, for {COMPARE}")
    report.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts")
    report.add_argument(
        "--fail-above",
        type=_positive,
        metavar="PERCENT",
        help=f"with {COMPARE}: exit with 1 if a figure is worse by more, with 95 %% confidence for times",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workload", default="synthetic", metavar="TEXT", help="what is sent, see below (synthetic)"
    )
    group.add_argument("--rate", type=_positive, metavar="N", help="requests/s, in place of the workload's")
    group.add_argument("--duration", type=_positive, metavar="S", help="seconds, in place of the workload's")
    group.add_argument("--requests", type=_count, metavar="N", help="send at most so many")
    group.add_argument("--seed", type=int, default=1, metavar="N", help="of arrivals and lengths (1)")
    group.add_argument(
        "--concurrency", type=_count, metavar="N", help="a closed loop: so many requests at a time"
    )
    group.add_argument(
        "--ramp", action="store_true", help="raise the rate until the SLO breaks, and report the knee"
    )
    group.add_argument("--ramp-from", type=_positive, default=1.0, metavar="N", help="its first rate (1)")
    group.add_argument("--ramp-step", type=_positive, default=30.0, metavar="S", help="seconds a rate (30)")
    group.add_argument(
        "--ramp-met",
        type=_positive,
        default=90.0,
        metavar="PERCENT",
        help="the share of requests that must meet the SLO (90)",
    )
    group.add_argument(
        "--warmup", type=_least_zero, default=8, metavar="N", help="requests before it measures (8)"
    )
    group.add_argument(
        "--max-running",
        type=_count,
        default=4096,
        metavar="N",
        help="never have more requests running (4096)",
    )


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", metavar="NAME", help="as /v1/models lists it (default: the first)")
    group.add_argument(
        "--api",
        choices=("chat", "completions", "embeddings"),
        help="the endpoint (default: chat; embeddings for a workload of them)",
    )
    group.add_argument(
        "--body", default="{}", metavar="JSON", help='further fields of every request: {"temperature": 0}'
    )
    group.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="of a request (600)")
    group.add_argument("--api-key-env", metavar="NAME", help="the environment variable with the API key")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="the file with the API key")
    group.add_argument(
        "--cacert", metavar="FILE", help="its certificate authorities (PEM), in place of the system's"
    )
    group.add_argument("--cert", metavar="FILE", help="your certificate (PEM), if it requires one")
    group.add_argument("--key", metavar="FILE", help="its key; by default in the same file")


def run_bench(args: argparse.Namespace, output: CommandOutput) -> int:
    """Run it. Raises KvasirError."""
    from datetime import UTC, datetime

    from kvasir_platform.cli.commands import bench

    if args.target == COMPARE:
        return bench.compare(args.files, args.fail_above, output)
    return bench.bench(args, output, datetime.now(UTC))


def _positive(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.0 < found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: a number above 0")
    return found


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 10_000_000:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number above 0")
    return int(text)


def _least_zero(text: str) -> int:
    return 0 if text == "0" else _count(text)
