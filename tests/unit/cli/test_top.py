"""`kvasir top`: what its tables have, how they fit a terminal, and what its screen shows of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cli.conftest import CannedGateway
from textual.pilot import Pilot
from textual.widgets import DataTable

from kvasir.core.errors import UpstreamError
from kvasir_platform.cli.common.gateway_client import metrics_of
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.main import main
from kvasir_platform.cli.top import tables
from kvasir_platform.cli.top.command import screen_text
from kvasir_platform.cli.top.screen import TopScreen
from kvasir_platform.cli.top.snapshot import TenantCounts, TopSnapshot, tenants_in
from kvasir_platform.cli.top.tables import TopOrder, arranged, fitted, heading, plain
from kvasir_platform.edge.exposition import parse

SIZE = (80, 24)
MOST_TURNS = 200


def worker(name: str, **load: Any) -> dict[str, Any]:
    known = {
        "running": 2, "waiting": 0, "kv_usage": 0.25, "prefix_queries_tokens": 100, "prefix_hits_tokens": 50,
        "tiers": [],
    }  # fmt: skip
    return {
        "worker_id": name, "pool": "decode", "role": "decode", "state": "ready", "reason": "",
        "health": {"state": "healthy", "reason": ""}, "kv": {"state": "exact", "reason": ""},
        "load": known | load,
    }  # fmt: skip


def running(name: str, age_s: float, tenant: str = "acme") -> dict[str, Any]:
    return {
        "request_id": name, "model": "llama", "tenant": tenant, "slo": "chat", "phase": "decoding",
        "age_s": age_s, "queued_s": 0.001, "ttft_s": 0.05, "prompt_tokens": 120, "output_tokens": 7,
        "predicted_cached_tokens": 64, "prefill_worker": None, "decode_worker": "decode-1", "retries": 0,
        "migrations": 0,
    }  # fmt: skip


def ended(name: str, e2e_s: float, **fields: Any) -> dict[str, Any]:
    known = {
        "request_id": name, "model": "llama", "tenant": "acme", "outcome": "ok", "ended_s_ago": 3.0,
        "e2e_s": e2e_s, "queued_s": 0.01, "ttft_s": 0.04, "itl_s": 0.01, "slo_met": True,
    }  # fmt: skip
    return known | fields


QUEUE = {
    "queued": 3, "parked": 1, "wait_s": 0.4, "pressure": 0.2, "tokens_per_s": 512.0, "reserved_tokens": 50,
    "kv_tokens": 200, "brownout": {"level": 1, "text": "1; shed=2", "fallback_model": None},
}  # fmt: skip
SNAPSHOT = TopSnapshot(
    10.0,
    {
        "deployment": "kvasir",
        "workers": [worker("decode-1"), worker("decode-2", running=9, waiting=4, kv_usage=0.97)],
        "queues": {"llama": QUEUE},
        "verdict": {"ok": False, "sentence": "Service is degraded: llama is in brown-out.", "problems": []},
    },
    {
        "in_flight": 2,
        "queued": 4,
        "running": [running("r-old", 12.0), running("r-new", 0.5, "lab")],
        "slowest": [ended("r-slow", 30.0, slo_met=False), ended("r-lost", 2.0, outcome="worker_lost")],
        "latest": [ended("r-lost", 2.0)],
    },
    {"acme": TenantCounts(2, 100, 5000, 900, 3), "lab": TenantCounts(1, 10, 50, 70, 0)},
)


def column(rows: list[tuple[tables.TopCell, ...]], at: int) -> list[str]:
    return [row[at].text for row in rows]


def test_workers_show_their_load_and_the_share_of_tokens_that_was_cached_since_the_last_look() -> None:
    before = replace(SNAPSHOT, status={**SNAPSHOT.status} | {
        "workers": [worker("decode-1", prefix_queries_tokens=60, prefix_hits_tokens=20)]
    })  # fmt: skip
    table = tables.workers(SNAPSHOT, before)
    rows = {row[0].text: [cell.text for cell in row] for row in table.rows}
    assert rows["decode-1"][1:6] == ["ready", "2", "0", "25%", "75%"]
    assert rows["decode-2"][1:6] == ["ready", "9", "4", "97%", "50%"]


def test_a_worker_that_is_not_well_shows_its_state_and_its_reason() -> None:
    bad = worker("decode-3") | {"health": {"state": "ejected", "reason": "5 failures in a row"}}
    drains = worker("decode-4") | {"state": "draining", "reason": "kernel update", "load": None}
    table = tables.workers(replace(SNAPSHOT, status={**SNAPSHOT.status} | {"workers": [bad, drains]}), None)
    assert [(row[1].text, row[2].text, row[-1].text) for row in table.rows] == [
        ("ejected", "2", "5 failures in a row"),
        ("draining", "-", "kernel update"),
    ]


def test_tenants_show_rates_since_the_last_look_and_totals_without_one() -> None:
    before = replace(SNAPSHOT, taken_s=8.0, tenants={"acme": TenantCounts(0, 90, 4000, 400, 3)})
    table = tables.tenants(SNAPSHOT, before)
    assert table.columns == ("TENANT", "RUNNING", "OUT/S", "IN/S", "REQUESTS/S", "REFUSED/S")
    acme, lab = (tuple(cell.text for cell in row) for row in table.rows)
    assert acme == ("acme", "2", "250.0", "500.0", "5.0", "0.0")
    assert lab == ("lab", "1", "35.0", "25.0", "5.0", "0.0")
    total = tables.tenants(SNAPSHOT, None)
    assert [cell.text for cell in total.rows[0]] == ["acme", "2", "900", "5,000", "100", "3"]


def test_counts_of_tenants_are_read_from_the_exposition() -> None:
    text = b"""# TYPE kvasir_tenant_tokens_total counter
kvasir_tenant_tokens_total{kind="prompt",tenant="acme"} 7.0
kvasir_tenant_tokens_total{kind="output",tenant="acme"} 5.0
# TYPE kvasir_tenant_refused_total counter
kvasir_tenant_refused_total{reason="a",tenant="acme"} 1.0
kvasir_tenant_refused_total{reason="b",tenant="acme"} 2.0
# TYPE kvasir_tenant_requests_in_flight gauge
kvasir_tenant_requests_in_flight{tenant="acme"} 4.0
# TYPE kvasir_tenant_requests_total counter
kvasir_tenant_requests_total{tenant="acme"} 9.0
# TYPE kvasir_queue_seconds_count counter
kvasir_queue_seconds_count{model="m"} 1.0
"""
    assert tenants_in(parse(text)) == {"acme": TenantCounts(4, 9, 7, 5, 3)}


def test_rows_are_sorted_by_the_chosen_column_and_filtered_by_any_cell() -> None:
    table = tables.requests(SNAPSHOT, None)
    assert column(arranged(table, TopOrder()), -1) == ["r-old", "r-new"]
    assert column(arranged(table, TopOrder(reverse=True)), -1) == ["r-new", "r-old"]
    assert column(arranged(table, TopOrder("TENANT")), 2) == ["acme", "lab"]
    assert column(arranged(table, TopOrder("TENANT", reverse=True)), 2) == ["lab", "acme"]
    assert column(arranged(table, TopOrder(text="LAB")), -1) == ["r-new"]
    assert arranged(table, TopOrder(text="nobody")) == []
    assert column(arranged(table, TopOrder("PRESSURE")), -1) == ["r-old", "r-new"]


def test_an_unknown_number_is_below_all_others() -> None:
    none = running("r-none", 1.0) | {"ttft_s": None}
    found = replace(SNAPSHOT, requests={**SNAPSHOT.requests} | {"running": [none, running("r", 1.0)]})
    assert column(arranged(tables.requests(found, None), TopOrder("TTFT")), -1) == ["r", "r-none"]


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("make", tables.TABLES, ids=lambda make: make.__name__)
def test_a_table_fits_the_terminal(make: Callable[..., tables.TopTable], width: int) -> None:
    table = make(SNAPSHOT, None)
    heads, cells = fitted(table, table.rows, width)
    assert all(len("  ".join(line)) <= width for line in (heads, *cells))
    assert heads[0].strip() == table.columns[0]
    assert heads[-1].strip() == table.columns[-1][: len(heads[-1].strip())]
    if width == 200:
        assert [head.strip() for head in heads] == list(table.columns)


def test_the_heading_has_the_verdict_and_the_figures() -> None:
    verdict, figures = heading(SNAPSHOT)
    assert verdict == "Service is degraded: llama is in brown-out."
    assert figures == "kvasir, 2 in flight, 4 queued, 2 workers, TTFT p50 40.0 ms of the last 1"


def test_the_text_of_all_views_at_80_columns() -> None:
    assert "\n".join(screen_text(SNAPSHOT, TopOrder(), 80)) == TEXT.strip("\n")


TEXT = """
Service is degraded: llama is in brown-out.
kvasir, 2 in flight, 4 queued, 2 workers, TTFT p50 40.0 ms of the last 1

workers (2)
WORKER    STATE  RUN  WAIT   KV  HIT  ROLE    POOL    TIERS  REASON
decode-1  ready    2     0  25%  50%  decode  decode  -
decode-2  ready    9     4  97%  50%  decode  decode  -

queues (1)
MODEL  QUEUED  PARKED      WAIT  PRESSURE  TOKENS/S  KV RESERVED  BROWN-OUT
llama       3       1  400.0 ms       20%       512          25%  1; shed=2

tenants (2)
TENANT  RUNNING  OUT     IN  REQUESTS  REFUSED
acme          2  900  5,000       100        3
lab           1   70     50        10        0

requests (2)
     AGE  PHASE     TENANT   IN  OUT     TTFT  WORKER    MODEL  REQUEST
  12.0 s  decoding  acme    120    7  50.0 ms  decode-1  llama  r-old
500.0 ms  decoding  lab     120    7  50.0 ms  decode-1  llama  r-new

slowest (2)
      TOOK     TTFT      ITL   QUEUED  OUTCOME      TENANT    ENDED  REQUEST
    30.0 s  40.0 ms  10.0 ms  10.0 ms  ok!          acme    3 s ago  r-slow
2,000.0 ms  40.0 ms  10.0 ms  10.0 ms  worker_lost  acme    3 s ago  r-lost
"""


def test_a_table_without_rows_says_so() -> None:
    assert plain(tables.requests(SNAPSHOT, None), TopOrder(text="?"), 80) == ["requests (0)", "none"]


# -- the screen -----------------------------------------------------------------------------------


class Gateway:
    """A gateway whose snapshots a test makes."""

    def __init__(self) -> None:
        self.snapshot = SNAPSHOT
        self.failing = False

    def read(self) -> TopSnapshot:
        if self.failing:
            raise UpstreamError("the gateway does not answer")
        return self.snapshot

    def screen(self, **options: Any) -> TopScreen:
        return TopScreen(self.read, self.snapshot, interval_s=3600.0, **options)


def cells(screen: TopScreen) -> list[list[str]]:
    grid = screen.query_one(DataTable)
    return [[str(cell).strip() for cell in grid.get_row_at(i)] for i in range(grid.row_count)]


async def drawn(pilot: Pilot[None]) -> list[str]:
    """The lines of the terminal. Textual writes the keys into the last one some turns after the others."""
    lines: list[str] = [""]
    for _ in range(MOST_TURNS):
        await pilot.pause()
        strips = pilot.app.screen._compositor.render_strips()
        lines = ["".join(segment.text for segment in strip) for strip in strips]
        if lines[-1].strip():
            break
    return lines


def text_of(screen: TopScreen, name: str) -> str:
    return str(screen.query_one(f"#{name}").render())


async def test_the_screen_shows_the_numbers_and_follows_them() -> None:
    gateway = Gateway()
    async with gateway.screen().run_test(size=SIZE) as pilot:
        screen = pilot.app
        assert isinstance(screen, TopScreen)
        assert cells(screen)[1][:6] == ["decode-2", "ready", "9", "4", "97%", "50%"]
        assert text_of(screen, "verdict") == "Service is degraded: llama is in brown-out."
        assert "2 in flight" in text_of(screen, "figures")
        busier = [worker("decode-1", running=77)]
        gateway.snapshot = replace(SNAPSHOT, status={**SNAPSHOT.status} | {"workers": busier})
        screen.refresh_now()
        await screen.workers.wait_for_complete()
        await pilot.pause()
        assert cells(screen)[0][2] == "77"
        assert len(cells(screen)) == 1


async def test_keys_change_the_view_the_order_and_the_filter() -> None:
    async with Gateway().screen().run_test(size=SIZE) as pilot:
        screen = pilot.app
        assert isinstance(screen, TopScreen)
        await pilot.press("4")
        assert text_of(screen, "title") == "requests (2), by AGE"
        assert [row[0] for row in cells(screen)] == ["12.0 s", "500.0 ms"]
        await pilot.press("r")
        assert [row[0] for row in cells(screen)] == ["500.0 ms", "12.0 s"]
        await pilot.press("s")
        assert text_of(screen, "title") == "requests (2), by PHASE"
        await pilot.press("slash", "l", "a", "b", "enter")
        assert text_of(screen, "title") == "requests (1), by PHASE, with 'lab'"
        assert cells(screen)[0][2] == "lab"
        await pilot.press("escape", "tab")
        assert text_of(screen, "title") == "slowest (2), by TOOK"
        await pilot.press("3")
        assert text_of(screen, "title") == "tenants (2), by OUT"


async def test_a_pause_keeps_what_is_shown_and_a_gateway_that_is_gone_is_said() -> None:
    gateway = Gateway()
    async with gateway.screen(view="slowest").run_test(size=SIZE) as pilot:
        screen = pilot.app
        assert isinstance(screen, TopScreen)
        await pilot.press("p")
        assert text_of(screen, "title") == "slowest (2), by TOOK, PAUSED"
        screen.take(replace(SNAPSHOT, requests={**SNAPSHOT.requests} | {"slowest": []}), "")
        assert len(cells(screen)) == 2
        await pilot.press("p")
        gateway.failing = True
        screen.refresh_now()
        await screen.workers.wait_for_complete()
        await pilot.pause()
        assert text_of(screen, "verdict") == "STALE: the gateway does not answer"
        assert len(cells(screen)) == 2


async def test_quitting_while_it_reads_ends_without_an_error() -> None:
    gateway = Gateway()
    reading, quitted = threading.Event(), threading.Event()

    def read() -> TopSnapshot:
        reading.set()
        quitted.wait(10.0)
        return gateway.snapshot

    screen = TopScreen(read, gateway.snapshot, interval_s=3600.0)
    async with screen.run_test(size=SIZE) as pilot:
        screen.refresh_now()
        await asyncio.to_thread(reading.wait, 10.0)
        await pilot.press("q")
        quitted.set()
    assert screen.return_code == 0


async def test_brackets_in_what_is_shown_are_no_markup() -> None:
    reason = "[Errno 111] refused [/] [red]"
    lost = worker("[bold]w") | {"state": "interrupted", "reason": reason}
    gateway = Gateway()
    gateway.snapshot = replace(SNAPSHOT, status={**SNAPSHOT.status} | {"workers": [lost]})
    async with gateway.screen().run_test(size=(140, 24)) as pilot:
        (line,) = [line for line in await drawn(pilot) if "interrupted" in line]
        assert line.split()[0] == "[bold]w"
        assert line.rstrip().endswith(reason)


async def test_at_80_by_24_and_without_colour_everything_is_on_the_screen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    async with Gateway().screen(view="requests").run_test(size=SIZE) as pilot:
        lines = await drawn(pilot)
    shown = [line.rstrip() for line in lines]
    assert len(lines) == 24
    assert all(len(line) <= 80 for line in lines)
    assert shown[0].strip() == "Service is degraded: llama is in brown-out."
    assert any("r-old" in line and "12.0 s" in line for line in shown)
    assert shown[-1].split() == (
        ["tab", "Next", "1-5", "View", "s", "Sort", "r", "Order", "/", "Filter", "p", "Pause", "q", "Quit"]
    )


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def canned(gateway: CannedGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CannedGateway:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "80")
    gateway.answers |= {"/status": (200, SNAPSHOT.status), "/requests": (200, SNAPSHOT.requests)}
    metrics = b"# TYPE kvasir_tenant_tokens_total counter\n"
    metrics += b'kvasir_tenant_tokens_total{tenant="acme",kind="output"} 40.0\n'
    monkeypatch.setattr("kvasir_platform.cli.top.snapshot.metrics_of", lambda site: metrics)
    return gateway


def test_once_and_in_a_pipe_it_prints_text(canned: CannedGateway, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--address", canned.address, "--once", "--sort", "tenant"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Service is degraded: llama is in brown-out.\n")
    assert text.index("workers (2)") < text.index("queues (1)") < text.index("requests (2)")
    assert main(["top", "--address", canned.address, "-o", "json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["requests"]["in_flight"] == 2
    assert printed["tenants"]["acme"]["output_tokens"] == 40.0


def test_a_column_that_does_not_exist_is_refused_with_those_that_do(
    canned: CannedGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "--address", canned.address, "--once", "--sort", "size"]) == 2
    assert "no view has that column; name one of: AGE, BROWN-OUT" in capsys.readouterr().err


def test_metrics_that_are_refused_say_why(gateway: CannedGateway) -> None:
    gateway.answers["/metrics"] = (401, {})
    with pytest.raises(UpstreamError, match="asks for an API key"):
        metrics_of(Site(gateway.address))


def test_gpus_have_columns_where_there_are_any() -> None:
    assert "GPU" not in tables.workers(SNAPSHOT, None).columns
    known = {"index": 0, "memory_used": 30, "memory_total": 80, "power_w": 500.0, "dram_active": None}
    gpus = [known | {"busy": 0.9, "sm_active": 0.4}, known | {"busy": 0.8, "sm_active": None, "index": 1}]
    status = {**SNAPSHOT.status, "workers": [worker("decode-1", gpus=gpus), worker("cpu-1")]}
    table = tables.workers(replace(SNAPSHOT, status=status), None)
    cells = {row[0].text: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert (cells["decode-1"]["GPU"].text, cells["decode-1"]["GPU MEM"].text) == ("60%", "38%")
    assert (cells["cpu-1"]["GPU"].text, cells["cpu-1"]["GPU MEM"].text) == ("-", "-")
