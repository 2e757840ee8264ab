"""Rate limits of tenants that all cells share: `kvasir.ports.limits.RateLimits` over several cells.

Requests and tokens a minute of a tenant have one bucket, in the tenant's home cell, which all cells compute
alike from the names; the others spend allotments of it (`kvasir_router.regions.limits`, which states the
bound on what the cells together admit beyond the limit). Concurrency and budgets are each cell's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol

import msgspec

from kvasir.ports.clock import Clock
from kvasir.ports.limits import WINDOW_S, BucketLevels, Grant, LimitRefusal, Quota, RateLimits
from kvasir_router.regions.limits import Admitted, Allotment, AllotmentAsk, AllottedLimit, HomeLimit

Counted = Literal["requests", "tokens"]
MAX_WAITING = 1024
"""Calls that wait for an allotment. Others are refused."""


class LimitAsk(msgspec.Struct, frozen=True, array_like=True):
    """What a cell asks of the home cell of a tenant's limit."""

    tenant: str
    limit: Counted
    ask: AllotmentAsk


class LimitAllotted(msgspec.Struct, frozen=True, array_like=True):
    """The answer."""

    tenant: str
    limit: Counted
    allotment: Allotment


class AskCell(Protocol):
    """Sends an ask to another cell; False if there is no link to it."""

    def __call__(self, cell: str, ask: LimitAsk) -> bool: ...


class _Call(NamedTuple):
    tenant: str
    quota: Quota
    tokens: int
    then: Callable[[Grant | LimitRefusal], None]


_Key = tuple[str, Counted]
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
    """`RateLimits` over `inner`, which keeps concurrency. `cells` are the names of all cells, `own` is this
    one's; `quotas` has requests and tokens a minute of the tenants that have limits, and `ask` sends to other
    cells. `epoch` grows with each start of the process. Call `tick` once a second."""

    def __init__(
        self,
        own: str,
        cells: Collection[str],
        quotas: Mapping[str, Mapping[Counted, int]],
        clock: Clock,
        *,
        ask: AskCell,
        epoch: int,
    ) -> None:
        self.inner: RateLimits | None = None
        self._own = own
        self._clock = clock
        self._ask = ask
        self._homes = {tenant: home_of(tenant, cells) for tenant in quotas}
        now = clock.now()
        self._limits: dict[_Key, _Limit] = {}
        for tenant, quota in quotas.items():
            here = self._homes[tenant] == own
            for name, per_min in quota.items():
                self._limits[tenant, name] = _Limit(
                    HomeLimit(per_min, now) if here else None,
                    None if here else AllottedLimit(own, per_min, len(cells), now, after=epoch),
                    per_min,
                )
        self._waiting: dict[_Key, deque[_Call]] = {}
        self._asked: set[_Key] = set()

    def over(self, inner: RateLimits) -> RateLimits:
        """Return these limits over `inner`, the limits of one cell; `inner` itself if no tenant has any."""
        if not self._limits:
            return inner
        self.inner = inner
        return self

    # -- RateLimits

    def take(
        self, tenant: str, quota: Quota, tokens: int, then: Callable[[Grant | LimitRefusal], None]
    ) -> None:
        """See RateLimits. The answer may wait for one of the home cell, for at most the time after which the
        cell counts as apart from it."""
        if quota.tokens_per_min is not None and tokens > quota.tokens_per_min:
            raise ValueError(f"{tokens} tokens exceed the limit of {quota.tokens_per_min} a minute")
        self._decide(_Call(tenant, quota, tokens, then))

    def settle(self, grant: Grant, tokens: int) -> None:
        """See RateLimits."""
        self._give_back(grant, 0, grant.tokens - tokens)
        self._within.settle(_uncounted(grant), tokens)

    def release(self, grant: Grant) -> None:
        """See RateLimits."""
        self._give_back(grant, 1, grant.tokens)
        self._within.release(_uncounted(grant))

    async def run(self) -> None:
        """See RateLimits."""
        await self._within.run()

    # -- cells

    def tick(self) -> None:
        """Ask for what recent use needs, and decide again on what waits."""
        now = self._clock.now()
        self._asked.clear()
        for key, limit in self._limits.items():
            if limit.allotted is not None:
                self._send(key, limit.allotted, now)
        waiting, self._waiting = self._waiting, {}
        for call in [call for calls in waiting.values() for call in calls]:
            self._decide(call)

    def allot(self, cell: str, asked: LimitAsk) -> LimitAllotted | None:
        """Return the answer to another cell; None if this is not the home cell of such a limit."""
        limit = self._limits.get((asked.tenant, asked.limit))
        if limit is None or limit.at_home is None or asked.ask.cell != cell:
            return None
        return LimitAllotted(asked.tenant, asked.limit, limit.at_home.allot(asked.ask, self._clock.now()))

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

    # -- inside

    @property
    def _within(self) -> RateLimits:
        if self.inner is None:
            raise AssertionError("limits of cells need those of one")
        return self.inner

    def _decide(self, call: _Call, answered: _Key | None = None) -> None:
        """Decide on a call, or have it wait. It is refused if the limit `answered` has nothing for it."""
        now, taken = self._clock.now(), list[tuple[_Limit, float]]()
        for name, amount in _amounts(call.quota, 1, call.tokens):
            limit = self._limits[call.tenant, name]
            admitted = limit.take(amount, now)
            if admitted is Admitted.YES:
                taken.append((limit, amount))
                continue
            for each, back in taken:
                each.give_back(back, now)
            if admitted is Admitted.ASK and answered != (call.tenant, name) and self._may_wait():
                self._wait(call, (call.tenant, name), limit, now)
            else:
                wait_s = min(WINDOW_S, max(1.0, amount * WINDOW_S / limit.per_min))
                call.then(LimitRefusal(name, wait_s, BucketLevels()))
            return
        self._concurrency(call)

    def _may_wait(self) -> bool:
        return sum(map(len, self._waiting.values())) < MAX_WAITING

    def _wait(self, call: _Call, key: _Key, limit: _Limit, now: float) -> None:
        self._waiting.setdefault(key, deque()).append(call)
        if limit.allotted is not None and key not in self._asked:
            self._send(key, limit.allotted, now)

    def _concurrency(self, call: _Call) -> None:
        quota = call.quota

        def then(verdict: Grant | LimitRefusal) -> None:
            if isinstance(verdict, LimitRefusal):
                self._give_back(Grant(call.tenant, quota, call.tokens, verdict.levels), 1, call.tokens)
                call.then(verdict)
            else:
                call.then(verdict._replace(quota=quota))

        self._within.take(call.tenant, _without_counts(quota), call.tokens, then)

    def _give_back(self, grant: Grant, requests: int, tokens: int) -> None:
        now = self._clock.now()
        for name, amount in _amounts(grant.quota, requests, tokens):
            if amount:
                self._limits[grant.tenant, name].give_back(amount, now)

    def _send(self, key: _Key, limit: AllottedLimit, now: float) -> None:
        tenant, name = key
        if self._ask(self._homes[tenant], LimitAsk(tenant, name, limit.ask(now))):
            self._asked.add(key)


def home_of(tenant: str, cells: Collection[str]) -> str:
    """Return the cell that has the buckets of a tenant: the same for every order of the cells, and for most
    tenants also with one cell more (rendezvous hashing, Thaler and Ravishankar, 1998)."""
    return max(cells, key=lambda cell: (blake2b(f"{cell}\n{tenant}".encode()).digest(), cell))


def _amounts(quota: Quota, requests: int, tokens: int) -> list[tuple[Counted, int]]:
    """Return what is charged to each limit of a quota."""
    charged: list[tuple[Counted, int]] = []
    if quota.requests_per_min is not None:
        charged.append(("requests", requests))
    if quota.tokens_per_min is not None:
        charged.append(("tokens", tokens))
    return charged


def _without_counts(quota: Quota) -> Quota:
    return Quota(concurrency=quota.concurrency, budget=quota.budget)


def _uncounted(grant: Grant) -> Grant:
    return grant._replace(quota=_without_counts(grant.quota))
