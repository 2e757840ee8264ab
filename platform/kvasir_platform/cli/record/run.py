"""Reads the recordings of all routers in turn, and writes what they return.

A router that does not answer is asked again: it may restart, and its recording then begins anew, without what
was not read. What routers drop, and such gaps, are counted in the file.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from kvasir.core.errors import KvasirError, UpstreamError
from kvasir_platform.cli.common.gateway_client import read_recording
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.record.files import RecordingFiles
from kvasir_platform.workload.recording import request_line
from kvasir_platform.workload.requests import WorkloadRequest

POLL_S = 1.0
LOST_S = 60.0
"""After so long without an answer of any router, the recording ends."""

Read = Callable[[Site, str, dict[str, Any]], Mapping[str, Any]]
Shown = Callable[["RecordingState"], None]


@dataclass(frozen=True, slots=True)
class RecordingOptions:
    """What a reader asks for, and for how long. `reader` is its name at routers."""

    reader: str
    salt: bytes
    duration_s: float
    wait_s: float
    names: bool = False
    decisions: bool = True
    block_tokens: int = 64


@dataclass(slots=True)
class _Router:
    """One router. `offset_s` is when its recording began, from the beginning of the first one."""

    site: Site
    opened: str = ""
    offset_s: float = 0.0
    after: int = 0
    dropped: int = 0
    running: int = 0
    lost_s: float | None = None


@dataclass(slots=True)
class RecordingState:
    """How far a recording is. `dropped` are records that a router had no room for, `gaps` counts restarts of
    routers, after which records are missing, and `unfinished` requests that had not ended at the end."""

    requests: int = 0
    bytes: int = 0
    elapsed_s: float = 0.0
    dropped: int = 0
    gaps: int = 0
    unfinished: int = 0
    troubled: str = ""


class RecordingRun:
    """Records from `sites` into `files` until it is stopped or a limit is reached. `shown` is called now and
    then."""

    def __init__(
        self,
        options: RecordingOptions,
        sites: list[Site],
        files: RecordingFiles,
        state: RecordingState,
        *,
        shown: Shown,
        stop: threading.Event,
        read: Read = read_recording,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._routers = [_Router(site) for site in sites]
        self._files = files
        self.state = state
        self._shown = shown
        self._stop = stop
        self._read = read
        self._now = now
        self._began_s = 0.0
        self._dropped_before = 0

    def run(self) -> None:
        """Record. Raises UpstreamError if a router cannot be recorded, if none answers any more, or if a file
        cannot be written; what was recorded before is in the file."""
        self._began_s = self._now()
        for router in self._routers:
            self._ask(router, closing=False)
        complete = False
        try:
            while not self._files.full and (left_s := self._options.duration_s - self._elapsed()) > 0.0:
                if self._stop.wait(min(POLL_S, left_s)):
                    break
                self._turn(closing=False)
            self._drain()
            complete = True
        finally:
            self.state.unfinished = sum(router.running for router in self._routers)
            if not self._files.block_tokens and complete:
                self._files.begin(self._options.block_tokens)
            self._leave()
            self._files.close(complete=complete)

    def _drain(self) -> None:
        """Read what arrived before the end and has not ended, for a while."""
        until_s = self._now() + self._options.wait_s
        self._stop.clear()
        while not self._files.full:
            self._turn(closing=True)
            running = sum(router.running for router in self._routers)
            if not running or self._now() >= until_s or self._stop.wait(POLL_S):
                return

    def _turn(self, *, closing: bool) -> None:
        for router in self._routers:
            try:
                while self._ask(router, closing=closing) and not self._files.full:
                    pass
                router.lost_s = None
            except UpstreamError as error:
                self._lost(router, error)
        self._show()

    def _lost(self, router: _Router, error: UpstreamError) -> None:
        """Go on for a while, if only the router does not answer."""
        if error.code == "disk_failed":
            raise error
        now = self._now()
        router.lost_s = now if router.lost_s is None else router.lost_s
        self.state.troubled = error.message
        if all(each.lost_s is not None and now - each.lost_s > LOST_S for each in self._routers):
            raise UpstreamError(
                f"{error.message}; no router has answered for {LOST_S:.0f} s", code=error.code
            )

    def _leave(self) -> None:
        """Let routers forget this reader at once; they do it by themselves after a while."""
        for router in self._routers:
            body = {"salt": self._options.salt.hex(), "after": router.after, "done": True}
            with suppress(KvasirError):
                self._read(router.site, self._options.reader, body)

    def _ask(self, router: _Router, *, closing: bool) -> bool:
        """Read once. Return whether there is more."""
        options = self._options
        body = {
            "salt": options.salt.hex(),
            "after": router.after,
            "block_tokens": self._files.block_tokens or options.block_tokens,
            "names": options.names,
            "decisions": options.decisions,
            "closing": closing,
        }
        page = self._read(router.site, options.reader, body)
        if page["opened"] != router.opened:
            self._opened(router, page)
        self.state.dropped += page["dropped"] - router.dropped
        router.dropped, router.running = page["dropped"], page["running"]
        for record in page["records"]:
            if not self._files.block_tokens:
                self._files.begin(page["block_tokens"])
            self._write(router, record, page["block_tokens"])
        router.after = page["last"]
        return bool(page["more"])

    def _opened(self, router: _Router, page: Mapping[str, Any]) -> None:
        self.state.gaps += bool(router.opened)
        router.opened, router.dropped = page["opened"], 0
        router.offset_s = max(0.0, self._elapsed() - page["elapsed_s"])

    def _write(self, router: _Router, record: Mapping[str, Any], block_tokens: int) -> None:
        named = block_tokens == self._files.block_tokens
        request = WorkloadRequest(
            record["arrival_s"] + router.offset_s,
            record["prompt_tokens"],
            record["output_tokens"],
            array("Q", record["prefix_hashes"] if named else ()),
            embeds=record.get("embeds", False),
            tenant=record.get("tenant", ""),
            session=record.get("session", ""),
            model=record["model"],
            slo=record["slo"],
        )
        more = {field: record[field] for field in ("outcome", "decision") if field in record}
        self._files.write(request_line(request, more))

    def _elapsed(self) -> float:
        return self._now() - self._began_s

    def _show(self) -> None:
        state, files = self.state, self._files
        state.requests, state.bytes, state.elapsed_s = files.requests, files.bytes, self._elapsed()
        self._shown(state)
