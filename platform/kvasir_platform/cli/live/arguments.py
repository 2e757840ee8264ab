"""The options of `kvasir status`, `top`, `trace`, `tail` and `logs`. Every call of `kvasir` imports this
module, so it needs the standard library only."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.common.numbers import number, seconds, whole
from kvasir_platform.cli.common.parsers import Add
from kvasir_platform.cli.live.epilogs import (
    LOGS_EPILOG,
    STATUS_EPILOG,
    TAIL_EPILOG,
    TOP_COMMAND_EPILOG,
    TRACE_EPILOG,
)
from kvasir_platform.cli.record.arguments import add_routers, sites_of

if TYPE_CHECKING:
    from kvasir_platform.cli.common.gateway_site import Site
    from kvasir_platform.cli.common.output import CommandOutput

SiteAt = Callable[[str | None], "Site"]
"""The gateway at an address; None: the one that the command line selects."""
LIVE = ("status", "top", "trace", "tail", "logs")
VIEWS = ("workers", "queues", "tenants", "requests", "slowest")


def add_live(add: Add, gateway: argparse.ArgumentParser, addressed: argparse.ArgumentParser) -> None:
    """Add the commands. `gateway` has the options that select one, `addressed` those without --name."""
    _add_status(add, addressed)
    _add_top(add, gateway)
    _add_trace(add, gateway)
    _add_tail(add, gateway)
    _add_logs(add)


def _add_status(add: Add, addressed: argparse.ArgumentParser) -> None:
    status = add(
        "status",
        "say whether all is well, and show what runs: workers, load, processes",
        addressed,
        epilog=STATUS_EPILOG,
    )
    status.add_argument("name", nargs="?", help="the deployment, if several run")


def _add_top(add: Add, gateway: argparse.ArgumentParser) -> None:
    top = add("top", "watch workers, queues, tenants and requests", gateway, epilog=TOP_COMMAND_EPILOG)
    top.add_argument("--view", choices=VIEWS, default="workers", help="what is shown first (workers)")
    top.add_argument("--sort", metavar="COLUMN", help="its title; numbers from the largest, names from A")
    top.add_argument("--reverse", action="store_true", help="sort in the other order")
    top.add_argument("--filter", default="", metavar="TEXT", help="only rows with TEXT in a cell")
    top.add_argument("--interval", type=number(0.2, 60.0), default=1.0, metavar="S", help="seconds (1)")
    top.add_argument("--once", action="store_true", help="print all views as text, and end")


def _add_trace(add: Add, gateway: argparse.ArgumentParser) -> None:
    text = "show where the time of a request went, and why it ran there"
    trace = add("trace", text, gateway, epilog=TRACE_EPILOG)
    trace.add_argument("request_id", metavar="REQUEST_ID", help="the response's header x-request-id")


def _add_tail(add: Add, gateway: argparse.ArgumentParser) -> None:
    tail = add("tail", "follow requests as they end, one line each", gateway, epilog=TAIL_EPILOG)
    tail.add_argument("--tenant", metavar="NAME", help="only those of this tenant")
    tail.add_argument("--model", metavar="NAME", help="only those of this model")
    tail.add_argument(
        "--slow",
        nargs="?",
        const=0.0,
        type=seconds,
        metavar="TIME",
        help="only those that missed their SLO class; with TIME, as 500ms or 2s, those that took longer",
    )
    tail.add_argument("--failed", action="store_true", help="only those that failed; with --slow, those too")
    tail.add_argument("--requests", type=whole(1, 1_000_000_000), metavar="N", help="end after N lines")
    add_routers(tail)


def _add_logs(add: Add) -> None:
    logs = add("logs", "print the log of a worker, a pool's newest worker, or the router", epilog=LOGS_EPILOG)
    logs.add_argument(
        "source", metavar="WORKER|POOL|router", help="as `kvasir get workers` shows it; also control, ray, up"
    )
    logs.add_argument("--name", help="the deployment, if several run on this machine")
    logs.add_argument(
        "-f", "--follow", action="store_true", help="go on with what is written; Ctrl-C ends it"
    )
    logs.add_argument("--since", type=seconds, metavar="TIME", help="only the last TIME, as 90, 15m or 2h")
    logs.add_argument("-n", "--lines", type=whole(0, 10_000_000), metavar="N", help="the last N lines (200)")


def run_live(args: argparse.Namespace, site: SiteAt, output: CommandOutput) -> int:
    """Run the command. Raises KvasirError."""
    commands: dict[str, Callable[[], int]] = {
        "status": lambda: _status(args, site, output),
        "top": lambda: _top(args, site, output),
        "trace": lambda: _trace(args, site, output),
        "tail": lambda: _tail(args, site, output),
        "logs": lambda: _logs(args, output),
    }
    return commands[args.command]()


def _status(args: argparse.Namespace, site: SiteAt, output: CommandOutput) -> int:
    from kvasir_platform.cli.commands.status.report import gateway_status, status

    if args.address is not None:
        if args.name is not None:
            raise ConfigError(f"{args.name} names a deployment on this machine; leave it or --address out")
        return gateway_status(site(None), output)
    if args.cacert or args.cert or args.key:
        raise ConfigError("--cacert, --cert and --key are for a gateway that --address names")
    return status(args.name, output)


def _top(args: argparse.Namespace, site: SiteAt, output: CommandOutput) -> int:
    from kvasir_platform.cli.top.command import TopArguments, top

    wanted = TopArguments(
        args.view, args.sort, args.filter, args.interval, reverse=args.reverse, once=args.once
    )
    return top(wanted, site(None), output)


def _trace(args: argparse.Namespace, site: SiteAt, output: CommandOutput) -> int:
    from kvasir_platform.cli.live.trace import trace

    return trace(args.request_id, site(None), output)


def _tail(args: argparse.Namespace, site: SiteAt, output: CommandOutput) -> int:
    from kvasir_platform.cli.live.tail import TailArguments, tail

    wanted = TailArguments(args.tenant, args.model, args.slow, failed=args.failed, requests=args.requests)
    return tail(wanted, sites_of(args, site), output)


def _logs(args: argparse.Namespace, output: CommandOutput) -> int:
    from kvasir_platform.cli.live.logs import LogArguments, logs

    wanted = LogArguments(args.source, args.name, follow=args.follow, since_s=args.since, lines=args.lines)
    return logs(wanted, output)
