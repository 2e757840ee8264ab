"""The options of `kvasir cost`. Every call of `kvasir` imports this module, so it needs the standard library
only."""

from __future__ import annotations

import argparse
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvasir_platform.cli.common.parsers import Add

if TYPE_CHECKING:
    from kvasir_platform.cli.common.gateway_site import Site
    from kvasir_platform.cli.common.output import CommandOutput

DIMENSIONS = ("tenant", "key", "model", "slo", "pool", "day", "hour")
_UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}
_MOST_S = 3660 * 86_400

COST_EPILOG = """\
The time of workers is divided among the requests that ran on them, hour by hour and pool by pool: by the
prompt tokens that were computed (not those that were cached), the share in each step of decoding, and the KV
memory that was held and moved. Lines called idle are time without requests, lines called wasted are work
that nobody is charged for: failed requests, and what a lost worker had done. All lines together are the time
of all workers. SECONDS are of a GPU, or of a worker in pools without GPUs.

Prices are those of cost.prices in kvasir.yaml, else list prices of providers. An operator's key is needed
where keys are (KVASIR_API_KEY). A request is charged when it ends. docs/COST.md has the rule.

--focus prints rows with the columns of FOCUS 1.2 (focus.finops.org), one for each day, tenant, key, model,
SLO class and pool, for tools that read bills. -o json prints the statement itself.

examples:
  kvasir cost                                  by tenant, the last seven days
  kvasir cost --by tenant,model --since 30d
  kvasir cost --by day --since 2030-01-01 --until 2030-02-01
  kvasir cost --focus csv --since 30d > costs.csv
  kvasir cost -o json"""


@dataclass(frozen=True, slots=True)
class CostArguments:
    """What the command line asks for. Times are Unix seconds, None: the default."""

    by: tuple[str, ...]
    since: float | None
    until: float | None
    focus: str | None


def add_cost(add: Add, gateway: argparse.ArgumentParser) -> None:
    """Add the command."""
    cost = add("cost", "show what tenants, keys and models cost", gateway, epilog=COST_EPILOG)
    cost.add_argument(
        "--by",
        type=dimensions,
        metavar="NAMES",
        help=f"one line for each combination of these, separated by commas: {', '.join(DIMENSIONS)} (tenant)",
    )
    cost.add_argument(
        "--since", type=moment, metavar="TIME", help="a time ago such as 12h, 7d or 4w, or a date (7d)"
    )
    cost.add_argument("--until", type=moment, metavar="TIME", help="likewise (now)")
    cost.add_argument("--focus", choices=("csv", "json"), help="print rows with FOCUS columns")


def run_cost(args: argparse.Namespace, site: Site, output: CommandOutput) -> int:
    """Run the command. Raises KvasirError."""
    from kvasir_platform.cli.cost.command import cost

    now = datetime.now(UTC).timestamp()
    since, until = (None if at is None else at(now) for at in (args.since, args.until))
    return cost(CostArguments(args.by or (), since, until, args.focus), site, output)


def dimensions(text: str) -> tuple[str, ...]:
    """Return the dimensions that a text names. Raises ArgumentTypeError."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in DIMENSIONS:
            raise ArgumentTypeError(f"{name!r}: one or more of {', '.join(DIMENSIONS)}")
    return names


def moment(text: str) -> Callable[[float], float]:
    """Return a function from now to the moment that a text names, in Unix seconds. Raises
    ArgumentTypeError."""
    found = re.fullmatch(r"(\d{1,6})([mhdw])", text)
    if found is not None and 0 < (ago := int(found[1]) * _UNITS[found[2]]) <= _MOST_S:
        return lambda now: now - ago
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ArgumentTypeError(
            f"{text!r}: a time ago such as 12h, 7d or 4w, or a date as 2030-01-31"
        ) from None
    exact = (at if at.tzinfo is not None else at.replace(tzinfo=UTC)).timestamp()
    return lambda _: exact
