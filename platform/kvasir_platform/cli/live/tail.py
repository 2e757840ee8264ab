"""`kvasir tail`: follows the requests of a deployment as they end, one line each.

It is a reader of recordings that asks for no content, no names of blocks and no decisions.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from kvasir.core.errors import KvasirError, UpstreamError
from kvasir_platform.cli.common.gateway_client import read_recording
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput
from kvasir_platform.cli.live.tail_lines import HEAD, TailFilter, tail_line
from kvasir_platform.cli.record.command import stop_on_signals

POLL_S = 0.5
LOST_S = 30.0
"""After so long without an answer of any router, the command ends."""
_SALT_BYTES = 16
Read = Callable[[Site, str, dict[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class TailArguments:
    """What the command line asks for; see TailFilter. `requests` bounds the lines."""

    tenant: str | None = None
    model: str | None = None
    slow_s: float | None = None
    failed: bool = False
    requests: int | None = None


@dataclass(slots=True)
class _Followed:
    """A router. `lost_s` is since when it does not answer."""

    site: Site
    opened: str = ""
    after: int = 0
    dropped: int = 0
    lost_s: float | None = None


class TailRun:
    """Follows routers until `stop`, or until as many lines are printed as were asked for. `now` reads a
    monotonic clock, `wall` the time of day in UTC."""

    def __init__(
        self,
        wanted: TailArguments,
        sites: list[Site],
        output: CommandOutput,
        *,
        stop: threading.Event,
        read: Read = read_recording,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._filter = TailFilter(wanted.tenant, wanted.model, wanted.slow_s, wanted.failed)
        self._left = wanted.requests
        self._routers = [_Followed(site) for site in sites]
        self._output = output
        self._stop = stop
        self._read = read
        self._now = now
        self._wall = wall
        self._reader = f"tail-{secrets.token_hex(6)}"
        self._salt = secrets.token_bytes(_SALT_BYTES).hex()

    def run(self) -> None:
        """Print lines. Raises UpstreamError if a router cannot be followed at first, or none answers any
        more."""
        for router in self._routers:
            self._ask(router)
        self._output.text(HEAD)
        try:
            while self._left != 0 and not self._stop.wait(POLL_S):
                for router in self._routers:
                    self._turn(router)
        finally:
            for router in self._routers:
                with suppress(KvasirError):
                    self._read(
                        router.site, self._reader, {"salt": self._salt, "after": router.after, "done": True}
                    )

    def _turn(self, router: _Followed) -> None:
        try:
            while self._ask(router) and self._left != 0:
                pass
        except UpstreamError as error:
            now = self._now()
            if router.lost_s is None:
                router.lost_s = now
                self._output.note(f"{error.message}; trying again")
            if all(each.lost_s is not None and now - each.lost_s > LOST_S for each in self._routers):
                raise
        else:
            if router.lost_s is not None:
                self._output.note(f"the router at {router.site.authority} answers again")
            router.lost_s = None

    def _ask(self, router: _Followed) -> bool:
        """Read once. Return whether there is more."""
        body = {
            "salt": self._salt,
            "after": router.after,
            "names": True,
            "ids": True,
            "decisions": False,
            "prefixes": False,
        }
        page = self._read(router.site, self._reader, body)
        if page["opened"] != router.opened:
            if router.opened:
                self._output.note(
                    f"the router at {router.site.authority} has restarted; some requests are missing"
                )
            router.opened, router.dropped = page["opened"], 0
        if page["dropped"] > router.dropped:
            self._output.note(
                f"{page['dropped'] - router.dropped:,} requests were dropped: too many ended at once"
            )
            router.dropped = page["dropped"]
        wall = self._wall()
        for row in page["records"]:
            ended_s = row["arrival_s"] + row["outcome"]["e2e_s"]
            self._show(row, wall - timedelta(seconds=page["elapsed_s"] - ended_s))
        router.after = page["last"]
        return bool(page["more"])

    def _show(self, row: dict[str, Any], ended: datetime) -> None:
        if self._left == 0 or not self._filter.shows(row):
            return
        self._output.data(row | {"ended": ended.isoformat(timespec="milliseconds")})
        self._output.text(tail_line(row, ended.astimezone()))
        self._left = None if self._left is None else self._left - 1


def tail(wanted: TailArguments, sites: list[Site], output: CommandOutput) -> int:
    """Follow until Ctrl-C. Raises KvasirError."""
    TailRun(wanted, sites, output, stop=stop_on_signals()).run()
    return 0
