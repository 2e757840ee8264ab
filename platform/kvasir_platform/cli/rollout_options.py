"""The options of `kvasir rollout`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvasir_platform.cli.common.numbers import seconds, whole
from kvasir_platform.cli.common.parsers import Add, actions_of

if TYPE_CHECKING:
    from kvasir_platform.cli.common.gateway_site import Site
    from kvasir_platform.cli.common.output import CommandOutput

_EPILOG = """\
A canary is a second model of a route, with `canary` in routes of kvasir.yaml. A rollout gives it a growing
share of requests, compares each with one of the route's model, and ends by itself: promoted after the last
step, or rolled back when errors, missed SLO classes, TTFT or ITL show that it is worse. No request fails
because of that. An operator's key is needed where keys are (KVASIR_API_KEY). docs/TRAFFIC.md has the rules.

examples:
  kvasir rollout start chat
  kvasir rollout status
  kvasir rollout abort chat
  kvasir rollout cells chat --cell eu=https://eu.example --cell us=https://us.example"""
_CELLS = """\
Starts the canary of a route in the first cell, in the order of --cell. Once it is promoted there, and has
served for the time of --soak, it starts in the next one. A cell that rolls it back takes it back in all
others. No cell begins while one does not answer. The command keeps nothing: started again, it goes on from
what the cells show. Exit code 0: promoted in all cells; 1: rolled back or paused."""
_CELL = re.compile(r"([a-z0-9](?:[-a-z0-9]*[a-z0-9])?)=(.+)")
_ORDERS = {
    "start": "begin a rollout, or go on with a paused one",
    "pause": "keep the present share; a worse canary is still rolled back",
    "promote": "give the canary all requests at once",
    "abort": "give the canary no more requests",
    "undo": "return all requests to the route's model after a promotion",
}


def add_rollout(add: Add, shared: argparse.ArgumentParser, gateway: argparse.ArgumentParser) -> None:
    """Add the command and its actions."""
    rollout = add(
        "rollout",
        "start, watch and end canaries",
        description="Start, watch and end canaries of a running deployment.",
        epilog=_EPILOG,
    )
    act = actions_of(rollout, shared, gateway)
    for name, text in {"status": "show each rollout, and what speaks against its canary", **_ORDERS}.items():
        meant = "all" if name == "status" else "the only one with a canary"
        act(name, text).add_argument("route", nargs="?", metavar="ROUTE", help=f"as in kvasir.yaml ({meant})")
    _add_cells(act("cells", "take a canary through several cells, one after the other", epilog=_CELLS))


def _add_cells(cells: argparse.ArgumentParser) -> None:
    cells.add_argument("route", metavar="ROUTE", help="as in kvasir.yaml of all cells")
    cells.add_argument(
        "--cell",
        action="append",
        required=True,
        type=_named_cell,
        metavar="NAME=URL",
        help="a cell and its gateway, in the order in which they take the canary",
    )
    cells.add_argument("--soak", type=seconds, default=900.0, metavar="S", help="time in each cell (15m)")
    cells.add_argument("--at-once", type=whole(1, 64), default=1, metavar="N", help="cells at a time (1)")
    cells.add_argument("--no-undo", action="store_true", help="halt after a rollback, and leave the others")
    cells.add_argument("--every", type=seconds, default=10.0, metavar="S", help="look so often (10)")
    cells.add_argument("--once", action="store_true", help="look and order once, for a job that runs again")


def _named_cell(text: str) -> tuple[str, str]:
    found = _CELL.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: a cell and its gateway, as eu=https://eu.example")
    return found[1], found[2]


def run_rollout(
    args: argparse.Namespace, site_at: Callable[[str | None], Site], output: CommandOutput
) -> int:
    """Run the action; `site_at` gives the gateway at an address, None for the selected one. Raises
    KvasirError."""
    from kvasir_platform.cli.commands import rollout

    if args.action == "cells":
        return _run_cells(args, site_at, output)
    site = site_at(None)
    if args.action == "status":
        return rollout.status(args.route, site, output)
    return rollout.order(args.route, args.action, site, output)


def _run_cells(args: argparse.Namespace, site_at: Callable[[str | None], Site], output: CommandOutput) -> int:
    import time

    from kvasir.core.errors import RequestError
    from kvasir_platform.cli.rollout.cells import CellWatch, roll_over_cells
    from kvasir_router.regions.revisions import RevisionRules

    names = [name for name, _ in args.cell]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"--cell: {twice} is listed twice; list each cell once")
    sites = {name: site_at(address) for name, address in args.cell}
    rules = RevisionRules(tuple(names), args.soak, args.at_once, not args.no_undo)
    return roll_over_cells(args.route, sites, rules, CellWatch(args.every, args.once, time.sleep), output)
