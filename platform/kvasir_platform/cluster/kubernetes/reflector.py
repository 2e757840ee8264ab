"""A copy of a collection of the API server, kept up to date and never emptied by a failed request.

The reflector lists the collection, then watches from the list's version. An interrupted watch resumes at its
last version; only an expired version causes another list, and the old copy stays until that list is complete.
A periodic resync finds changes that the watch missed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from kvasir.ports.clock import Clock, Rng
from kvasir_platform.cluster.kubernetes.api import GONE, ApiError, ApiServer, Event, Listing

log = logging.getLogger(__name__)

WATCH_S = 120.0
"""Requested duration of a watch, in seconds: the longest time until a dead watch is detected."""
SHORT_WATCH_S = 1.0
"""A watch that ends sooner without an event counts as a failure."""
BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 30.0


@dataclass(slots=True)
class Copy:
    """The known state of the collection: objects by name, at `version`; None requires a list."""

    objects: dict[str, bytes] = field(default_factory=dict)
    version: str | None = None

    def replace(self, listing: Listing) -> None:
        """Replace the whole collection."""
        self.objects, self.version = dict(listing.items), listing.version

    def apply(self, event: Event) -> bool:
        """Apply one change. Return whether an object differs."""
        before = self.objects.get(event.name)
        if event.kind in ("ADDED", "MODIFIED"):
            self.objects[event.name] = event.value
        elif event.kind == "DELETED":
            self.objects.pop(event.name, None)
        # Without a version there is no point from which to resume.
        self.version = event.version or None
        return self.objects.get(event.name) != before


class Reflector:
    """Follows the objects of `collection` that `params` select, while `run` runs.

    `take` gets the objects by name, after the first list and after each change. It returns 0 if it accepts
    them, or the seconds after which they have to be listed again before it does.
    """

    def __init__(
        self,
        api: ApiServer,
        collection: str,
        params: Mapping[str, str],
        *,
        clock: Clock,
        rng: Rng,
        resync_s: float,
        take: Callable[[Mapping[str, bytes]], float],
    ) -> None:
        self._api = api
        self._collection = collection
        self._params = params
        self._clock = clock
        self._rng = rng
        self._resync_s = resync_s
        self._take = take
        self._copy = Copy()
        self._listed_s = 0.0
        self._lists = False
        self._failures = 0
        self._stale_since: float | None = None

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            stale = self._clock.now() - self._listed_s >= self._resync_s
            # After a failed resync, watch first, so that no changes are missed.
            self._lists = self._copy.version is None or (stale and not self._lists)
            try:
                doubt_s = await (self._list() if self._lists else self._watch())
            except ApiError as error:
                await self._clock.sleep(self._trouble(error))
            else:
                if doubt_s:
                    self._copy.version = None
                    await self._clock.sleep(doubt_s)

    def stale_s(self) -> float:
        """Seconds since the server last answered, while requests fail; 0 otherwise."""
        return 0.0 if self._stale_since is None else self._clock.now() - self._stale_since

    async def _list(self) -> float:
        self._copy.replace(await self._api.list(self._collection, self._params))
        self._listed_s = self._clock.now()
        self._sees()
        return self._take(self._copy.objects)

    async def _watch(self) -> float:
        """Run one watch to its end. Raises ApiError if it ends early without an event."""
        version, began, delivered = self._copy.version or "", self._clock.now(), False
        left_s = self._listed_s + self._resync_s - began
        for_s = min(WATCH_S, max(left_s, BACKOFF_MAX_S)) * (0.5 + 0.5 * self._rng.random())
        async with aclosing(self._api.watch(self._collection, self._params, version, for_s)) as events:
            async for event in events:
                delivered = True
                self._failures = 0
                self._sees()
                if self._copy.apply(event) and (doubt_s := self._take(self._copy.objects)):
                    return doubt_s
                if self._copy.version is None:
                    return 0.0
        if not delivered and self._clock.now() - began < SHORT_WATCH_S:
            raise ApiError("the watch ended at once")
        self._failures = 0
        self._sees()
        return 0.0

    def _trouble(self, error: ApiError) -> float:
        """Record a failure. Return the delay before the next attempt, in seconds."""
        self._failures += 1
        if error.status == GONE:
            self._copy.version = None
            if self._failures == 1:
                return 0.0
        if self._stale_since is None:
            self._stale_since = self._clock.now()
            log.warning(
                "cannot watch %s at the API server, keeping the known objects: %s",
                self._collection,
                error.message,
            )
        longest = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(self._failures - 1, 16))
        return max(error.retry_after_s, longest * (0.5 + 0.5 * self._rng.random()))

    def _sees(self) -> None:
        if self._stale_since is not None:
            log.warning("%s can be watched again, after %.0f s", self._collection, self.stale_s())
            self._stale_since = None
