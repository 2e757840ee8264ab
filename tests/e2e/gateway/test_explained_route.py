"""A request through gateway, router and simulated workers, and its explanation afterwards."""

from __future__ import annotations

import json
from typing import Any

import pytest


async def explained(product: Any, capsys: pytest.CaptureFixture[str], request_id: str) -> Any:
    capsys.readouterr()
    assert await product.kvasir("explain", request_id, "-o", "json") == 0
    (record,) = json.loads(capsys.readouterr().out)["decisions"]
    return record


async def test_a_second_request_goes_where_the_first_left_its_blocks_and_says_so(
    product: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    first = await explained(product, capsys, await product.ask())
    second = await explained(product, capsys, await product.ask())
    assert first["outcome"] == second["outcome"] == "ok"
    assert (first["predicted_cached_tokens"], first["actual_cached_tokens"]) == (0, 0)
    assert second["prefill_worker"] == first["prefill_worker"]
    assert second["predicted_cached_tokens"] == second["actual_cached_tokens"] > 0
    assert second["slo_met"] is True
    assert second["actual_ttft_s"] > 0
    parts = {part["part"]: part["places"] for part in second["parts"]}
    for part, chosen in (("prefill", second["prefill_worker"]), ("decode", second["decode_worker"])):
        assert {place["pool"] for place in parts[part]} == {part}
        assert len(parts[part]) == 2
        assert [place["worker_id"] for place in parts[part] if place["chosen"]] == [chosen]
    assert parts["prefill"][0]["facts"]["cached_tokens"] == second["predicted_cached_tokens"]
    assert {place["kv_state"] for place in parts["prefill"]} == {"exact"}
    assert all(place["total"] == pytest.approx(sum(place["terms"].values())) for place in parts["prefill"])


async def test_the_command_line_tells_people_who_holds_what_and_why(
    product: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    name = await product.ask(**{"x-request-id": "mine-1", "x-session-id": "tab"})
    assert name == "mine-1"
    assert await product.kvasir("explain", name) == 0
    told = capsys.readouterr().out
    assert told.splitlines()[1].startswith("Prefilled on prefill-")
    assert "prefill: 2 considered, terms in ms" in told
    assert "SLO default: met" in told
    assert await product.kvasir("get", "workers") == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:6] == ["WORKER", "POOL", "ROLE", "STATE", "HEALTH", "KV"]
    assert [row.split()[4:6] for row in rows] == [["healthy", "exact"]] * 4
    assert sum(int(row.split()[6]) for row in rows) > 0


async def test_metrics_show_the_index_the_decision_and_the_promise_kept(product: Any) -> None:
    await product.ask()
    shown = (await product.client.get("/../metrics", cast_to=str)).splitlines()
    values = dict(line.rsplit(" ", 1) for line in shown if not line.startswith("#"))
    assert float(values["kvasir_index_blocks"]) > 0
    assert float(values["kvasir_decision_seconds_count"]) == 1
    assert values['kvasir_slo_requests_total{met="yes",model="kvasir-tiny",slo="default"}'] == "1.0"
    assert values['kvasir_cached_tokens_error_ratio_bucket{le="0.0",model="kvasir-tiny"}'] == "1.0"
    exact = [name for name in values if name.startswith("kvasir_worker_kv_state{") and "exact" in name]
    assert [values[name] for name in exact] == ["1.0"] * 4


async def test_a_decision_is_judged_when_its_request_has_ended(
    product: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    record = await explained(product, capsys, await product.ask())
    assert record["regret_s"] >= 0.0
    assert sum(record["regret_causes"].values()) == pytest.approx(record["regret_s"])
    assert await product.kvasir("explain") == 0
    assert "of 1 judged decisions" in capsys.readouterr().out
