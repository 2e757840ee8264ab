"""Limits of tenants that all cells share: `kvasir.ports.limits.RateLimits` over several cells.

Requests and tokens a minute of a tenant have one bucket, in the tenant's home cell, which all cells compute
alike from the names; the others spend allotments of it (`kvasir_router.regions.limits`, which states the
bound on what the cells together admit beyond the limit). The same cell has the slots of its concurrency, of
which the others have some (`kvasir_router.regions.sharing.slots`, likewise).

Where the routers of a cell share limits with each other, buckets and slots of the home cell are in their
store. Each router of another cell asks for itself, and what its cell may use while the home cell does not
answer is in the store of that cell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple

from kvasir.ports.clock import Clock
from kvasir.ports.limits import (
    WINDOW_S,
    BucketLevels,
    Grant,
    LendingRateLimits,
    LimitRefusal,
    PerMinute,
    Quota,
    RateLimits,
)
from kvasir_platform.regions.sharing.asks import (
    AskCell,
    LimitAllotted,
    LimitAsk,
    TenantSlotAsk,
    TenantSlots,
)
from kvasir_platform.regions.sharing.stored import SharedCellLimits
from kvasir_router.regions.limits import Admitted, Allotment, AllottedLimit, HomeLimit
from kvasir_router.regions.sharing.slots import KEPT_S, CellSlots, HomeSlots, SlotGrant, part_of

Shared = Literal["requests", "tokens", "concurrency"]
MAX_WAITING = 1024
"""Calls that wait for an allotment or a slot. Others are refused."""


class _Call(NamedTuple):
    tenant: str
    quota: Quota
    tokens: int
    then: Callable[[Grant | LimitRefusal], None]


_Key = tuple[str, Shared]
"""A tenant, and one of its limits."""


@dataclass(slots=True)
class _Limit:
    """One limit of a tenant, at its home cell or in another."""

    at_home: HomeLimit | None
    allotted: AllottedLimit | None
    per_min: int

    def take(self, amount: float, now: float) -> Admitted:
        if self.at_home is not None:
            return self.at_home.take(amount, now)
        return Admitted.NO if self.allotted is None else self.allotted.take(amount, now)

    def give_back(self, amount: float, now: float) -> None:
        for each in (self.at_home, self.allotted):
            if each is not None:
                each.give_back(amount, now)


class CellLimits:
    """`RateLimits` of all cells. `cells` are their names, `own` is this one's; `quotas` has the limits of the
    tenants that have any, and `ask` sends to other cells. `epoch` grows with each start of the process.
    `router` is unique among the routers of a cell that has several. Call `tick` once a second."""

    def __init__(
        self,
        own: str,
        cells: Collection[str],
        quotas: Mapping[str, Quota],
        clock: Clock,
        *,
        ask: AskCell,
        epoch: int,
        router: str = "",
    ) -> None:
        self._own = own
        self._quotas = quotas
        self._parts = {tenant: _part(quota, len(cells)) for tenant, quota in quotas.items()}
        self._store: LendingRateLimits | None = None
        self._clock = clock
        self._ask = ask
        self._homes = {tenant: home_of(tenant, cells) for tenant in quotas}
        asks_as = f"{own}/{router}" if router else own
        now = clock.now()
        self._limits: dict[tuple[str, PerMinute], _Limit] = {}
        self._slots: dict[str, HomeSlots | CellSlots] = {}
        for tenant, quota in quotas.items():
            here = self._homes[tenant] == own
            for name, per_min in _per_min(quota):
                self._limits[tenant, name] = _Limit(
                    HomeLimit(per_min, now) if here else None,
                    None if here else AllottedLimit(asks_as, per_min, len(cells), now, after=epoch),
                    per_min,
                )
            if (most := quota.concurrency) is not None:
                self._slots[tenant] = (
                    HomeSlots(most) if here else CellSlots(asks_as, most, len(cells), after=epoch)
                )
        self._waiting: dict[_Key, deque[_Call]] = {}
        self._asked: set[_Key] = set()

    def over(self, inner: RateLimits) -> RateLimits:
        """Return these limits in place of `inner`, those of one cell; `inner` itself if no tenant has any."""
        if not self._limits and not self._slots:
            return inner
        if isinstance(inner, LendingRateLimits):
            self._store = inner
            return SharedCellLimits(self, inner)
        return self

    # -- RateLimits

    def take(
        self, tenant: str, quota: Quota, tokens: int, then: Callable[[Grant | LimitRefusal], None]
    ) -> None:
        """See RateLimits. The answer may wait for one of the home cell, for at most the time after which the
        cell counts as apart from it."""
        if quota.tokens_per_min is not None and tokens > quota.tokens_per_min:
            raise ValueError(f"{tokens} tokens exceed the limit of {quota.tokens_per_min} a minute")
        if self._store is not None and self._homes.get(tenant) == self._own and not quota.uncounted:
            self._store.take(tenant, quota, tokens, then)
        else:
            self._decide(_Call(tenant, quota, tokens, then))

    def settle(self, grant: Grant, tokens: int) -> None:
        """See RateLimits."""
        if (store := self._store_of(grant)) is not None:
            store.settle(grant, tokens)
            return
        self._give_back(grant, 0, grant.tokens - tokens)
        self._end(grant)

    def release(self, grant: Grant) -> None:
        """See RateLimits."""
        if (store := self._store_of(grant)) is not None:
            store.release(grant)
            return
        self._give_back(grant, 1, grant.tokens)
        self._end(grant)

    async def run(self) -> None:
        """Return at once: `tick` does what is due."""

    # -- cells

    def tick(self) -> None:
        """Ask for what recent use needs, and decide again on what waits."""
        now = self._clock.now()
        self._asked.clear()
        for key, limit in self._limits.items():
            if limit.allotted is not None:
                self._send(key, limit.allotted, now)
        for tenant, slots in self._slots.items():
            if isinstance(slots, CellSlots):
                self._ask_slots(tenant, slots, now)
        waiting, self._waiting = self._waiting, {}
        for call in [call for calls in waiting.values() for call in calls]:
            self._decide(call)

    def allot(self, cell: str, asked: LimitAsk, then: Callable[[LimitAllotted], None]) -> None:
        """Answer another cell; not if this is not the home cell of such a limit, or if the store does not."""
        tenant, name, ask = asked.tenant, asked.limit, asked.ask
        limit, now = self._limits.get((tenant, name)), self._clock.now()
        if limit is None or limit.at_home is None or not _asks_for(cell, ask.cell):
            return
        home = limit.at_home
        if self._store is None:
            then(LimitAllotted(tenant, name, home.allot(ask, now)))
            return

        def given(amount: float) -> None:
            home.given(ask, amount, self._clock.now())
            then(LimitAllotted(tenant, name, Allotment(ask.number, amount)))

        wanted, returned = home.asked(ask, now)
        self._store.allot(tenant, name, limit.per_min, wanted=wanted, returned=returned, then=given)

    def answered(self, cell: str, answer: LimitAllotted) -> None:
        """Take an allotment from another cell."""
        limit = self._limits.get((answer.tenant, answer.limit))
        if limit is None or limit.allotted is None or self._homes[answer.tenant] != cell:
            return
        limit.allotted.answered(answer.allotment, self._clock.now())
        key = (answer.tenant, answer.limit)
        self._asked.discard(key)
        for call in self._waiting.pop(key, ()):
            self._decide(call, answered=key)

    def grant(self, cell: str, asked: TenantSlotAsk, then: Callable[[TenantSlots], None]) -> None:
        """Answer another cell with its slots; not if this is not the home cell of such a limit, or if the
        store does not."""
        tenant, ask, now = asked.tenant, asked.ask, self._clock.now()
        slots, most = self._slots.get(tenant), self._quotas.get(tenant, Quota()).concurrency
        if not isinstance(slots, HomeSlots) or most is None or not _asks_for(cell, ask.cell):
            return
        if self._store is None:
            if (found := slots.grant(ask, now)) is not None:
                then(TenantSlots(tenant, found))
        elif slots.asked(ask, now):
            self._store.lend(
                tenant,
                most,
                ask.cell,
                wanted=ask.wanted,
                running=ask.running,
                then=lambda lent: then(TenantSlots(tenant, SlotGrant(ask.number, lent))),
            )

    def granted(self, cell: str, answer: TenantSlots) -> None:
        """Take the slots that another cell gives."""
        slots, now = self._slots.get(answer.tenant), self._clock.now()
        if not isinstance(slots, CellSlots) or self._homes[answer.tenant] != cell:
            return
        slots.answered(answer.grant, now)
        key: _Key = (answer.tenant, "concurrency")
        # One ask is for all that go on to wait.
        self._asked.add(key)
        for call in self._waiting.pop(key, ()):
            self._decide(call)
        self._asked.discard(key)
        if self._waiting.get(key):
            self._ask_slots(answer.tenant, slots, now)

    # -- inside

    def _decide(self, call: _Call, answered: _Key | None = None) -> None:
        """Decide on a call, or have it wait. It is refused if the limit `answered` has nothing for it."""
        now, taken = self._clock.now(), list[tuple[_Limit, float]]()
        if self._store is not None and not call.quota.uncounted and self._apart(call.tenant, now):
            self._take_part(self._store, call)
            return
        for name, amount in _amounts(call.quota, 1, call.tokens):
            limit = self._limits[call.tenant, name]
            admitted = limit.take(amount, now)
            if admitted is Admitted.YES:
                taken.append((limit, amount))
                continue
            _undo(taken, now)
            if admitted is Admitted.ASK and answered != (call.tenant, name) and self._may_wait():
                self._wait(call, (call.tenant, name))
                if limit.allotted is not None and (call.tenant, name) not in self._asked:
                    self._send((call.tenant, name), limit.allotted, now)
            else:
                wait_s = min(WINDOW_S, max(1.0, amount * WINDOW_S / limit.per_min))
                call.then(LimitRefusal(name, wait_s, BucketLevels()))
            return
        if call.quota.concurrency is None or self._slot(call, now, taken):
            call.then(Grant(call.tenant, call.quota, call.tokens, BucketLevels()))

    def _apart(self, tenant: str, now: float) -> bool:
        """Whether the home cell of a tenant does not answer."""
        slots = self._slots.get(tenant)
        if isinstance(slots, CellSlots) and slots.apart(now):
            return True
        limits = [self._limits.get((tenant, "requests")), self._limits.get((tenant, "tokens"))]
        return any(
            each is not None and each.allotted is not None and each.allotted.apart(now) for each in limits
        )

    def _take_part(self, store: RateLimits, call: _Call) -> None:
        """Have the routers of this cell together use its equal part of the limits."""
        part = self._parts[call.tenant]
        if part.tokens_per_min is not None and call.tokens > part.tokens_per_min:
            call.then(LimitRefusal("tokens", WINDOW_S, BucketLevels()))
        else:
            store.take(call.tenant, part, call.tokens, call.then)

    def _store_of(self, grant: Grant) -> RateLimits | None:
        """Return the store if it counted a grant: those of an equal part have that object as their quota."""
        here = self._homes.get(grant.tenant) == self._own and not grant.quota.uncounted
        return self._store if here or grant.quota is self._parts.get(grant.tenant) else None

    def _slot(self, call: _Call, now: float, taken: Sequence[tuple[_Limit, float]]) -> bool:
        """Take a slot for a call, else undo what was taken, and refuse it or have it wait."""
        slots = self._slots[call.tenant]
        admitted = slots.take(now)
        if admitted is Admitted.YES:
            return True
        _undo(taken, now)
        key: _Key = (call.tenant, "concurrency")
        if admitted is Admitted.ASK and self._may_wait():
            self._wait(call, key)
            if isinstance(slots, CellSlots) and key not in self._asked:
                self._ask_slots(call.tenant, slots, now)
        else:
            call.then(LimitRefusal("concurrency", KEPT_S, BucketLevels()))
        return False

    def _may_wait(self) -> bool:
        return sum(map(len, self._waiting.values())) < MAX_WAITING

    def _wait(self, call: _Call, key: _Key) -> None:
        self._waiting.setdefault(key, deque()).append(call)

    def _end(self, grant: Grant) -> None:
        if grant.quota.concurrency is not None:
            self._slots[grant.tenant].end()

    def _give_back(self, grant: Grant, requests: int, tokens: int) -> None:
        now = self._clock.now()
        for name, amount in _amounts(grant.quota, requests, tokens):
            if amount:
                self._limits[grant.tenant, name].give_back(amount, now)

    def _send(self, key: tuple[str, PerMinute], limit: AllottedLimit, now: float) -> None:
        tenant, name = key
        if self._ask(self._homes[tenant], LimitAsk(tenant, name, limit.ask(now))):
            self._asked.add(key)

    def _ask_slots(self, tenant: str, slots: CellSlots, now: float) -> None:
        waiting = len(self._waiting.get((tenant, "concurrency"), ()))
        if self._ask(self._homes[tenant], TenantSlotAsk(tenant, slots.ask(waiting, now))):
            self._asked.add((tenant, "concurrency"))


def home_of(tenant: str, cells: Collection[str]) -> str:
    """Return the cell that has the buckets of a tenant: the same for every order of the cells, and for most
    tenants also with one cell more (rendezvous hashing, Thaler and Ravishankar, 1998)."""
    return max(cells, key=lambda cell: (blake2b(f"{cell}\n{tenant}".encode()).digest(), cell))


def _asks_for(cell: str, name: str) -> bool:
    """Whether a cell may ask by that name: its own, or that of one of its routers."""
    return name == cell or name.startswith(f"{cell}/")


def _part(quota: Quota, cells: int) -> Quota:
    """Return the equal part of limits that falls to each cell."""

    def part(most: int | None) -> int | None:
        return None if most is None else part_of(most, cells)

    return Quota(part(quota.requests_per_min), part(quota.tokens_per_min), part(quota.concurrency))


def _amounts(quota: Quota, requests: int, tokens: int) -> list[tuple[PerMinute, int]]:
    """Return what is charged to each limit of a quota."""
    charged: list[tuple[PerMinute, int]] = []
    if quota.requests_per_min is not None:
        charged.append(("requests", requests))
    if quota.tokens_per_min is not None:
        charged.append(("tokens", tokens))
    return charged


def _per_min(quota: Quota) -> list[tuple[PerMinute, int]]:
    """Return the limits per minute of a quota."""
    limits: list[tuple[PerMinute, int | None]] = [
        ("requests", quota.requests_per_min),
        ("tokens", quota.tokens_per_min),
    ]
    return [(name, per_min) for name, per_min in limits if per_min is not None]


def _undo(taken: Iterable[tuple[_Limit, float]], now: float) -> None:
    for limit, amount in taken:
        limit.give_back(amount, now)
