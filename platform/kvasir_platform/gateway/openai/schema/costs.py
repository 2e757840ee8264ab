"""Bodies of the operators' endpoint about costs."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

CostDimension = Literal["day", "hour", "tenant", "key", "model", "slo", "pool"]
ViewedDimension = Literal["tenant", "key", "model", "slo", "pool"]
ViewedDays = Literal[1, 7, 30, 90]


class CostsAsked(Struct, forbid_unknown_fields=True):
    """A question for costs: of the hours from `since` to `until` in Unix seconds, with a line for each
    combination of the dimensions `by`. By default the last seven days, by tenant."""

    since: float | None = None
    until: float | None = None
    by: tuple[CostDimension, ...] = ("tenant",)


class CostsViewed(Struct, frozen=True, forbid_unknown_fields=True):
    """What the console shows: costs of the last `days`, as far as they are kept, by day and by `by`."""

    by: ViewedDimension = "tenant"
    days: ViewedDays = 7


class CostsLine(Struct):
    """One line. `kind` is usage, wasted (work that nobody is charged for) or idle. `names` has the
    dimensions. `seconds` are of a GPU, or of a worker of a pool without GPUs; those of phases add up to them
    in lines of usage."""

    kind: str
    names: dict[str, str]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    prefill_s: float
    decode_s: float
    kv_s: float
    transfer_s: float
    seconds: float
    cost: float


class BudgetShown(Struct):
    """What a tenant has spent of its budget in the current period; null for a bound that it does not have."""

    tenant: str
    period: str
    spent: float
    soft: float | None
    hard: float | None
    renews: float
    """Unix time of the renewal."""


class CostsPage(Struct):
    """Costs. All lines add up to `device_seconds` and `cost`; `gpu_hours` are those of GPUs only. `unpriced`
    are pools with GPUs of which no price is known; `stored` says whether the last write succeeded, and
    `counted` whether costs are counted at all."""

    currency: str
    since: int
    until: int
    by: list[str]
    lines: list[CostsLine]
    device_seconds: float
    gpu_hours: float
    cost: float
    budgets: list[BudgetShown]
    unpriced: list[str]
    stored: bool
    counted: bool = True
