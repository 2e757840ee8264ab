"""The options of `kvasir calibrate`. Every call of `kvasir` imports this module, so it loads little."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvasir_platform.cli.common.numbers import positive, whole

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
        type=whole(1, _MOST_REPEATS),
        default=5,
        metavar="N",
        help="measurements of each prompt, of which the median counts (5)",
    )
    calibrate.add_argument("--quick", action="store_true", help="a third of the loads, for a first look")
    calibrate.add_argument(
        "--timeout", type=positive, default=120.0, metavar="S", help="limit of each request (120)"
    )
