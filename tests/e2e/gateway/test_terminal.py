"""The commands of the terminal show the numbers of a running gateway."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.gateway.conftest import deployed
from textual.widgets import DataTable

from kvasir.config.spec.deployment import GatewaySpec, SloSpec
from kvasir.config.spec.tenants import TenancySpec, TenantSpec
from kvasir.ports.router import WorkerView
from kvasir_platform.cli.common.gateway_site import Site
from kvasir_platform.cli.main import main
from kvasir_platform.cli.top.screen import TopScreen
from kvasir_platform.cli.top.snapshot import TopSnapshot, read_snapshot
from kvasir_platform.gateway.prompt.tokenization import ModelTokenizer

CHAT = "/v1/chat/completions"
BODY = b'{"model":"kvasir-tiny","messages":[{"role":"user","content":"hi"}]}'


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVASIR_HOME", str(tmp_path))


def cells(screen: TopScreen) -> list[list[str]]:
    grid = screen.query_one(DataTable)
    return [[str(cell).strip() for cell in grid.get_row_at(i)] for i in range(grid.row_count)]


async def test_top_shows_the_requests_that_run_and_what_tenants_were_given(edge: Any) -> None:
    site = Site(f"{edge.host}:{edge.port}")
    edge.router.views = [WorkerView("d-0", "a", "decode", "ready", in_flight=1)]
    call = asyncio.ensure_future(edge.post(CHAT, BODY))
    stream = await edge.router.submitted()
    for text in "abc":
        stream.emit(text)

    seconds = itertools.count()

    def read() -> TopSnapshot:
        return read_snapshot(site, float(next(seconds)))

    first = await asyncio.to_thread(read)
    async with TopScreen(read, first, view="requests", interval_s=3600.0).run_test(size=(120, 24)) as pilot:
        screen = pilot.app
        assert isinstance(screen, TopScreen)
        (row,) = cells(screen)
        assert row[1:3] == ["decoding", "default"]
        assert row[4] == "3"
        assert row[-1] == stream.request.request_id
        assert "1 in flight" in str(screen.query_one("#figures").render())
        stream.finish()
        await call
        screen.refresh_now()
        await screen.workers.wait_for_complete()
        await pilot.press("4")
        assert cells(screen) == []
        await pilot.press("1")
        assert cells(screen)[0][0] == "d-0"
        edge.router.views = []
        await pilot.press("3")
        default = next(row for row in cells(screen) if row[0] == "default")
    assert default[1:3] == ["0", "3.0"]
    assert (await asyncio.to_thread(read)).tenants["default"].output_tokens == 3


async def test_tail_shows_the_slow_requests_of_a_tenant_and_no_others(
    tokenizer: ModelTokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("kvasir_platform.cli.live.tail.POLL_S", 0.05)
    keys = tmp_path / "keys"
    keys.write_text(
        "".join(f"{hashlib.sha256(name.encode()).hexdigest()} tenant={name}\n" for name in ("acme", "lab"))
    )
    spec = {
        "gateway": GatewaySpec(port=0, drain_timeout_s=0.0, api_keys_file=str(keys)),
        "tenancy": TenancySpec(
            tenants=tuple(TenantSpec(name=each, operator=True) for each in ("acme", "lab"))
        ),
        # What no request can keep, and what any keeps.
        "slo": (SloSpec(name="missed", ttft_s=1e-9, itl_s=1e-9), SloSpec(name="met", ttft_s=600, itl_s=600)),
    }
    async with deployed(tokenizer, spec) as product:
        monkeypatch.setenv("KVASIR_API_KEY", "lab")
        tail = asyncio.create_task(product.kvasir("tail", "--tenant", "acme", "--slow", "--requests", "2"))
        while not product.cluster.router.recordings.active:
            await asyncio.sleep(0.01)
        slow = []
        for tenant, slo in (("acme", "met"), ("lab", "missed"), ("acme", "missed"), ("acme", "missed")):
            headers = {"x-kvasir-slo": slo, "Authorization": f"Bearer {tenant}"}
            name = await product.ask("Once upon a time", max_tokens=4, **headers)
            slow += [name] if (tenant, slo) == ("acme", "missed") else []
        assert await tail == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["TIME", "OUTCOME", "TENANT"]
    assert [line.split()[1:3] for line in lines] == [["ok!", "acme"]] * 2
    assert [line.split()[-1].rpartition("-")[0] for line in lines] == slow


async def test_trace_and_status_show_a_request_that_runs(
    edge: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"{edge.host}:{edge.port}"
    call = asyncio.ensure_future(edge.post(CHAT, BODY))
    stream = await edge.router.submitted()
    stream.emit("a")
    name = stream.request.request_id
    assert await asyncio.to_thread(main, ["trace", name, "--address", address]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{name}: running (decoding), kvasir-tiny, tenant default")
    assert "stream" in text
    edge.router.reasons = {"kvasir-tiny": "pool decode has no ready worker"}
    assert await asyncio.to_thread(main, ["status", "--address", address]) == 1
    sentence = capsys.readouterr().out.splitlines()[0]
    assert sentence.startswith(
        "Requests fail: kvasir-tiny is not served: pool decode has no ready worker. See"
    )
    stream.finish()
    await call
