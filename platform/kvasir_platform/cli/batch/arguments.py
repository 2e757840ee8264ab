"""The options of `kvasir batch`. Every call of `kvasir` imports this module, so it needs the standard library
only."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvasir_platform.cli.common.numbers import whole
from kvasir_platform.cli.common.parsers import Add, actions_of
from kvasir_platform.cli.help_texts import BATCH_EPILOG

if TYPE_CHECKING:
    from kvasir_platform.cli.common.gateway_site import Site
    from kvasir_platform.cli.common.output import CommandOutput


def add_batch(add: Add, shared: argparse.ArgumentParser, gateway: argparse.ArgumentParser) -> None:
    """Add the command and its actions."""
    batch = add("batch", "run files of requests in capacity that others leave", epilog=BATCH_EPILOG)
    act = partial(actions_of(batch, shared, gateway), epilog=BATCH_EPILOG)
    submit = act("submit", "upload a file, and start a batch of its lines")
    submit.add_argument("file", type=Path, metavar="FILE", help="JSONL, one request a line")
    submit.add_argument(
        "--endpoint", metavar="PATH", help="what the lines call (default: the url of the first)"
    )
    submit.add_argument(
        "--window", default="24h", metavar="TIME", help="when it expires, as 90m, 24h or 7d (24h)"
    )
    submit.add_argument("--watch", action="store_true", help="watch it until it has ended")
    listed = act("list", "list batches, the newest first")
    listed.add_argument("--limit", type=whole(1, 100), default=20, metavar="N", help="at most N (20)")
    watch = act("watch", "show how far a batch is, until it has ended")
    fetch = act("fetch", "write the results of a batch to files")
    fetch.add_argument(
        "--to", type=Path, metavar="FILE", help="the answers (ID.jsonl); errors go to FILE.errors"
    )
    fetch.add_argument("--force", action="store_true", help="replace files that exist")
    cancel = act("cancel", "start no more lines of a batch")
    for each in (watch, fetch, cancel):
        each.add_argument("batch", metavar="ID", help="as `kvasir batch list` shows it")


def run_batch(args: argparse.Namespace, site: Site, output: CommandOutput) -> int:
    """Run the action. Raises KvasirError."""
    from kvasir_platform.cli.batch import actions

    if args.action == "submit":
        wanted = actions.SubmitArguments(args.file, args.endpoint, args.window, watch=args.watch)
        return actions.submit(wanted, site, output)
    if args.action == "list":
        return actions.list_batches(args.limit, site, output)
    if args.action == "watch":
        return actions.watch(args.batch, site, output)
    if args.action == "fetch":
        return actions.fetch(args.batch, args.to, site, output, force=args.force)
    return actions.cancel(args.batch, site, output)
