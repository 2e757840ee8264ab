"""Picks model servers with the router's own parts: fleet, prefix index, cost policy, and health.

Every server runs whole requests. What it caches is predicted from what was sent there, and its load is what
this picker has put on it: a picker is alone in front of its pool, as the protocol has it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final

from kvasir.config.spec.deployment import HealthSpec
from kvasir.core.errors import CapacityError
from kvasir.core.identity import KvLayout, WorkerIdentity
from kvasir.core.requests import Role
from kvasir.ports.clock import Rng
from kvasir.ports.routing import Plan, RoutingTarget
from kvasir_platform.picker.prompts import PickedFor
from kvasir_router.build import hash_blocks
from kvasir_router.decide import RateBook, make_policy, rates_of
from kvasir_router.fleet.fleet import Charges, Fleet
from kvasir_router.fleet.role_gap import RoleGap
from kvasir_router.index import FleetIndex, IndexMode

POOL: Final = "endpoints"
_BLOCK_TOKENS: Final = 16
_OUTPUT_TOKENS: Final = 256
"""Expected output of a request that sets no limit."""
_FULL_RETRY_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class PickerLimits:
    """Bounds of a picker. An endpoint with `max_requests` in flight gets no more. Its cache is taken to hold
    `kv_tokens`; predictions of it live for `predicted_ttl_s`. `fallbacks` further endpoints are named for the
    gateway to try if the first one cannot be reached."""

    max_requests: int = 256
    kv_tokens: int = 1 << 18
    predicted_blocks: int = 1_000_000
    predicted_ttl_s: float = 300.0
    fallbacks: int = 1
    policy: str = "cost"


@dataclass(slots=True)
class Picked:
    """The endpoints of one request, the best first, and what is accounted for it."""

    request_id: str
    endpoints: tuple[str, ...]
    target: RoutingTarget
    charges: Charges = field(repr=False)
    started: bool = False


class EndpointPicker:
    """Decides for one pool. Pure but for `rng`, which spreads ties; each call passes the time in seconds."""

    def __init__(self, limits: PickerLimits, rng: Rng) -> None:
        self._limits = limits
        self._fleet = Fleet(
            make_policy(limits.policy, "never", rng),
            FleetIndex(
                capacity_blocks=max(1024, limits.predicted_blocks),
                predicted_blocks=max(1024, limits.predicted_blocks),
                predicted_ttl_s=limits.predicted_ttl_s,
            ),
            RateBook(rates_of),
            hash_blocks=hash_blocks,
            expected_output_tokens=_OUTPUT_TOKENS,
            index_modes={POOL: IndexMode.PREDICTED},
            health=HealthSpec(),
            gap=RoleGap(None),
        )
        self._number = 0

    @property
    def endpoints(self) -> frozenset[str]:
        """The endpoints of the pool, each `ip:port`."""
        return frozenset(self._fleet.workers)

    def in_flight(self, endpoint: str) -> int:
        """Return the number of requests at an endpoint; 0 for an unknown one."""
        worker = self._fleet.workers.get(endpoint)
        return 0 if worker is None else worker.charged

    def update(self, endpoints: Iterable[str], now: float) -> None:
        """Set the endpoints of the pool. Requests at one that left are forgotten."""
        wanted = frozenset(endpoints)
        for gone in self.endpoints - wanted:
            self._fleet.remove(gone)
        for new in sorted(wanted - self.endpoints):
            self._fleet.add(new, _identity(new, self._limits.kv_tokens), now)

    def pick(self, asked: PickedFor, subset: Collection[str] | None, now: float) -> Picked:
        """Return the endpoints for a request, from `subset` if it is not None. Raise CapacityError:
        `no_workers` (503) if none is there, `no_capacity` (429) if each has as much as it may have."""
        known = self._fleet.workers
        allowed = self.endpoints if subset is None else self.endpoints.intersection(subset)
        if not allowed:
            what = (
                "has no ready endpoint" if subset is None else "has no ready endpoint in the gateway's subset"
            )
            raise CapacityError(f"The pool {what}.", code="no_workers")
        full = {each for each in allowed if known[each].charged >= self._limits.max_requests}
        if len(full) == len(allowed):
            raise CapacityError(
                f"Each endpoint has {self._limits.max_requests} requests.",
                code="no_capacity",
                retry_after_s=_FULL_RETRY_S,
            )
        self._number += 1
        request = asked.request(f"pick-{self._number}", POOL, now)
        names = self._fleet.hashes(request)
        avoid = (self.endpoints - allowed) | full
        chosen: list[str] = []
        first = None
        for _ in range(1 + self._limits.fallbacks):
            plan = self._fleet.plan(
                request, names, now, avoid=avoid.union(chosen), tentative=first is not None
            )
            if plan is None or plan.decode.worker_id in avoid.union(chosen):
                break
            first = first or plan
            chosen.append(plan.decode.worker_id)
        if first is None:
            # All that are allowed have failed of late, and the policy would rather use one that is not.
            least = min(sorted(allowed - full), key=lambda each: known[each].charged)
            first, chosen = Plan(None, RoutingTarget(least), "only_allowed"), [least]
        charges = self._fleet.commit(request, names, first, now)
        return Picked(request.request_id, tuple(chosen), first.decode, charges)

    def served_by(self, picked: Picked, endpoint: str, now: float) -> None:
        """The gateway says which endpoint answered: the first one could not, if it is another."""
        if endpoint == picked.target.worker_id or endpoint not in picked.endpoints:
            return
        self._fleet.health.failed(picked.target.worker_id, "worker_failed", now)
        self._release(picked)
        self._fleet.abandon(picked.request_id)
        picked.target, picked.started = RoutingTarget(endpoint), True

    def answers(self, picked: Picked, now: float) -> None:
        """The first byte of the answer came: the prompt is computed and cached."""
        if picked.started:
            return
        picked.started = True
        charged = picked.charges.get(picked.target)
        if charged is not None:
            self._fleet.settle(picked.charges, picked.target, charged.prompt())
        self._fleet.confirm(picked.request_id, picked.target, now)

    def ended(self, picked: Picked, now: float, *, failed: bool = False) -> None:
        """The request ended in any way; `failed`: the server is at fault."""
        self._release(picked)
        if not picked.started:
            self._fleet.abandon(picked.request_id)
        endpoint = picked.target.worker_id
        if endpoint in self._fleet.workers:
            if failed:
                self._fleet.health.failed(endpoint, "worker_failed", now)
            elif picked.started:
                self._fleet.health.succeeded(endpoint, now)

    def tick(self, now: float) -> None:
        """Expire predictions and ejections; call it a few times a second."""
        self._fleet.index.tick(now)
        self._fleet.health.tick(now)

    def _release(self, picked: Picked) -> None:
        charged = picked.charges.get(picked.target)
        if charged is not None:
            self._fleet.settle(picked.charges, picked.target, charged.copy())


def _identity(endpoint: str, kv_tokens: int) -> WorkerIdentity:
    layout = KvLayout(
        block_size=_BLOCK_TOKENS,
        dtype="",
        layout="none",
        layers=1,
        kv_heads=1,
        head_size=1,
        bytes_per_block=1,
    )
    return WorkerIdentity(
        worker_id=endpoint,
        epoch=1,
        pool=POOL,
        role=Role.BOTH,
        model=POOL,
        revision="",
        tokenizer_digest="",
        max_model_len=1 << 30,
        kv=layout,
        kv_blocks=max(1, kv_tokens // _BLOCK_TOKENS),
        engine="http",
        engine_version="",
    )
