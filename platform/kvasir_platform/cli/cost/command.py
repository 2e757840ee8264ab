"""`kvasir cost`: asks a gateway for a statement of costs, and prints it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from kvasir_platform.cli.common.gateway_client import costs_of, status_of
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.common.output import CommandOutput, number, table
from kvasir_platform.cli.cost.arguments import CostArguments
from kvasir_platform.cli.cost.focus import BY, focus_csv, focus_rows

_HEAD = ("REQUESTS", "PROMPT", "CACHED", "OUTPUT", "PREFILL", "DECODE", "KV", "TRANSFER", "SECONDS")
_COUNTS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens")
_PHASES = ("prefill_s", "decode_s", "kv_s", "transfer_s")
_USAGE = "usage"


def cost(wanted: CostArguments, site: Site, output: CommandOutput) -> int:
    """Print what the command line asks for. Raises KvasirError."""
    by = BY if wanted.focus else wanted.by or ("tenant",)
    asked: dict[str, Any] = {"by": list(by)}
    asked |= {name: at for name, at in (("since", wanted.since), ("until", wanted.until)) if at is not None}
    page = costs_of(site, asked)
    if wanted.focus:
        rows = list(focus_rows(page, str(status_of(site).get("deployment", "kvasir"))))
        output.raw(focus_csv(rows) if wanted.focus == "csv" else json.dumps(rows, indent=1) + "\n")
        return 0
    output.data(page)
    output.text(statement_text(page))
    return 0


def statement_text(page: Mapping[str, Any]) -> str:
    """Return a statement as text."""
    currency, by = page["currency"], page["by"]
    rows = [[*_names(line, by), *_cells(line)] for line in page["lines"]]
    rows.append([*_total_names(len(by)), *[""] * 8, f"{page['device_seconds']:,.1f}", _amount(page["cost"])])
    head = [name.upper() for name in by] or ["LINE"]
    names = len(head)
    lines = [
        f"{_time(page['since'])} to {_time(page['until'])}, costs in {currency}",
        "",
        table([*head, *_HEAD, currency], rows, range(names, names + len(_HEAD) + 1)),
    ]
    if page["gpu_hours"]:
        lines += ["", f"GPU hours: {page['gpu_hours']:,.2f}"]
    if page["budgets"]:
        lines += ["", "Budgets:", *(f"  {_budget(each, currency)}" for each in page["budgets"])]
    for pool in page["unpriced"]:
        lines += ["", f"No price is known for the GPUs of pool {pool}: name its GPU in cost.prices."]
    if not page["stored"]:
        lines += [
            "",
            "The last write of costs failed: see the router's log. What is missing is kept until then.",
        ]
    return "\n".join(lines)


def _names(line: Mapping[str, Any], by: list[str]) -> list[str]:
    names = [line["names"].get(name) or "-" for name in by] or [line["kind"]]
    if line["kind"] != _USAGE and by:
        names[0] = f"({line['kind']})" if names[0] == "-" else f"{names[0]} ({line['kind']})"
    return names


def _total_names(count: int) -> list[str]:
    return ["total", *[""] * (count - 1)]


def _cells(line: Mapping[str, Any]) -> list[str]:
    used = line["kind"] == _USAGE
    counts = [number(line[name]) if used else "" for name in _COUNTS]
    phases = [f"{line[name]:,.1f}" if used else "" for name in _PHASES]
    return [*counts, *phases, f"{line['seconds']:,.1f}", _amount(line["cost"])]


def _amount(value: float) -> str:
    """Return an amount with at least two digits that say something."""
    return f"{value:,.4f}" if value >= 0.01 or not value else f"{value:.2g}"


def _budget(each: Mapping[str, Any], currency: str) -> str:
    bounds = [f"{name} {each[name]:,.2f}" for name in ("soft", "hard") if each[name] is not None]
    spent = f"{currency} {each['spent']:,.2f} in {each['period']}"
    return f"{each['tenant']}: {spent} of {', '.join(bounds)}; renewed {_time(each['renews'])}"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%MZ")
