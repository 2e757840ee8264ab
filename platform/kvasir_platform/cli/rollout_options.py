"""The options of `kvasir rollout`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

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
  kvasir rollout abort chat"""
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


def run_rollout(args: argparse.Namespace, site: Site, output: CommandOutput) -> int:
    """Run the action. Raises KvasirError."""
    from kvasir_platform.cli.commands import rollout

    if args.action == "status":
        return rollout.status(args.route, site, output)
    return rollout.order(args.route, args.action, site, output)
