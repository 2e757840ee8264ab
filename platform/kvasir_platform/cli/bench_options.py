"""The options of `kvasir bench`. Every call of `kvasir` imports this module, so it loads little."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir_platform.cli.common.numbers import positive, whole
from kvasir_platform.cli.common.tls_options import add_tls_options
from kvasir_platform.cli.help_texts import BENCH_EPILOG

if TYPE_CHECKING:
    from kvasir_platform.cli.common.output import CommandOutput

COMPARE = "compare"
_MOST = 10_000_000
_COUNT = whole(1, _MOST)


class _BenchHelp(argparse.RawDescriptionHelpFormatter):
    """Ends the help with what workloads there are, whose modules are loaded for this only."""

    def add_text(self, text: str | None) -> None:
        if text is BENCH_EPILOG:
            from kvasir_platform.workload.text import workload_help

            text = BENCH_EPILOG + workload_help()
        super().add_text(text)


def add_bench(commands: argparse._SubParsersAction[Any], shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    bench = commands.add_parser(
        "bench",
        parents=[shared],
        help="load an OpenAI-compatible endpoint and measure it, or compare two runs",
        description="Load an OpenAI-compatible endpoint and measure it, or compare two runs.",
        epilog=BENCH_EPILOG,
        formatter_class=_BenchHelp,
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
        type=positive,
        metavar="PERCENT",
        help=f"with {COMPARE}: exit with 1 if a figure is worse by more, with 95 %% confidence for times",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workload", default="synthetic", metavar="TEXT", help="what is sent, see below (synthetic)"
    )
    group.add_argument("--rate", type=positive, metavar="N", help="requests/s, in place of the workload's")
    group.add_argument("--duration", type=positive, metavar="S", help="seconds, in place of the workload's")
    group.add_argument("--requests", type=_COUNT, metavar="N", help="send at most so many")
    group.add_argument("--seed", type=int, default=1, metavar="N", help="of arrivals and lengths (1)")
    group.add_argument(
        "--concurrency", type=_COUNT, metavar="N", help="a closed loop: so many requests at a time"
    )
    group.add_argument(
        "--ramp", action="store_true", help="raise the rate until the SLO breaks, and report the knee"
    )
    group.add_argument("--ramp-from", type=positive, default=1.0, metavar="N", help="its first rate (1)")
    group.add_argument("--ramp-step", type=positive, default=30.0, metavar="S", help="seconds a rate (30)")
    group.add_argument(
        "--ramp-met",
        type=positive,
        default=90.0,
        metavar="PERCENT",
        help="the share of requests that must meet the SLO (90)",
    )
    group.add_argument(
        "--warmup", type=whole(0, _MOST), default=8, metavar="N", help="requests before it measures (8)"
    )
    group.add_argument(
        "--max-running",
        type=_COUNT,
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
    group.add_argument("--timeout", type=positive, default=600.0, metavar="S", help="of a request (600)")
    group.add_argument("--api-key-env", metavar="NAME", help="the environment variable with the API key")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="the file with the API key")
    add_tls_options(group)


def run_bench(args: argparse.Namespace, output: CommandOutput) -> int:
    """Run it. Raises KvasirError."""
    from datetime import UTC, datetime

    from kvasir_platform.cli.commands import bench

    if args.target == COMPARE:
        return bench.compare(args.files, args.fail_above, output)
    return bench.bench(args, output, datetime.now(UTC))
