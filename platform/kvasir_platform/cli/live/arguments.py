"""The options of `kvasir status`, `trace`. Every call of `kvasir` imports this
module, so it needs the standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvasir_platform.cli.live.epilogs import (
    STATUS_EPILOG,
    TRACE_EPILOG,
)

if TYPE_CHECKING:
    from kvasir_platform.cli.common.gateway_site import Site
    from kvasir_platform.cli.common.output import CommandOutput

Add = Callable[..., argparse.ArgumentParser]
"""Adds a command: its name, what it does, further parents, and its epilog."""
SiteAt = Callable[[str | None], "Site"]
"""The gateway at an address; None: the one that the command line selects."""
LIVE = ("status", "trace")


def add_live(add: Add, gateway: argparse.ArgumentParser, addressed: argparse.ArgumentParser) -> None:
    """Add the commands. `gateway` has the options that select one, `addressed` those without --name."""
    _add_status(add, addressed)
    _add_trace(add, gateway)


def _add_status(add: Add, addressed: argparse.ArgumentParser) -> None:
    status = add(
        "status",
        "say whether all is well, and show what runs: workers, load, processes",
        addressed,
        epilog=STATUS_EPILOG,
    )
    status.add_argument("name", nargs="?", help="the deployment, if several run")


def _add_trace(add: Add, gateway: argparse.ArgumentParser) -> None:
    text = "show where the time of a request went, and why it ran there"
    trace = add("trace", text, gateway, epilog=TRACE_EPILOG)
    trace.add_argument("request_id", metavar="REQUEST_ID", help="the response's header x-request-id")


def run_live(args: argparse.Namespace, site: SiteAt, output: CommandOutput) -> int:
    """Run the command. Raises KvasirError."""
    commands: dict[str, Callable[[], int]] = {
        "status": lambda: _status(args, site, output),
        "trace": lambda: _trace(args, site, output),
    }
    return commands[args.command]()


def _status(args: argparse.Namespace, site: SiteAt, output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.status.report import gateway_status, status

    if args.address is not None:
        return gateway_status(site(None), output)
    return status(args.name, output)


def _trace(args: argparse.Namespace, site: SiteAt, output: CommandOutput) -> int:
    from kvasir_platform.cli.live.trace import trace

    return trace(args.request_id, site(None), output)
