"""Rows for tools that read bills: the columns of FOCUS, and the costs and periods of a statement in them."""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import pytest

from kvasir.ports.stores.costs import CostGroup, CostRecords, WorkerHour, WorkSums
from kvasir_platform.cli.cost.focus import BY, focus_csv, focus_rows
from kvasir_platform.gateway.costs.statement import statement

MANDATORY = {
    "BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency", "BillingPeriodEnd",
    "BillingPeriodStart", "ChargeCategory", "ChargeDescription", "ChargePeriodEnd", "ChargePeriodStart",
    "ContractedCost", "EffectiveCost", "InvoiceIssuerName", "ListCost", "PricingQuantity", "PricingUnit",
    "ProviderName", "PublisherName", "ServiceCategory", "ServiceName",
}  # fmt: skip
"""Columns that FOCUS 1.2 asks of every row, and that have a value in each of usage."""
NULL = {
    "AvailabilityZone", "ChargeClass", "CommitmentDiscountCategory", "CommitmentDiscountId",
    "CommitmentDiscountName", "CommitmentDiscountStatus", "CommitmentDiscountType", "RegionId", "RegionName",
}  # fmt: skip
"""Mandatory or asked for by validators, and null: ChargeClass where nothing is corrected."""
CONDITIONAL = {
    "ChargeFrequency", "ConsumedQuantity", "ConsumedUnit", "ContractedUnitPrice", "ListUnitPrice",
    "PricingCategory", "ResourceId", "ResourceName", "ResourceType", "ServiceSubcategory", "SkuId",
    "SkuPriceId", "SubAccountId", "SubAccountName", "Tags",
}  # fmt: skip
OWN = {
    "x_ApiKey", "x_CachedTokens", "x_DecodeSeconds", "x_Kind", "x_KvSeconds", "x_Model", "x_OutputTokens",
    "x_PrefillSeconds", "x_PromptTokens", "x_Requests", "x_SloClass", "x_TransferSeconds",
}  # fmt: skip


def line(day: str = "2030-05-17", **fields: Any) -> dict[str, Any]:
    names = {"day": day, "tenant": "acme", "key": "k", "model": "m", "slo": "chat", "pool": "decode"}
    made = {
        "kind": "usage", "names": names, "requests": 3, "prompt_tokens": 30, "cached_tokens": 10,
        "output_tokens": 12, "prefill_s": 600.0, "decode_s": 1200.0, "kv_s": 0.0, "transfer_s": 0.0,
        "seconds": 1800.0, "cost": 2.5,
    }  # fmt: skip
    return made | fields


def rows(*lines: dict[str, Any]) -> list[dict[str, Any]]:
    return list(focus_rows({"lines": lines, "currency": "EUR"}, "chat"))


def test_a_row_has_the_columns_of_focus_and_its_own_and_no_others() -> None:
    (row,) = rows(line())
    assert row.keys() == MANDATORY | NULL | CONDITIONAL | OWN
    assert {name for name, value in row.items() if value is None} == NULL
    assert all(isinstance(row[name], str | float) for name in MANDATORY)


def test_a_table_has_the_same_columns_in_order_with_and_without_rows() -> None:
    full, empty = (csv.reader(io.StringIO(focus_csv(each))) for each in (rows(line()), []))
    head = next(full)
    assert head == next(empty)
    assert set(head) == MANDATORY | NULL | CONDITIONAL | OWN
    standard = sorted(MANDATORY | NULL | CONDITIONAL)
    assert head == [*standard, *sorted(OWN)]
    (fields,) = full
    assert {name for name, value in zip(head, fields, strict=True) if not value} == NULL


@pytest.mark.parametrize(
    ("day", "next_day", "begins", "ends"),
    [
        ("2030-05-17", "2030-05-18", "2030-05-01", "2030-06-01"),
        ("2030-01-31", "2030-02-01", "2030-01-01", "2030-02-01"),
        ("2030-02-01", "2030-02-02", "2030-02-01", "2030-03-01"),
        ("2028-02-29", "2028-03-01", "2028-02-01", "2028-03-01"),
        ("2030-12-31", "2031-01-01", "2030-12-01", "2031-01-01"),
    ],
)
def test_a_row_is_of_its_day_and_of_the_month_in_which_it_is(
    day: str, next_day: str, begins: str, ends: str
) -> None:
    (row,) = rows(line(day))
    assert (row["ChargePeriodStart"], row["ChargePeriodEnd"]) == (f"{day}T00:00:00Z", f"{next_day}T00:00:00Z")
    assert (row["BillingPeriodStart"], row["BillingPeriodEnd"]) == (
        f"{begins}T00:00:00Z",
        f"{ends}T00:00:00Z",
    )


def test_quantities_are_hours_and_prices_are_of_an_hour() -> None:
    (row,) = rows(line())
    assert (row["PricingQuantity"], row["ConsumedQuantity"], row["PricingUnit"]) == (0.5, 0.5, "Hours")
    assert row["ListUnitPrice"] == row["ContractedUnitPrice"] == 5.0
    assert row["BilledCost"] == row["EffectiveCost"] == row["ListCost"] == row["ContractedCost"] == 2.5
    (nothing,) = rows(line(seconds=0.0, cost=0.0))
    assert (nothing["PricingQuantity"], nothing["ListUnitPrice"]) == (0.0, 0.0)


def test_costs_add_up_to_the_statement_and_are_billed_in_the_month_of_their_hour() -> None:
    first = int(datetime(2030, 1, 31, 23, tzinfo=UTC).timestamp())
    work = {
        CostGroup(hour, "decode", tenant, "k", "m", "chat"): WorkSums(1, 10, 0, 4, decode=busy, wasted=wasted)
        for hour, tenant, busy, wasted in (
            (first, "acme", 600.0, 0.0), (first, "lab", 300.0, 100.0), (first + 3600, "acme", 900.0, 0.0)
        )
    }  # fmt: skip
    hours = [
        WorkerHour(at, "decode", "d-0", "r", 0.0, 3600.0, busy, 1.0, 4.0)
        for at, busy in ((first, 900.0), (first + 3600, 900.0))
    ]
    made = statement(CostRecords(work, hours), BY)
    found = rows(*(asdict(each) for each in made.lines))
    assert made.cost == pytest.approx(8.0)
    assert sum(row["BilledCost"] for row in found) == pytest.approx(made.cost)
    assert sum(row["PricingQuantity"] for row in found) == pytest.approx(2.0)
    assert {row["x_Kind"] for row in found} == {"usage", "wasted", "idle"}
    for month in ("2030-01-01", "2030-02-01"):
        billed = [row["BilledCost"] for row in found if row["BillingPeriodStart"].startswith(month)]
        assert sum(billed) == pytest.approx(4.0), month


def test_time_that_nobody_is_charged_for_is_of_no_tenant() -> None:
    names = dict.fromkeys(BY, "") | {"day": "2030-05-17", "pool": "decode"}
    (row,) = rows(line(kind="idle", names=names))
    assert [
        row[name] for name in ("SubAccountId", "SubAccountName", "x_ApiKey", "x_Model", "x_SloClass")
    ] == ([None] * 5)
    assert row["ChargeDescription"] == "Time of workers without requests, pool decode"
    assert row["x_Kind"] == "idle"
