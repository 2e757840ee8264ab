"""`kvasir top`: the interactive screen, or with --once all views as text."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass

from kvasir.core.errors import ConfigError
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.top.snapshot import TopSnapshot, read_snapshot
from kvasir_platform.cli.top.tables import TABLES, TopOrder, heading, plain

_WIDTH = 80


@dataclass(frozen=True, slots=True)
class TopArguments:
    """What the command line asks for."""

    view: str
    sort: str | None
    text: str
    interval_s: float
    reverse: bool = False
    once: bool = False


def top(wanted: TopArguments, site: Site, output: CommandOutput) -> int:
    """Show a gateway until the user quits. Raises ConfigError for a column that no view has, and the errors
    of the gateway client if it does not answer at first."""
    first = read_snapshot(site, time.monotonic())
    order = TopOrder(_column(wanted.sort, first), wanted.reverse, wanted.text)
    if wanted.once or not output.is_terminal:
        tenants = {name: asdict(counts) for name, counts in first.tenants.items()}
        output.data({"status": first.status, "requests": first.requests, "tenants": tenants})
        width = shutil.get_terminal_size((_WIDTH, 24)).columns
        output.text("\n".join(screen_text(first, order, width)))
        return 0
    from kvasir_platform.cli.top.screen import TopScreen

    TopScreen(
        lambda: read_snapshot(site, time.monotonic()),
        first,
        view=wanted.view,
        order=order,
        interval_s=wanted.interval_s,
    ).run()
    return 0


def screen_text(snapshot: TopSnapshot, order: TopOrder, width: int) -> list[str]:
    """Return all views as lines of text."""
    lines = [line for line in heading(snapshot) if line]
    for make in TABLES:
        lines += ["", *plain(make(snapshot, None), order, width)]
    return lines


def _column(asked: str | None, snapshot: TopSnapshot) -> str:
    """Return the title of a column; tenants have rates after the first refresh, and totals before."""
    if asked is None:
        return ""
    known = {
        title for make in TABLES for before in (None, snapshot) for title in make(snapshot, before).columns
    }
    if asked.upper() not in known:
        raise ConfigError(f"--sort {asked}: no view has that column; name one of: {', '.join(sorted(known))}")
    return asked.upper()
