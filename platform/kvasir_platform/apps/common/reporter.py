"""Progress of a process for its parent: one JSON object per line, on standard output."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from kvasir_platform.cluster.ray.pool_status import PoolStatus


class Reporter:
    """Not thread-safe."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last: Sequence[PoolStatus] | None = None
        self._lost = False

    def event(self, name: str, **details: object) -> None:
        # The parent may have been killed; the orderly stop goes on.
        with contextlib.suppress(BrokenPipeError):
            self._out.write(json.dumps({"event": name, **details}) + "\n")
            self._out.flush()

    def pools(self, status: Sequence[PoolStatus]) -> None:
        """Report the state of the pools, once until it changes."""
        if status == self._last:
            return
        self._last = status
        self.event("pools", pools=[asdict(pool) | {"failed": pool.failed} for pool in status])

    def lost(self, message: str) -> None:
        """Report that the head cannot be kept; once."""
        if not self._lost:
            self._lost = True
            self.event("failed", code="ray_head_lost", message=message)
