"""The rollouts of one router: it counts what its requests came to, and decides with all other routers.

Once a second each router adds its counts to those of the others, reads the sums and the state, and stores the
next state if there is one. What a router serves is therefore at most a second and one call of the store old.
While the store does not answer, the last known share stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvasir.config.spec.deployment import Deployment
from kvasir.config.spec.traffic.routes import CanarySpec, RouteSpec
from kvasir.core.errors import RequestError, UpstreamError
from kvasir.core.requests import Request
from kvasir.ports.clock import Clock
from kvasir.ports.router import RequestPort, RequestSummary
from kvasir.ports.traffic.rollouts import RolloutStore, StoredRollout
from kvasir.telemetry.route_series import RolloutStats
from kvasir_platform.gateway.openai.schema.operation import RolloutOrdered
from kvasir_platform.gateway.traffic.memory_rollouts import MemoryRollouts
from kvasir_platform.gateway.traffic.outcomes import Outcome, PairedOutcomes, outcome_of, refused
from kvasir_platform.gateway.traffic.rollout import (
    Action,
    RolloutState,
    decide,
    decoded,
    encoded,
    evidence,
    ordered,
    threshold,
)

INTERVAL_S = 1.0
_ATTEMPTS = 5
"""Orders that another router's change may make invalid, before one is refused."""

_log = logging.getLogger(__name__)


class _Track:
    """One route with a canary, as this router knows it."""

    def __init__(self, route: RouteSpec, canary: CanarySpec) -> None:
        self.route = route
        self.canary = canary
        self.comparison = PairedOutcomes(canary.max_slowdown)
        self.state = RolloutState()
        self.stored = StoredRollout(0, 0, b"", {})

    @property
    def share(self) -> float:
        return self.state.share(self.canary)

    def take(self, stored: StoredRollout) -> None:
        """Go on from what is stored."""
        state = decoded(stored.state)
        if state.run != self.state.run:
            self.comparison.begin()
        self.state, self.stored = state, stored


class Rollouts:
    """The canaries of `routes`. `wall` returns Unix time in seconds, by which routers agree on the duration
    of a step. Call everything on one event loop; `run` keeps it up to date."""

    def __init__(
        self,
        routes: Sequence[RouteSpec],
        store: RolloutStore,
        clock: Clock,
        wall: Callable[[], float],
    ) -> None:
        self._tracks = {
            route.name: _Track(route, route.canary) for route in routes if route.canary is not None
        }
        self._store = store
        self._clock = clock
        self._wall = wall
        self._lock = asyncio.Lock()
        self._known_s = clock.now()
        self._warned = False
        self._shares: Mapping[str, float] = {}

    def shares(self) -> Mapping[str, float]:
        """Return the share of each canary, by route."""
        return self._shares

    def ended(self, summary: RequestSummary) -> None:
        """Count a request that ended, if a route with a canary chose its model."""
        if summary.route_arm is not None:
            self._add(summary.route_arm.route, summary.route_arm.arm, outcome_of(summary))

    def refused(self, request: Request, code: str) -> None:
        """Count a request that the router did not accept."""
        if request.route_arm is not None:
            self._add(request.route_arm.route, request.route_arm.arm, refused(code))

    async def run(self) -> None:
        """Keep up to date until cancelled, then release the store."""
        try:
            while self._tracks:
                await self.step()
                await self._clock.sleep(INTERVAL_S)
        finally:
            await self._store.close()

    async def step(self) -> None:
        """Share the counts, and decide once."""
        async with self._lock:
            try:
                for track in self._tracks.values():
                    await self._decide(track)
            except UpstreamError as error:
                if not self._warned:
                    self._warned = True
                    _log.error("%s; shares of canaries stay as they are", error.message)
                return
            self._warned = False
            self._known_s = self._clock.now()

    async def order(self, route: str, action: Action) -> RolloutOrdered:
        """Carry out an operator's order, and return the rollout. Raise RequestError 404 (`rollout_not_found`)
        or 409 (`rollout_state`), and UpstreamError (`rollouts_unavailable`)."""
        track = self._tracks.get(route)
        if track is None:
            known = ", ".join(self._tracks) or "none; add routes with a canary to kvasir.yaml"
            raise RequestError(
                f"No rollout {route[:64]!r}; there are: {known}.", status=404, code="rollout_not_found"
            )
        async with self._lock:
            for _ in range(_ATTEMPTS):
                track.take(await self._store.add(route, track.state.run, track.comparison.take()))
                if await self._replace(track, ordered(track.state, action, self._wall())):
                    return self._view(track)
        raise UpstreamError("other routers change this rollout; try again", code="rollouts_unavailable")

    def views(self) -> list[RolloutOrdered]:
        """Return all rollouts for operators."""
        return [self._view(track) for track in self._tracks.values()]

    def stats(self) -> dict[str, RolloutStats]:
        """Return the figures of each rollout, by route."""
        return {
            name: RolloutStats(track.share, evidence(track.stored.counts), self.stale_s())
            for name, track in self._tracks.items()
        }

    def stale_s(self) -> float:
        """Return the seconds since the store last answered."""
        return max(0.0, self._clock.now() - self._known_s)

    async def _decide(self, track: _Track) -> None:
        name, counts = track.route.name, track.comparison.take()
        track.take(await self._store.add(name, track.state.run, counts))
        after = decide(track.canary, track.state, track.stored.counts, self._wall())
        if after is not None:
            await self._replace(track, after)
        self._shares = {name: track.share for name, track in self._tracks.items()}

    async def _replace(self, track: _Track, state: RolloutState) -> bool:
        """Store the state, unless another router was first."""
        stored = track.stored
        if not await self._store.replace(track.route.name, stored.version, state.run, encoded(state)):
            return False
        counts = stored.counts if stored.run == state.run else {}
        track.take(StoredRollout(stored.version + 1, state.run, encoded(state), counts))
        self._shares = {name: track.share for name, track in self._tracks.items()}
        _log.warning(
            "the rollout of %s on route %s is %s, with %g %% of requests%s",
            track.canary.model,
            track.route.name,
            state.phase,
            100 * track.share,
            f": {state.reason}" if state.reason else "",
        )
        return True

    def _add(self, route: str, arm: str, outcome: Outcome | None) -> None:
        track = self._tracks.get(route)
        if track is None or outcome is None or not track.state.compares:
            return
        if arm in (track.canary.model, track.route.model):
            track.comparison.add(outcome, canary=arm == track.canary.model, step=track.state.step)

    def _view(self, track: _Track) -> RolloutOrdered:
        state, counts = track.state, track.stored.counts
        return RolloutOrdered(
            route=track.route.name,
            model=track.route.model,
            canary=track.canary.model,
            phase=state.phase,
            share=track.share,
            step=state.step if state.compares else None,
            steps=list(track.canary.steps),
            for_s=round(max(0.0, self._wall() - state.since_s), 1) if state.since_s else None,
            reason=state.reason,
            compared=counts.get(f"compared_{state.step}", 0),
            min_requests=track.canary.min_requests,
            counts=dict(counts),
            evidence={each: round(found, 3) for each, found in evidence(counts).items()},
            threshold=round(threshold(track.canary), 3),
            shared=self._store.shared,
            stale_s=round(self.stale_s(), 1),
        )


class CountedRequests:
    """`kvasir.ports.router.RequestPort` of a router whose refusals are counted for rollouts too; all else is
    that of `router`."""

    def __init__(self, router: RequestPort, rollouts: Rollouts) -> None:
        self._router = router
        self._rollouts = rollouts
        self.adapters = router.adapters
        self.cancel = router.cancel
        self.brownout = router.brownout
        self.not_ready_reason = router.not_ready_reason
        self.refusing_reason = router.refusing_reason
        self.not_ready_models = router.not_ready_models

    def submit(self, request: Request, sink: Any) -> None:
        """See RequestPort."""
        try:
            self._router.submit(request, sink)
        except Exception as error:
            self._rollouts.refused(request, getattr(error, "code", "internal_error"))
            raise


def make_rollouts(deployment: Deployment, clock: Clock, wall: Callable[[], float]) -> Rollouts | None:
    """Return the rollouts of a deployment, None without canaries. They are shared if limits of tenants
    are."""
    if all(route.canary is None for route in deployment.routes):
        return None
    spec = deployment.tenancy.redis
    if spec is None:
        return Rollouts(deployment.routes, MemoryRollouts(), clock, wall)
    from kvasir_platform.gateway.traffic.redis_rollouts import RedisRollouts

    return Rollouts(deployment.routes, RedisRollouts(spec), clock, wall)
