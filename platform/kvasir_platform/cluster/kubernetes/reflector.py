"""Keeps a copy of a collection of the API server that is as new as it can be, and never emptier than it was.

List, then watch from the list's version. An interrupted watch goes on where it was; only a version that the
server has forgotten makes it list anew, and until that list is there the old copy stands. Whatever is missed
all the same is found by listing again from time to time.
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
"""How long the server is asked to keep a watch: a dead one is found by then at the latest."""
SHORT_WATCH_S = 1.0
"""A watch that ended sooner, and told nothing, was no success."""
BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 30.0


@dataclass(slots=True)
class Copy:
    """The collection as far as it is known: objects by name, at `version`; None: to be listed."""

    objects: dict[str, bytes] = field(default_factory=dict)
    version: str | None = None

    def replace(self, listing: Listing) -> None:
        """The whole collection."""
        self.objects, self.version = dict(listing.items), listing.version

    def apply(self, event: Event) -> bool:
        """The next change; returns whether objects differ from before."""
        before = self.objects.get(event.name)
        if event.kind in ("ADDED", "MODIFIED"):
            self.objects[event.name] = event.value
        elif event.kind == "DELETED":
            self.objects.pop(event.name, None)
        # Of an event without a version nothing is known of where to go on.
        self.version = event.version or None
        return self.objects.get(event.name) != before


class Reflector:
    """Follows `collection`, of which `params` select a part, while `run` does.

    `take` is given the objects by name, first when they are known and again when one has changed. It returns
    how many seconds later they are to be listed before it can believe them, 0 when it believes them.
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
        """Until cancelled."""
        while True:
            stale = self._clock.now() - self._listed_s >= self._resync_s
            # A resync that failed gives way to a watch, so that changes are not missed for it.
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
        """For how many seconds the server has told nothing, though asked; 0 while it does."""
        return 0.0 if self._stale_since is None else self._clock.now() - self._stale_since

    async def _list(self) -> float:
        self._copy.replace(await self._api.list(self._collection, self._params))
        self._listed_s = self._clock.now()
        self._sees()
        return self._take(self._copy.objects)

    async def _watch(self) -> float:
        """One watch, to its end. Raises ApiError for one that told nothing and ended early."""
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
        """Take note; returns how long to wait before the next try, in seconds."""
        self._failures += 1
        if error.status == GONE:
            self._copy.version = None
            if self._failures == 1:
                return 0.0
        if self._stale_since is None:
            self._stale_since = self._clock.now()
            log.warning(
                "cannot follow %s at the API server, keeping what is known: %s",
                self._collection,
                error.message,
            )
        longest = min(BACKOFF_MAX_S, BACKOFF_MIN_S * 2.0 ** min(self._failures - 1, 16))
        return max(error.retry_after_s, longest * (0.5 + 0.5 * self._rng.random()))

    def _sees(self) -> None:
        if self._stale_since is not None:
            log.warning("%s can be followed again, after %.0f s", self._collection, self.stale_s())
            self._stale_since = None
