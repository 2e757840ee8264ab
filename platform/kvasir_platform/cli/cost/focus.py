"""Rows with the columns of FOCUS, the FinOps Open Cost and Usage Specification, version 1.2.

Source: https://focus.finops.org/focus-specification/v1-2/. The rows have its mandatory columns, those of
version 1.0 that a validator asks for, and columns of our own, which begin with x_ as the specification asks.
Columns that need an invoice, a region or a commitment are null.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

BY = ("day", "tenant", "key", "model", "slo", "pool")
"""The dimensions of a row."""

_NULL = (
    "AvailabilityZone",
    "ChargeClass",
    "CommitmentDiscountCategory",
    "CommitmentDiscountId",
    "CommitmentDiscountName",
    "CommitmentDiscountStatus",
    "CommitmentDiscountType",
    "RegionId",
    "RegionName",
)
_TEXTS = {
    "usage": "Share of the time of workers",
    "wasted": "Work that nobody is charged for",
    "idle": "Time of workers without requests",
}


def focus_rows(page: Mapping[str, Any], deployment: str) -> Iterator[dict[str, Any]]:
    """Return a row for each line of a statement by the dimensions of BY. `deployment` is the billing
    account."""
    for line in page["lines"]:
        yield _row(line, page["currency"], deployment)


def focus_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as CSV, with the columns in order; null is an empty field."""
    out = io.StringIO()
    names = sorted(rows[0], key=_order) if rows else sorted(_row(_EMPTY, "USD", ""), key=_order)
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


_EMPTY: dict[str, Any] = {
    "kind": "usage",
    "names": {"day": "1970-01-01", "tenant": "", "key": "", "model": "", "slo": "", "pool": ""},
    "requests": 0,
    "prompt_tokens": 0,
    "cached_tokens": 0,
    "output_tokens": 0,
    "prefill_s": 0.0,
    "decode_s": 0.0,
    "kv_s": 0.0,
    "transfer_s": 0.0,
    "seconds": 0.0,
    "cost": 0.0,
}


def _order(name: str) -> tuple[bool, str]:
    """Columns by name, as in the specification; our own last."""
    return name.startswith("x_"), name


def _row(line: Mapping[str, Any], currency: str, deployment: str) -> dict[str, Any]:
    names, hours, cost = line["names"], line["seconds"] / 3600, line["cost"]
    day = datetime.strptime(names["day"], "%Y-%m-%d").replace(tzinfo=UTC)
    month = day.replace(day=1)
    price = cost / hours if hours else 0.0
    return {
        **dict.fromkeys(_NULL),
        "BilledCost": cost,
        "BillingAccountId": deployment,
        "BillingAccountName": deployment,
        "BillingCurrency": currency,
        "BillingPeriodEnd": _time((month + timedelta(days=32)).replace(day=1)),
        "BillingPeriodStart": _time(month),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{_TEXTS[line['kind']]}, pool {names['pool']}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodEnd": _time(day + timedelta(days=1)),
        "ChargePeriodStart": _time(day),
        "ConsumedQuantity": round(hours, 9),
        "ConsumedUnit": "Hours",
        "ContractedCost": cost,
        "ContractedUnitPrice": round(price, 9),
        "EffectiveCost": cost,
        "InvoiceIssuerName": deployment,
        "ListCost": cost,
        "ListUnitPrice": round(price, 9),
        "PricingCategory": "Standard",
        "PricingQuantity": round(hours, 9),
        "PricingUnit": "Hours",
        "ProviderName": "Kvasir",
        "PublisherName": "Kvasir",
        "ResourceId": f"{deployment}/{names['pool']}",
        "ResourceName": names["pool"],
        "ResourceType": "Worker pool",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Kvasir",
        "ServiceSubcategory": "Generative AI",
        "SkuId": names["pool"],
        "SkuPriceId": names["pool"],
        "SubAccountId": names["tenant"] or None,
        "SubAccountName": names["tenant"] or None,
        "Tags": "{}",
        "x_Kind": line["kind"],
        "x_ApiKey": names["key"] or None,
        "x_Model": names["model"] or None,
        "x_SloClass": names["slo"] or None,
        "x_Requests": line["requests"],
        "x_PromptTokens": line["prompt_tokens"],
        "x_CachedTokens": line["cached_tokens"],
        "x_OutputTokens": line["output_tokens"],
        "x_PrefillSeconds": line["prefill_s"],
        "x_DecodeSeconds": line["decode_s"],
        "x_KvSeconds": line["kv_s"],
        "x_TransferSeconds": line["transfer_s"],
    }


def _time(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")
