"""From snapshots to the tables of `kvasir top`: pure.

A cell has its text and the value that it is sorted by. Columns stand in the order of their weight: where a
terminal is too narrow, those at the end are left out, but for the last, which takes what is left."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir.core.quantiles import quantile
from kvasir_platform.cli.common.output import milliseconds
from kvasir_platform.cli.common.tiers import tier_troubles, tiers_cell
from kvasir_platform.cli.top.snapshot import TenantCounts, TopSnapshot

Value = float | str


@dataclass(frozen=True, slots=True)
class TopCell:
    """A text, and what it is sorted by."""

    text: str
    value: Value


@dataclass(frozen=True, slots=True)
class TopTable:
    """A view. `numbers` are the columns that are aligned to the right and sorted from the largest."""

    title: str
    columns: tuple[str, ...]
    numbers: frozenset[str]
    rows: tuple[tuple[TopCell, ...], ...]
    order: str
    """The column that it is sorted by, unless another is chosen."""


@dataclass(frozen=True, slots=True)
class TopOrder:
    """How rows are chosen and sorted. `column` "": as the table says; rows need `text` in a cell."""

    column: str = ""
    reverse: bool = False
    text: str = ""


Before = TopSnapshot | None
"""The snapshot before, for rates; None: totals are shown."""
_NONE = "-"
_LEAST_LAST = 12
MOST_ALSO = 20
"""Further problems that are shown where lines are not scarce."""


def heading(snapshot: TopSnapshot, most: int = MOST_ALSO) -> tuple[str, str]:
    """Return the verdict, with a line for each further problem and the number of those beyond `most`, and a
    line with the deployment's figures."""
    status, requests = snapshot.status, snapshot.requests
    verdict = status.get("verdict") or {}
    ttfts = [each["ttft_s"] for each in requests["latest"] if each["ttft_s"] is not None]
    parts = [
        str(status.get("deployment", "?")),
        f"{requests['in_flight']:,} in flight",
        f"{requests['queued']:,} queued",
        f"{len(status['workers']):,} workers",
    ]
    if ttfts:
        parts.append(f"TTFT p50 {milliseconds(quantile(ttfts, 0.5))} of the last {len(ttfts)}")
    further = verdict.get("problems", [])[1:]
    also = [f"Also: {each['text']}" for each in further[:most]]
    if len(further) > most:
        also.append(f"{len(further) - most} more: kvasir status shows all.")
    return "\n".join([str(verdict.get("sentence", "")), *also]), ", ".join(parts)


def arranged(table: TopTable, order: TopOrder) -> list[tuple[TopCell, ...]]:
    """Return the rows of a table that match, sorted."""
    column = order.column if order.column in table.columns else table.order
    at = table.columns.index(column)
    wanted = order.text.lower()
    rows = [row for row in table.rows if not wanted or any(wanted in cell.text.lower() for cell in row)]
    down = (column in table.numbers) != order.reverse
    return sorted(rows, key=lambda row: _key(row[at]), reverse=down)


def _key(cell: TopCell) -> tuple[bool, float, str]:
    if isinstance(cell.value, str):
        return True, 0.0, cell.value
    return False, float(cell.value), ""


def workers(now: TopSnapshot, before: Before) -> TopTable:
    """One row for each worker."""
    known = {} if before is None else {each["worker_id"]: each for each in before.status["workers"]}
    shown = now.status["workers"]
    gpus = any((each.get("load") or {}).get("gpus") for each in shown)
    rows = tuple(_worker(each, known.get(each["worker_id"]), gpus=gpus) for each in shown)
    names = ("GPU", "GPU MEM") if gpus else ()
    columns = ("WORKER", "STATE", "RUN", "WAIT", "KV", "HIT", *names, "ROLE", "POOL", "TIERS", "REASON")
    return TopTable("workers", columns, frozenset({"RUN", "WAIT", "KV", "HIT", *names}), rows, "WORKER")


def _gpu_cells(gpus: list[dict[str, Any]]) -> tuple[TopCell, ...]:
    """How busy the GPUs of a worker are on average, their multiprocessors if the driver tells that, and how
    much of their memory is in use."""
    busy = [each["busy"] if each["sm_active"] is None else each["sm_active"] for each in gpus]
    total = sum(each["memory_total"] for each in gpus)
    return (
        _number(sum(busy) / len(busy) if busy else None, lambda value: f"{value:.0%}"),
        _number(
            sum(each["memory_used"] for each in gpus) / total if total else None, lambda value: f"{value:.0%}"
        ),
    )


def _worker(worker: dict[str, Any], before: dict[str, Any] | None, *, gpus: bool) -> tuple[TopCell, ...]:
    load, kv, health = (worker.get(part) or {} for part in ("load", "kv", "health"))
    earlier = (before or {}).get("load") or {}
    state = str(worker.get("state", "?"))
    if state == "ready" and health.get("state") not in (None, "healthy"):
        state = str(health["state"])
    reasons = [worker.get("reason"), health.get("reason"), kv.get("reason"), *tier_troubles(load)]
    looked_up = load.get("prefix_queries_tokens", 0) - earlier.get("prefix_queries_tokens", 0)
    found = load.get("prefix_hits_tokens", 0) - earlier.get("prefix_hits_tokens", 0)
    usage = load.get("kv_usage")
    return (
        _text(str(worker.get("worker_id", "?"))),
        _text(state),
        _number(load.get("running")),
        _number(load.get("waiting")),
        _number(usage, lambda value: f"{value:.0%}"),
        _number(found / looked_up if looked_up > 0 else None, lambda value: f"{value:.0%}"),
        *(_gpu_cells(load.get("gpus") or []) if gpus else ()),
        _text(str(worker.get("assigned") or worker.get("role") or _NONE)),
        _text(str(worker.get("pool", "?"))),
        _text(tiers_cell(load)),
        _text("; ".join(why for why in reasons if why)),
    )


def queues(now: TopSnapshot, before: Before) -> TopTable:
    """One row for each model."""
    rows = tuple(_queue(model, view) for model, view in now.status.get("queues", {}).items())
    columns = ("MODEL", "QUEUED", "PARKED", "WAIT", "PRESSURE", "TOKENS/S", "KV RESERVED", "BROWN-OUT")
    numbers = frozenset(columns[1:-1])
    return TopTable("queues", columns, numbers, rows, "QUEUED")


def _queue(model: str, view: dict[str, Any]) -> tuple[TopCell, ...]:
    reserved, room = view["reserved_tokens"], view["kv_tokens"]
    return (
        _text(model),
        _number(view["queued"]),
        _number(view["parked"]),
        _number(view["wait_s"], milliseconds),
        _number(view["pressure"], lambda value: f"{value:.0%}"),
        _number(view["tokens_per_s"], lambda value: f"{value:,.0f}"),
        _number(reserved / room if room else None, lambda value: f"{value:.0%}"),
        _text(view["brownout"]["text"] or _NONE),
    )


def tenants(now: TopSnapshot, before: Before) -> TopTable:
    """One row for each tenant, with rates since the snapshot before, or with totals."""
    per = "" if before is None else "/S"
    seconds = 1.0 if before is None else max(1e-3, now.taken_s - before.taken_s)
    rows = []
    for tenant, counts in now.tenants.items():
        earlier = TenantCounts() if before is None else before.tenants.get(tenant, TenantCounts())
        amounts = [
            max(0.0, getattr(counts, name) - getattr(earlier, name)) / seconds
            for name in ("output_tokens", "prompt_tokens", "requests", "refused")
        ]
        cells = [
            _number(amount, lambda value: f"{value:,.1f}" if per else f"{value:,.0f}") for amount in amounts
        ]
        rows.append((_text(tenant), _number(counts.running, lambda value: f"{value:,.0f}"), *cells))
    columns = ("TENANT", "RUNNING", *(f"{name}{per}" for name in ("OUT", "IN", "REQUESTS", "REFUSED")))
    return TopTable("tenants", columns, frozenset(columns[1:]), tuple(rows), f"OUT{per}")


def requests(now: TopSnapshot, before: Before) -> TopTable:
    """One row for each request that runs, as far as the gateway lists them."""
    rows = tuple(
        (
            _number(each["age_s"], milliseconds),
            _text(each["phase"]),
            _text(each["tenant"] or _NONE),
            _number(each["prompt_tokens"]),
            _number(each["output_tokens"]),
            _number(each["ttft_s"], milliseconds),
            _text(each["decode_worker"] or each["prefill_worker"] or _NONE),
            _text(each["model"]),
            _text(each["request_id"]),
        )
        for each in now.requests["running"]
    )
    columns = ("AGE", "PHASE", "TENANT", "IN", "OUT", "TTFT", "WORKER", "MODEL", "REQUEST")
    return TopTable("requests", columns, frozenset({"AGE", "IN", "OUT", "TTFT"}), rows, "AGE")


def slowest(now: TopSnapshot, before: Before) -> TopTable:
    """One row for each of the slowest requests that have ended and are kept."""
    rows = tuple(
        (
            _number(each["e2e_s"], milliseconds),
            _number(each["ttft_s"], milliseconds),
            _number(each["itl_s"], milliseconds),
            _number(each["queued_s"], milliseconds),
            _text(each["outcome"] + ("!" if each["slo_met"] is False and each["outcome"] == "ok" else "")),
            _text(each["tenant"] or _NONE),
            _number(each["ended_s_ago"], lambda value: f"{value:,.0f} s ago"),
            _text(each["model"]),
            _text(each["request_id"]),
        )
        for each in now.requests["slowest"]
    )
    columns = ("TOOK", "TTFT", "ITL", "QUEUED", "OUTCOME", "TENANT", "ENDED", "MODEL", "REQUEST")
    return TopTable("slowest", columns, frozenset({"TOOK", "TTFT", "ITL", "QUEUED", "ENDED"}), rows, "TOOK")


TABLES: tuple[Callable[[TopSnapshot, Before], TopTable], ...] = (workers, queues, tenants, requests, slowest)
"""The views, in the order of the keys 1 to 5."""


def fitted(
    table: TopTable, rows: Sequence[tuple[TopCell, ...]], width: int
) -> tuple[list[str], list[list[str]]]:
    """Return the titles and cells that fit `width` characters, padded to their columns, two spaces apart. The
    last column is cut to what is left."""
    count = len(table.columns)
    widths = [max(len(table.columns[i]), *(len(row[i].text) for row in rows), 0) for i in range(count)]
    kept: list[int] = []
    last = count - 1
    left = width - min(widths[last], _LEAST_LAST)
    for i in range(last):
        if left < widths[i] + 2:
            break
        kept.append(i)
        left -= widths[i] + 2
    widths[last] = min(widths[last], left + min(widths[last], _LEAST_LAST))
    kept.append(last)

    def cell(i: int, text: str) -> str:
        cut = text if len(text) <= widths[i] else f"{text[: widths[i] - 1]}…"
        return cut.rjust(widths[i]) if table.columns[i] in table.numbers else cut.ljust(widths[i])

    return [cell(i, table.columns[i]) for i in kept], [[cell(i, row[i].text) for i in kept] for row in rows]


def plain(table: TopTable, order: TopOrder, width: int) -> list[str]:
    """Return a table as lines of text."""
    rows = arranged(table, order)
    heads, cells = fitted(table, rows, width)
    lines = ["  ".join(each).rstrip() for each in (heads, *cells)]
    return [f"{table.title} ({len(rows)})", *(lines if rows else ["none"])]


def _text(text: str) -> TopCell:
    return TopCell(text, text)


def _number(value: float | None, shown: Callable[[float], str] = lambda value: f"{value:,}") -> TopCell:
    """A number; one that is not known sorts below all others."""
    return TopCell(_NONE, -1.0) if value is None else TopCell(shown(value), float(value))
