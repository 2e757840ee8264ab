"""The options of `kvasir record`. Every call of `kvasir` imports this module, so it needs the standard
library only."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir_platform.cli.common.numbers import seconds, whole
from kvasir_platform.cli.common.parsers import Add
from kvasir_platform.cli.help_texts import RECORD_EPILOG

if TYPE_CHECKING:
    from kvasir_platform.cli.common.gateway_site import Site
    from kvasir_platform.cli.common.output import CommandOutput

STDOUT = Path("-")
_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_LEAST_BYTES = 1 << 14


def add_record(add: Add, gateway: argparse.ArgumentParser) -> None:
    """Add the command."""
    record = add(
        "record",
        "record arrivals, lengths, shared prefixes, outcomes and decisions, without content",
        gateway,
        epilog=RECORD_EPILOG,
    )
    record.add_argument(
        "file", type=Path, metavar="FILE", help="FILE.jsonl, FILE.parquet, or - for standard output"
    )
    add_routers(record)
    _add_limits(record.add_argument_group("limits: the first that is reached ends the recording"))
    _add_content(record.add_argument_group("what is recorded"))


def add_routers(command: argparse.ArgumentParser) -> None:
    """Add the options that name several routers."""
    command.add_argument(
        "--router",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="a further router of the same deployment (repeatable)",
    )
    command.add_argument(
        "--service", metavar="NAME", help="in a pod: every router behind this Kubernetes Service"
    )


def sites_of(args: argparse.Namespace, site: Callable[[str | None], Site]) -> list[Site]:
    """Return the routers that the options name; `site` returns the gateway at an address, None: the one that
    the command line selects. Raises KvasirError."""
    if args.service is None:
        return [site(address) for address in (None, *args.router)]
    from kvasir_platform.cli.record.sites import service_addresses

    return [site(address) for address in (*service_addresses(args.service, args.address), *args.router)]


def _add_limits(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--duration", type=seconds, default=3600.0, metavar="TIME", help="as 90, 15m or 2h (1h)"
    )
    group.add_argument(
        "--requests",
        type=whole(1, 1_000_000_000_000),
        default=1_000_000,
        metavar="N",
        help="requests in a file (1000000)",
    )
    group.add_argument(
        "--bytes", type=_bytes, default=1 << 30, metavar="SIZE", help="of a file, as 500M or 2G (1G)"
    )
    group.add_argument(
        "--keep",
        type=whole(1, 1000),
        metavar="N",
        help="when a file is full, go on in the next, FILE.2.jsonl, and keep the newest N",
    )
    group.add_argument(
        "--wait",
        type=seconds,
        default=30.0,
        metavar="TIME",
        help="at the end, wait so long for requests that still run (30)",
    )


def _add_content(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--salt-file",
        type=Path,
        metavar="FILE",
        help="salt names with the bytes of FILE (default: random), so that two recordings can be joined",
    )
    group.add_argument(
        "--clear-names", action="store_true", help="record the names of tenants and sessions unsalted"
    )
    group.add_argument("--no-decisions", action="store_true", help="leave out the router's decisions")
    group.add_argument(
        "--block-tokens",
        type=whole(1, 65_536),
        default=64,
        metavar="N",
        help="name shared prefixes in blocks of N tokens, or the next multiple of the engine's (64)",
    )


def run_record(args: argparse.Namespace, site: Callable[[str | None], Site], output: CommandOutput) -> int:
    """Run the command; `site` returns the gateway at an address, None: the one that the command line selects.
    Raises KvasirError."""
    from datetime import UTC, datetime

    from kvasir_platform.cli.record.command import RecordArguments, record
    from kvasir_platform.cli.record.files import FileLimits

    wanted = RecordArguments(
        args.file,
        args.duration,
        FileLimits(args.requests, args.bytes, args.keep),
        args.wait,
        args.salt_file,
        names=args.clear_names,
        decisions=not args.no_decisions,
        block_tokens=args.block_tokens,
    )
    return record(wanted, sites_of(args, site), output, datetime.now(UTC))


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)([KMG]?)", text)
    if found is None or (size := int(found[1]) * _SIZES[found[2]]) < _LEAST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r}: name a size of at least 16K, as 500M or 2G")
    return size
