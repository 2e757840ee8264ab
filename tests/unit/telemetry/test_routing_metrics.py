"""Metrics of the index's contents and accuracy, and of the quality of decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from kvasir.core.kv import KvState, KvStatus, Medium, TierLoad
from kvasir.core.locality import LinkClass
from kvasir.core.requests import EngineLoad, SloClass, Usage
from kvasir.native import TreeStats
from kvasir.ports.router import Accounting, HealthView, LinkTransfers, RegretView, RequestSummary, WorkerView
from kvasir.telemetry.metrics import Metrics

SLO = SloClass("chat", ttft_s=1.0, itl_s=0.05)
GOOD = RequestSummary(
    "r",
    "m",
    "ok",
    arrival_s=10.0,
    first_token_s=10.5,
    finished_s=10.9,
    decode_worker="d-0",
    predicted_cached_tokens=48,
    usage=Usage(prompt_tokens=100, cached_tokens=64, output_tokens=11),
    slo=SLO,
)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(CollectorRegistry(), ["m"], ["chat"])


def shown(metrics: Metrics) -> str:
    return metrics.render().decode()


def test_a_workers_cache_shows_its_state_blocks_and_resyncs(metrics: Metrics) -> None:
    kv = KvStatus(
        KvState.CATCHING_UP, "gap", since_s=0.0, blocks=70, predicted_blocks=7, resyncs=3, error_ratio=0.25
    )
    metrics.workers([WorkerView("w", "a", "decode", "ready", kv=kv)])
    text = shown(metrics)
    for line in (
        'kvasir_worker_kv_state{pool="decode",state="catching_up",worker="w"} 1.0',
        'kvasir_worker_kv_state{pool="decode",state="exact",worker="w"} 0.0',
        'kvasir_worker_kv_blocks{kind="reported",pool="decode",worker="w"} 70.0',
        'kvasir_worker_kv_blocks{kind="predicted",pool="decode",worker="w"} 7.0',
        'kvasir_worker_kv_resyncs_total{pool="decode",worker="w"} 3.0',
        'kvasir_worker_kv_error_ratio{pool="decode",worker="w"} 0.25',
    ):
        assert line in text
    metrics.workers([])
    assert 'worker="w"' not in shown(metrics)


def test_a_workers_tiers_show_what_they_hold_what_they_gave_and_whether_they_work(metrics: Metrics) -> None:
    cpu = TierLoad(
        Medium.CPU,
        blocks=1,
        bytes_used=2,
        bytes_capacity=3,
        loads=4,
        loaded_blocks=5,
        loaded_bytes=6,
        load_s=7.5,
        stored_blocks=8,
        stored_bytes=9,
        evicted_blocks=10,
        corrupt_blocks=11,
        dropped_blocks=12,
        failures=13,
    )
    remote = TierLoad(Medium.REMOTE, trouble="refused", readable=False)
    load = EngineLoad(swapped_in=14, recomputed=15, tiers=(cpu, remote))
    metrics.workers([WorkerView("w", "a", "decode", "ready", load=load)])
    text = shown(metrics)
    where = '{pool="decode",tier="cpu",worker="w"}'
    for line in (
        f"kvasir_worker_tier_blocks{where} 1.0",
        f"kvasir_worker_tier_bytes{where} 2.0",
        f"kvasir_worker_tier_capacity_bytes{where} 3.0",
        f"kvasir_worker_tier_up{where} 1.0",
        f"kvasir_worker_tier_trouble{where} 0.0",
        'kvasir_worker_tier_up{pool="decode",tier="remote",worker="w"} 0.0',
        'kvasir_worker_tier_trouble{pool="decode",tier="remote",worker="w"} 1.0',
        f"kvasir_worker_tier_loads_total{where} 4.0",
        f"kvasir_worker_tier_loaded_blocks_total{where} 5.0",
        f"kvasir_worker_tier_loaded_bytes_total{where} 6.0",
        f"kvasir_worker_tier_load_seconds_total{where} 7.5",
        f"kvasir_worker_tier_stored_blocks_total{where} 8.0",
        f"kvasir_worker_tier_stored_bytes_total{where} 9.0",
        f"kvasir_worker_tier_evicted_blocks_total{where} 10.0",
        f"kvasir_worker_tier_corrupt_blocks_total{where} 11.0",
        f"kvasir_worker_tier_dropped_blocks_total{where} 12.0",
        f"kvasir_worker_tier_failures_total{where} 13.0",
        'kvasir_worker_swapped_in_total{pool="decode",worker="w"} 14.0',
        'kvasir_worker_recomputed_total{pool="decode",worker="w"} 15.0',
    ):
        assert line in text
    metrics.workers([])
    assert "tier=" not in shown(metrics)


def test_a_worker_that_is_only_connecting_has_no_cache_series(metrics: Metrics) -> None:
    metrics.workers([WorkerView("w", "a", "decode", "connecting")])
    assert "kvasir_worker_kv_state{" not in shown(metrics)


def test_a_workers_health_shows_its_state_share_and_ejections(metrics: Metrics) -> None:
    well = WorkerView("w", "a", "decode", "ready")
    out = replace(well, worker_id="x", health=HealthView("ejected", "why", 2.0, 0.0, ejections=3))
    metrics.workers([well, out, WorkerView("y", "a", "decode", "connecting")])
    text = shown(metrics)
    for line in (
        'kvasir_worker_health{pool="decode",state="healthy",worker="w"} 1.0',
        'kvasir_worker_health{pool="decode",state="ejected",worker="x"} 1.0',
        'kvasir_worker_health{pool="decode",state="healthy",worker="x"} 0.0',
        'kvasir_worker_share{pool="decode",worker="w"} 1.0',
        'kvasir_worker_share{pool="decode",worker="x"} 0.0',
        'kvasir_worker_ejections_total{pool="decode",worker="x"} 3.0',
        'kvasir_pool_panic{pool="decode"} 0.0',
    ):
        assert line in text
    assert 'worker="y"' not in "".join(line for line in text.splitlines() if "health" in line)
    metrics.workers([replace(out, health=replace(out.health, panic=True))])
    assert 'kvasir_pool_panic{pool="decode"} 1.0' in shown(metrics)


def test_the_index_is_read_at_scrape(metrics: Metrics) -> None:
    assert "kvasir_index_" not in shown(metrics)
    sizes = TreeStats(10, 4, 8, 3, 2, 0, expired=5, evicted=6, bytes=480)
    metrics.track_index(lambda: sizes)
    text = shown(metrics)
    for line in (
        "kvasir_index_blocks 10.0",
        "kvasir_index_predicted_blocks 4.0",
        "kvasir_index_names 8.0",
        "kvasir_index_bytes 480.0",
        "kvasir_index_expired_blocks_total 5.0",
        "kvasir_index_evicted_blocks_total 6.0",
    ):
        assert line in text


def test_transfers_are_counted_by_the_class_of_their_link(metrics: Metrics) -> None:
    assert "kvasir_link_" not in shown(metrics)
    links = {LinkClass.RACK: LinkTransfers(3, 4096, 0.5), LinkClass.CROSS_ZONE: LinkTransfers(1, 100, 2.0)}
    metrics.track_links(lambda: {"m": links})
    text = shown(metrics)
    for line in (
        'kvasir_link_transfers_total{link="rack",model="m"} 3.0',
        'kvasir_link_transferred_bytes_total{link="cross_zone",model="m"} 100.0',
        'kvasir_link_transfer_seconds_total{link="cross_zone",model="m"} 2.0',
    ):
        assert line in text


def test_regret_is_counted_by_model_and_cause(metrics: Metrics) -> None:
    assert "kvasir_regret" not in shown(metrics)
    view = RegretView(judged=9, regretted=2, causes={"queue": 0.5, "index": 0.25})
    metrics.track_regret(lambda: {"m": view})
    text = shown(metrics)
    for line in (
        'kvasir_judged_decisions_total{model="m"} 9.0',
        'kvasir_regretted_decisions_total{model="m"} 2.0',
        'kvasir_regret_seconds_total{cause="queue",model="m"} 0.5',
    ):
        assert line in text


def test_a_decisions_duration_is_a_histogram_of_microseconds(metrics: Metrics) -> None:
    metrics.decided(15e-6)
    text = shown(metrics)
    assert 'kvasir_decision_seconds_bucket{le="1e-05"} 0.0' in text
    assert 'kvasir_decision_seconds_bucket{le="2e-05"} 1.0' in text


def test_foreseen_against_found_is_a_share_of_the_prompt(metrics: Metrics) -> None:
    metrics.request_finished(GOOD)
    text = shown(metrics)
    assert 'kvasir_cached_tokens_error_ratio_sum{model="m"} 0.16' in text
    assert 'kvasir_cached_tokens_error_ratio_bucket{le="0.1",model="m"} 0.0' in text
    assert 'kvasir_cached_tokens_error_ratio_bucket{le="0.25",model="m"} 1.0' in text


@pytest.mark.parametrize(
    ("summary", "met"),
    [
        (GOOD, "yes"),
        (replace(GOOD, first_token_s=11.01, finished_s=11.1), "no"),
        (replace(GOOD, finished_s=11.01), "no"),
        (replace(GOOD, outcome="worker_lost"), "no"),
        (replace(GOOD, outcome="queue_timeout", first_token_s=None), "no"),
        (replace(GOOD, outcome="client_closed"), None),
        (replace(GOOD, outcome="slow_reader"), None),
    ],
    ids=["in time", "late first token", "slow stream", "failed", "never served", "client left", "client cut"],
)
def test_a_service_level_is_met_or_missed_or_not_judged(
    metrics: Metrics, summary: RequestSummary, met: str | None
) -> None:
    metrics.request_finished(summary)
    lines = [line for line in shown(metrics).splitlines() if line.startswith("kvasir_slo_requests_total{")]
    assert lines == (
        [] if met is None else [f'kvasir_slo_requests_total{{met="{met}",model="m",slo="chat"}} 1.0']
    )


def test_a_class_that_is_not_the_deployments_never_becomes_a_label(metrics: Metrics) -> None:
    metrics.request_finished(replace(GOOD, slo=SloClass("made-up", 1.0, 1.0)))
    assert 'kvasir_slo_requests_total{met="yes",model="m",slo="other"} 1.0' in shown(metrics)


def test_the_books_show_what_runs_what_is_accounted_and_whether_they_agree(metrics: Metrics) -> None:
    assert "kvasir_router_legs" not in shown(metrics)
    metrics.track_accounting(lambda: Accounting(in_flight=3, running=2, queued=1, accounted=2, leases=1))
    text = shown(metrics)
    for line in (
        "kvasir_router_legs 2.0",
        "kvasir_router_accounted_requests 2.0",
        "kvasir_router_leases 1.0",
        "kvasir_router_accounting_consistent 1.0",
    ):
        assert line in text
    metrics.track_accounting(lambda: Accounting(in_flight=3, running=2, queued=1, accounted=1, leases=1))
    assert "kvasir_router_accounting_consistent 0.0" in shown(metrics)


def test_tokens_from_tiers_are_a_part_of_the_cached_ones(metrics: Metrics) -> None:
    metrics.request_finished(replace(GOOD, usage=replace(GOOD.usage, tier_tokens=48)))
    text = shown(metrics)
    assert 'kvasir_cached_tokens_total{model="m"} 64.0' in text
    assert 'kvasir_tier_tokens_total{model="m"} 48.0' in text


def test_migrations_are_counted_apart_from_retries(metrics: Metrics) -> None:
    metrics.request_finished(replace(GOOD, migrations=2))
    text = shown(metrics)
    assert 'kvasir_migrations_total{model="m"} 2.0' in text
    assert 'kvasir_retries_total{model="m"}' not in text
