"""Budgets of tenants: what each has cost in this period, and whether it may go on.

A router reads the costs of all routers of its deployment every few seconds, and hears what tenants have cost
in other cells. A tenant can therefore exceed its hard budget by what it uses in that time, and by its
requests that run: they are charged when they end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Protocol

from kvasir.config.spec.tenants import BudgetSpec, TenantSpec
from kvasir.ports.limits import BucketLevels, Grant, LimitRefusal, Quota, RateLimits, SharedRateLimits
from kvasir.ports.stores.costs import HOUR_S

_log = logging.getLogger(__name__)

OPEN_HOURS = 3
"""Hours whose costs can still change: requests that end are charged in the hours in which they ran."""


@dataclass(frozen=True, slots=True)
class BudgetPeriod:
    """A calendar day or month in UTC, in Unix seconds. `name` is as in 2030-01 or 2030-01-31."""

    name: str
    begin_s: int
    end_s: int

    @classmethod
    def at(cls, period: str, now_s: float) -> BudgetPeriod:
        """Return the `day` or `month` of a moment."""
        moment = datetime.fromtimestamp(now_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        if period == "day":
            end, name = moment + timedelta(days=1), moment.strftime("%Y-%m-%d")
        else:
            moment = moment.replace(day=1)
            end, name = (moment + timedelta(days=32)).replace(day=1), moment.strftime("%Y-%m")
        return cls(name, int(moment.timestamp()), int(end.timestamp()))


class Spending:
    """What each tenant has cost by hour, from the begin of this month. Hours that cannot change any more are
    kept as one sum for each day."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._hours: dict[int, Mapping[str, float]] = {}
        self._days: dict[int, dict[str, float]] = {}
        self._from: int | None = None

    def since(self) -> int:
        """Return the first hour that has to be read."""
        return BudgetPeriod.at("month", self._wall()).begin_s if self._from is None else self._from

    def update(self, by_hour: Mapping[int, Mapping[str, float]]) -> None:
        """Replace the costs of all hours from `since` on."""
        self._hours = dict(by_hour)
        open_from = int(self._wall() // HOUR_S - OPEN_HOURS) * HOUR_S
        for hour in [hour for hour in self._hours if hour < open_from]:
            day = self._days.setdefault(BudgetPeriod.at("day", hour).begin_s, {})
            for tenant, cost in self._hours.pop(hour).items():
                day[tenant] = day.get(tenant, 0.0) + cost
        self._from = max(open_from, self.since())
        month = BudgetPeriod.at("month", self._wall()).begin_s
        self._days = {day: costs for day, costs in self._days.items() if day >= month}

    def of(self, tenant: str, period: BudgetPeriod) -> float:
        """Return what a tenant has cost in a period of this month."""
        parts = (*self._days.items(), *self._hours.items())
        return sum(costs.get(tenant, 0.0) for begin, costs in parts if period.begin_s <= begin < period.end_s)

    def tenants(self) -> set[str]:
        """Return all tenants that have cost something."""
        return {tenant for costs in (*self._days.values(), *self._hours.values()) for tenant in costs}


@dataclass(frozen=True, slots=True)
class OtherCellsSpent:
    """What a tenant has spent in other cells. `assumed` of it is what cells that are not heard, `silent`, may
    have spent since they were."""

    amount: float = 0.0
    assumed: float = 0.0
    silent: tuple[str, ...] = ()


class OtherCells(Protocol):
    """What tenants have spent in other cells."""

    def spent(self, tenant: str, period: str) -> OtherCellsSpent: ...


@dataclass(frozen=True, slots=True)
class BudgetState:
    """What a tenant has spent of its budget in a period, in all cells and of that in others."""

    tenant: str
    budget: BudgetSpec
    period: BudgetPeriod
    spent: float
    currency: str
    other_cells: OtherCellsSpent = field(default_factory=OtherCellsSpent)

    @property
    def bounds(self) -> dict[str, float]:
        """The bounds that are set, by name."""
        both = {"soft": self.budget.soft, "hard": self.budget.hard}
        return {name: bound for name, bound in both.items() if bound is not None}

    @property
    def over_soft(self) -> bool:
        """Whether the soft budget is reached."""
        return self.budget.soft is not None and self.spent >= self.budget.soft

    @property
    def over_hard(self) -> bool:
        """Whether the hard budget is reached."""
        return self.budget.hard is not None and self.spent >= self.budget.hard

    @property
    def text(self) -> str:
        """The state for people and for the header, in ASCII."""
        of = ", ".join(f"{name} {bound:.2f}" for name, bound in self.bounds.items())
        renewed = datetime.fromtimestamp(self.period.end_s, UTC).strftime("%Y-%m-%dT%H:%MZ")
        spent = f"{self.currency} {self.spent:.2f} spent in {self.period.name}{self._where}"
        return f"{spent} of {of}; renewed {renewed}"

    @property
    def _where(self) -> str:
        other = self.other_cells
        if not other.amount:
            return ""
        assumed = f", {other.assumed:.2f} assumed of {', '.join(other.silent)} (not heard)"
        return f" ({other.amount:.2f} in other cells{assumed if other.assumed else ''})"


class Budgets:
    """The budgets of all tenants that have one. States are computed by `refresh` and `recount`, not for each
    request. Set `other_cells` if there are other cells."""

    def __init__(self, tenants: Iterable[TenantSpec], currency: str, wall: Callable[[], float]) -> None:
        self._specs = {tenant.name: tenant.budget for tenant in tenants if tenant.budget is not None}
        self._currency = currency
        self._wall = wall
        self._states: dict[str, BudgetState] = {}
        now = wall()
        # What other cells have spent counts also before this one could read its own costs.
        self._here = {name: (BudgetPeriod.at(spec.period, now), 0.0) for name, spec in self._specs.items()}
        self.other_cells: OtherCells | None = None
        self._warned: set[tuple[str, str, str]] = set()

    @property
    def currency(self) -> str:
        """The currency of all amounts."""
        return self._currency

    def here(self) -> dict[tuple[str, str], float]:
        """Return what each tenant with a budget has spent in this deployment, by tenant and period."""
        return {(tenant, period.name): spent for tenant, (period, spent) in self._here.items()}

    def refresh(self, spending: Spending) -> None:
        """Take what was spent in this deployment, and compute all states."""
        now = self._wall()
        for tenant, spec in self._specs.items():
            period = BudgetPeriod.at(spec.period, now)
            self._here[tenant] = period, spending.of(tenant, period)
        self.recount()

    def recount(self) -> None:
        """Compute all states, and log each bound that a tenant has reached, once in each period."""
        warned = set()
        for tenant, (period, here) in self._here.items():
            other = (
                OtherCellsSpent() if self.other_cells is None else self.other_cells.spent(tenant, period.name)
            )
            spent = here + other.amount
            state = BudgetState(tenant, self._specs[tenant], period, spent, self._currency, other)
            self._states[tenant] = state
            for bound, reached in (("soft", state.over_soft), ("hard", state.over_hard)):
                mark = (tenant, bound, period.name)
                if reached:
                    warned.add(mark)
                    if mark not in self._warned:
                        _log.warning("a tenant has reached its %s budget", bound, extra=_logged(state))
        self._warned = warned

    def states(self) -> list[BudgetState]:
        """Return the states, by tenant."""
        return [self._states[tenant] for tenant in sorted(self._states)]

    def reached(self, tenant: str) -> BudgetState | None:
        """Return the state of a tenant that has reached a bound in this period, else None."""
        state = self._states.get(tenant)
        if state is None or not (state.over_soft or state.over_hard) or self._wall() >= state.period.end_s:
            return None
        return state

    def renewed_in_s(self, state: BudgetState) -> float:
        """Return the seconds until the budget is renewed."""
        return max(0.0, state.period.end_s - self._wall())


class BudgetLimits:
    """`kvasir.ports.limits.RateLimits`: those of `inner`, for tenants within their budgets."""

    def __init__(self, inner: RateLimits, budgets: Budgets) -> None:
        self._inner = inner
        self._budgets = budgets

    def take(
        self, tenant: str, quota: Quota, tokens: int, then: Callable[[Grant | LimitRefusal], None]
    ) -> None:
        """See the port. A tenant whose hard budget is spent is refused until it is renewed."""
        state = self._budgets.reached(tenant) if quota.budget else None
        if state is not None and state.over_hard:
            wait_s = self._budgets.renewed_in_s(state)
            then(LimitRefusal("budget", wait_s, BucketLevels(), state.text))
            return
        note = "" if state is None else state.text
        if quota.uncounted:
            then(Grant(tenant, quota, tokens, BucketLevels(), budget=note))
        elif note:
            self._inner.take(tenant, quota, tokens, lambda verdict: then(_noted(verdict, note)))
        else:
            self._inner.take(tenant, quota, tokens, then)

    def settle(self, grant: Grant, tokens: int) -> None:
        """See the port."""
        if not grant.quota.uncounted:
            self._inner.settle(grant, tokens)

    def release(self, grant: Grant) -> None:
        """See the port."""
        if not grant.quota.uncounted:
            self._inner.release(grant)

    async def run(self) -> None:
        """See the port."""
        await self._inner.run()


class SharedBudgetLimits(BudgetLimits):
    """The same for limits that several routers share."""

    def __init__(self, inner: SharedRateLimits, budgets: Budgets) -> None:
        super().__init__(inner, budgets)
        self._shared = inner

    @property
    def shared(self) -> bool:
        """See SharedRateLimits."""
        return self._shared.shared

    @property
    def local_decisions(self) -> int:
        """See SharedRateLimits."""
        return self._shared.local_decisions


def within_budgets(limits: RateLimits, budgets: Budgets | None) -> RateLimits:
    """Return the limits, which also keep budgets if there are any."""
    if budgets is None:
        return limits
    if isinstance(limits, SharedRateLimits):
        return SharedBudgetLimits(limits, budgets)
    return BudgetLimits(limits, budgets)


def _noted(verdict: Grant | LimitRefusal, note: str) -> Grant | LimitRefusal:
    return verdict._replace(budget=note) if isinstance(verdict, Grant) else verdict


def _logged(state: BudgetState) -> dict[str, object]:
    return {"tenant": state.tenant, "budget": state.text}
