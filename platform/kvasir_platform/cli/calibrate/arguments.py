"""The options of `kvasir calibrate`. Every call of `kvasir` imports this module, so it needs the standard
library only."""

from __future__ import annotations

import argparse
from pathlib import Path

DEFAULT_FILE = Path("kvasir-profile.json")
_MOST_REPEATS = 100


def add_calibrate_options(calibrate: argparse.ArgumentParser) -> None:
    """Add them."""
    calibrate.add_argument("--model", help="its name (default: the first)")
    calibrate.add_argument(
        "--profile",
        type=Path,
        default=DEFAULT_FILE,
        metavar="FILE",
        help=f"the profile to write ({DEFAULT_FILE})",
    )
    calibrate.add_argument(
        "--repeats",
        type=_repeats,
        default=5,
        metavar="N",
        help="measurements of each prompt, of which the median counts (5)",
    )
    calibrate.add_argument("--quick", action="store_true", help="a third of the loads, for a first look")
    calibrate.add_argument(
        "--timeout", type=float, default=120.0, metavar="S", help="limit of each request (120)"
    )


def _repeats(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= _MOST_REPEATS:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 to {_MOST_REPEATS}")
    return int(text)
