"""The options of `kvasir verify`. Every call of `kvasir` imports this module, so it loads little."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvasir_platform.cli.common.numbers import positive, whole

_MOST_STREAMS = 1024
_MOST_TOKENS = 131_072
QUALITY_TOKENS = 8192
PERPLEXITY_RATIO = 1.05
AGREEMENT = 0.9
KL_NATS = 0.1


def add_verify_options(verify: argparse.ArgumentParser) -> None:
    """Add them."""
    verify.add_argument("--model", help="its name (default: the first)")
    verify.add_argument(
        "--prompt-tokens",
        type=_counts,
        default=(64, 512, 2048),
        metavar="N,…",
        help="lengths of the compared prompts (64,512,2048); longer ones than the context are left out",
    )
    verify.add_argument(
        "--streams",
        type=_streams,
        default=(1, 2, 4, 8),
        metavar="N,…",
        help="concurrent streams to measure (1,2,4,8); 0: measure no load",
    )
    verify.add_argument("--link-gbps", type=positive, metavar="N", help="link between workers in Gbit/s")
    verify.add_argument("--report", type=Path, metavar="PREFIX", help="write PREFIX.json and PREFIX.html")
    verify.add_argument(
        "--timeout", type=positive, default=120.0, metavar="S", help="limit of each request (120)"
    )
    _add_quality_options(verify.add_argument_group("accuracy on held-out text (any of these measures it)"))


def _add_quality_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--quality",
        action="store_true",
        help="measure accuracy; with --report, PREFIX.quality.json can be a baseline",
    )
    group.add_argument(
        "--quality-set",
        type=Path,
        metavar="FILE",
        help='text, or *.jsonl with {"text": …} on each line (default: texts that ship with Kvasir)',
    )
    group.add_argument(
        "--quality-tokens",
        type=whole(2, _MOST_TOKENS),
        metavar="N",
        help=f"tokens to score at most ({QUALITY_TOKENS}; up to {_MOST_TOKENS})",
    )
    group.add_argument(
        "--quality-baseline",
        metavar="FILE|ADDRESS",
        help="compare with a PREFIX.quality.json, or with the gateway at HOST:PORT or https://HOST:PORT",
    )
    group.add_argument(
        "--quality-baseline-model",
        metavar="NAME",
        help="its model (default: --model); without an address, a model of the same deployment",
    )
    group.add_argument("--max-perplexity", type=positive, metavar="X", help="fail above it (no limit)")
    group.add_argument(
        "--max-perplexity-ratio",
        type=positive,
        metavar="X",
        help=f"fail above this multiple of the baseline's ({PERPLEXITY_RATIO:g})",
    )
    group.add_argument(
        "--min-agreement",
        type=positive,
        metavar="X",
        help=f"fail if the likeliest token is the baseline's at a smaller share of positions ({AGREEMENT:g})",
    )
    group.add_argument(
        "--max-kl",
        type=positive,
        metavar="NATS",
        help=f"fail above this mean divergence from the baseline ({KL_NATS:g})",
    )


def _counts(text: str) -> tuple[int, ...]:
    """Parse numbers separated by commas."""
    try:
        found = tuple(int(each) for each in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers separated by commas, as in 1,4,16") from None
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: each number is 1 or more")
    return found


def _streams(text: str) -> tuple[int, ...]:
    """Parse numbers of concurrent streams, each a thread and a connection. `0` alone: none."""
    found = () if text.strip() == "0" else _counts(text)
    if max(found, default=0) > _MOST_STREAMS:
        raise argparse.ArgumentTypeError(f"{text!r}: at most {_MOST_STREAMS} streams at a time")
    return found
