"""Trace replay: recorded traffic through the router's own decisions, over simulated workers."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import replace
from math import isnan
from pathlib import Path
from random import Random
from typing import Any

import pytest
from load_tests.scenarios.policies.run import main

from kvasir.core.requests import Role, SloClass
from kvasir.native import IS_NATIVE
from kvasir.ports.routing import Candidates, Plan, RequestView, RoutingPolicy, RoutingTarget
from kvasir_platform.sim.replay.goodput import Search, goodput
from kvasir_platform.sim.replay.outcome import ReplayOutcome
from kvasir_platform.sim.replay.replay import Setting, TraceReplay
from kvasir_platform.sim.replay.replica import a800_node, promise
from kvasir_platform.workload.files import TRACE_BLOCK_TOKENS, read_mooncake
from kvasir_platform.workload.requests import Workload, WorkloadRequest
from kvasir_router.decide import make_policy

NODE = a800_node(device_share=0.05, cpu_bytes=2e10)


def conversations(path: Path, count: int, seed: int = 3) -> Path:
    """A trace of people who talk in turns, behind one shared first block, in Mooncake's format."""
    rng = Random(seed)
    blocks = iter(range(1, 1 << 30))
    rows: list[dict[str, Any]] = []
    for person in range(count):
        ids, at = [0], rng.random() * 60_000
        for _ in range(rng.randrange(1, 6)):
            ids = [*ids, *(next(blocks) for _ in range(rng.randrange(1, 30)))]
            length = len(ids) * TRACE_BLOCK_TOKENS + rng.randrange(TRACE_BLOCK_TOKENS)
            # As in the original: the block that is not whole has a name too.
            turn = {"timestamp": int(at // 3000 * 3000), "input_length": length}
            rows.append(turn | {"output_length": rng.randrange(1, 300), "hash_ids": [*ids, -person]})
            at += 5_000 + rng.random() * 20_000
    rows.sort(key=lambda row: row["timestamp"])
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Workload:
    return read_mooncake(conversations(tmp_path / "trace.jsonl", 60), Random(1))


def policy(name: str = "cost", disaggregation: str = "never", seed: int = 1) -> RoutingPolicy:
    return make_policy(name, disaggregation, Random(seed))


def setting(trace: Workload, *, speed_up: float = 2.0, workers: int = 4) -> Setting:
    return Setting(trace, NODE, promise(NODE, 6_000), speed_up, workers=workers)


def figures(outcome: ReplayOutcome) -> tuple[list[float], list[float], list[int], list[float]]:
    return (
        [round(t, 9) for t in outcome.ttft_s],
        [round(t, 9) for t in outcome.itl_s if not isnan(t)],
        list(outcome.cached_tokens),
        [worker.work_s for worker in outcome.workers],
    )


@pytest.mark.parametrize("name", ["cost", "round_robin", "dynamo", "llm_d", "sglang"])
def test_every_request_ends_and_nothing_is_left_behind(trace: Workload, name: str) -> None:
    replay = TraceReplay(setting(trace), policy(name))
    outcome = replay.run()
    replay.settle()
    assert outcome.ended == len(trace.requests)
    assert all(t > 0.0 for t in outcome.ttft_s)
    assert replay.fleet.accounted() == {}
    assert replay.fleet.predicted == 0
    assert all(not worker.legs for worker in replay.fleet.workers.values())


def test_at_rest_the_index_knows_what_every_worker_holds(trace: Workload) -> None:
    replay = TraceReplay(setting(trace), policy())
    replay.run()
    replay.settle()
    index = replay.fleet.index
    index.check_integrity()
    for worker in replay.workers:
        status = index.status(worker.worker_id)
        assert status is not None
        assert (status.state, status.predicted_blocks, status.resyncs) == ("exact", 0, 0)
        held = worker.cache.device_names
        assert len(held) == index.held_blocks(RoutingTarget(worker.worker_id))
        assert len(held) + len(worker.cache.cpu_names) == status.blocks


def test_all_work_is_done_once(trace: Workload) -> None:
    outcome = TraceReplay(setting(trace), policy()).run()
    computed = sum(worker.prefilled_tokens for worker in outcome.workers)
    assert computed == trace.prompt_tokens - sum(outcome.cached_tokens)
    generated = sum(worker.generated_tokens for worker in outcome.workers)
    assert generated == sum(r.output_tokens for r in trace.requests)


def test_equal_seeds_give_equal_results_and_others_do_not(trace: Workload) -> None:
    runs = [figures(TraceReplay(setting(trace), policy(seed=seed)).run()) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_one_worker_hits_nearly_all_that_a_cache_without_bounds_would(trace: Workload) -> None:
    roomy = replace(setting(trace, workers=1, speed_up=0.2), replica=a800_node())
    assert TraceReplay(roomy, policy()).run().hit_rate(trace) > 0.97


def test_the_cost_model_finds_more_prefixes_than_turns_do_and_misses_fewer_promises(
    trace: Workload,
) -> None:
    cost, turns = (
        TraceReplay(setting(trace, speed_up=4.0), policy(name)).run() for name in ("cost", "round_robin")
    )
    assert cost.hit_rate(trace) > 1.5 * turns.hit_rate(trace)
    assert cost.misses < turns.misses


def test_hits_are_foreseen(trace: Workload) -> None:
    roomy = replace(setting(trace, speed_up=0.5), replica=a800_node())
    outcome = TraceReplay(roomy, policy()).run()
    assert outcome.correct_predictions >= 0.98 * len(trace.requests)


def test_separate_pools_share_every_request(trace: Workload) -> None:
    apart = replace(setting(trace), workers=0, prefill_workers=3, decode_workers=2)
    replay = TraceReplay(apart, policy(disaggregation="always"))
    outcome = replay.run()
    replay.settle()
    assert replay.fleet.accounted() == {}
    roles = dict(zip((w.worker_id for w in outcome.workers), apart.roles, strict=True))
    for worker in outcome.workers:
        prefills = roles[worker.worker_id] is Role.PREFILL
        assert (worker.prefilled_tokens > 0) == prefills
        assert (worker.generated_tokens > 0) != prefills


def test_separate_pools_keep_the_gaps_between_tokens_short(trace: Workload) -> None:
    whole = setting(trace, workers=5, speed_up=4.0)
    apart = replace(whole, workers=0, prefill_workers=3, decode_workers=2)
    gaps = [
        sorted(t for t in TraceReplay(each, policy(disaggregation=how)).run().itl_s if not isnan(t))[-5]
        for each, how in ((whole, "never"), (apart, "always"))
    ]
    assert gaps[1] < gaps[0]


class Watcher:
    """Takes the first place, and keeps what the second request was told of it."""

    name = "watcher"

    def __init__(self) -> None:
        self.replay: TraceReplay | None = None
        self.seen: list[tuple[int, int, int, int, int]] = []

    def decide(self, request: RequestView, candidates: Candidates, now: float) -> Plan:
        assert self.replay is not None
        self.seen.append(
            (
                int(candidates.queued_prefill_tokens[0]),
                int(candidates.waiting[0]),
                int(candidates.streams[0]),
                int(candidates.cached_tokens[0]),
                self.replay.fleet.predicted,
            )
        )
        return Plan(None, candidates.targets[0], self.name)

    def missing(self, prefills: Sequence[bool], decodes: Sequence[bool], worker: Sequence[int]) -> str | None:
        return None


def test_a_prompt_that_is_computed_is_no_longer_queued_nor_foreseen_but_cached() -> None:
    names = array("Q", [1, 2, 3])
    lengths = 3 * TRACE_BLOCK_TOKENS + 1, 5000
    # While the first prompt is computed, while the first output is, and at rest.
    trace = Workload(
        tuple(WorkloadRequest(t, *lengths, names) for t in (0.0, 0.01, 30.0, 1000.0)), TRACE_BLOCK_TOKENS
    )
    watcher = Watcher()
    watcher.replay = TraceReplay(setting(trace, workers=1, speed_up=1.0), watcher)
    watcher.replay.run()
    prompt, cached = lengths[0], 3 * TRACE_BLOCK_TOKENS
    queued = [seen[0] for seen in watcher.seen]
    assert 0 < queued[1] <= prompt
    assert [queued[0], *queued[2:]] == [0, 0, 0]
    assert [seen[1:] for seen in watcher.seen] == [
        (0, 0, 0, 0),
        (1, 1, cached, 1),
        (0, 2, cached, 0),
        (0, 0, cached, 0),
    ]


@pytest.mark.parametrize("speed_up", [1.0, 20.0])
def test_a_request_that_breaks_both_promises_has_missed_once(trace: Workload, speed_up: float) -> None:
    played = setting(trace, speed_up=speed_up)
    outcome = TraceReplay(played, policy()).run()
    late = [
        ttft > played.slo.ttft_s or itl > played.slo.itl_s
        for ttft, itl in zip(outcome.ttft_s, outcome.itl_s, strict=True)
    ]
    assert outcome.misses == sum(late)


def test_a_run_that_has_missed_too_often_stops(trace: Workload) -> None:
    hopeless = setting(trace, workers=1, speed_up=50.0)
    outcome = TraceReplay(hopeless, policy()).run(most_misses=5)
    assert 5 < outcome.misses < len(trace.requests) / 4
    assert outcome.ended < len(trace.requests)


@pytest.mark.skipif(not IS_NATIVE, reason="the Python twin is too slow for many runs")
def test_goodput_is_the_edge_of_what_meets_the_promise(trace: Workload) -> None:
    search = Search(precision=0.05)
    one, three = (goodput(setting(trace, workers=workers), policy, search) for workers in (1, 3))
    assert three > 1.5 * one
    most = int(0.1 * len(trace.requests))
    assert TraceReplay(setting(trace, workers=1, speed_up=one), policy()).run().misses <= most
    assert TraceReplay(setting(trace, workers=1, speed_up=1.06 * one), policy()).run().misses > most


def test_a_promise_that_cannot_be_kept_at_any_speed_is_said(trace: Workload) -> None:
    hopeless = replace(setting(trace), slo=SloClass("never", ttft_s=1e-6, itl_s=1.0))
    with pytest.raises(ValueError, match="missed at any speed-up down to"):
        goodput(hopeless, policy, Search())


def test_the_report_compares_our_policy_with_the_best_of_the_others(tmp_path: Path) -> None:
    rows = main([str(conversations(tmp_path / "trace.jsonl", 60)), "--quick", "--processes", "1"])
    goodputs = {row.name: row for row in rows if row.name.startswith("goodput")}
    ours = goodputs["goodput, cost, 4 workers"]
    names = ("llm_d", "round_robin", "llm_d_tuned")
    others = [goodputs[f"goodput, {name}, 4 workers"].value for name in names]
    assert ours.peer == max(others)
    assert ours.ratio == ours.value / max(others)
    assert {row.name.partition(",")[0] for row in rows if row.met is not None} == {
        "goodput",
        "hits of an infinite cache's",
        "load max/mean",
    }
