"""The comparison of policies: memory, prior rates that are wrong, grids, and the mixed trace."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from load_tests.scenarios.policies.fleets import (
    CACHED,
    Fleet,
    memory_of_each,
    perturbed,
    perturbed_links,
    setting,
    wrong_rates,
)
from load_tests.scenarios.policies.grid import GRIDS, Contender, chosen, defaults, points
from load_tests.scenarios.policies.measure import best_peer, goodput_row
from load_tests.scenarios.policies.run import APART, NEAR, SIZES
from load_tests.scenarios.policies.traces import distinct_blocks, longest_blocks, mixed

from kvasir.config.spec.edge import GatewaySpec
from kvasir.core.requests import Role
from kvasir_platform.sim.replay import replay
from kvasir_platform.sim.replay.outcome import ReplayOutcome, WorkerOutcome
from kvasir_platform.sim.replay.replay import TraceReplay
from kvasir_platform.sim.replay.replica import a800_node
from kvasir_platform.workload.requests import Workload
from kvasir_router.decide import CostRates, Disaggregation, rates_of
from kvasir_router.decide.links import DEFAULT_LINKS
from kvasir_router.fleet.fleet import Fleet as RoutedFleet

NODE = a800_node()
DISTINCT = 170_899


@pytest.fixture(scope="module")
def small() -> Workload:
    return mixed(1, 60)


@pytest.mark.parametrize("workers", [*SIZES, sum(APART)])
def test_caches_of_a_fleet_of_any_size_hold_the_same_part_of_a_trace(workers: int) -> None:
    each = memory_of_each(NODE, workers, CACHED * DISTINCT, 249)
    held = workers * (each.device_blocks + each.cpu_blocks)
    assert held / DISTINCT == pytest.approx(CACHED, rel=0.01)
    assert held < DISTINCT
    assert each.device_blocks <= NODE.device_blocks
    assert each.cpu_blocks <= NODE.cpu_blocks


def test_memory_is_cut_from_below_devices_first_and_never_under_a_request() -> None:
    assert memory_of_each(NODE, 4, 4 * 3_000, 249).device_blocks == NODE.device_blocks
    assert memory_of_each(NODE, 4, 4 * 3_000, 249).cpu_blocks == 3_000 - NODE.device_blocks
    small = memory_of_each(NODE, 4, 4 * 100, 249)
    assert (small.device_blocks, small.cpu_blocks) == (249, 0)
    roomy = memory_of_each(NODE, 1, 10 * DISTINCT, 249)
    assert (roomy.device_blocks, roomy.cpu_blocks) == (NODE.device_blocks, NODE.cpu_blocks)


def test_a_replay_knows_no_more_of_the_trace_than_production(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet(None, 2, requests=40)
    played = setting(fleet, 1.0)
    expected: list[int] = []

    def routed(*parts: Any, expected_output_tokens: int, **others: Any) -> RoutedFleet:
        expected.append(expected_output_tokens)
        return RoutedFleet(*parts, expected_output_tokens=expected_output_tokens, **others)

    monkeypatch.setattr(replay, "Fleet", routed)
    TraceReplay(played, Contender("cost", "cost").make(Disaggregation.NEVER, 1))
    assert expected == [GatewaySpec().default_max_tokens]
    assert played.replica.prefill_token_s == NODE.prefill_token_s
    identity = played.replica.identity("w", Role.BOTH)
    believed = played.make_rates().join("w", identity)
    assert believed.prefill_token_s != pytest.approx(rates_of(identity).prefill_token_s, rel=1e-3)


def test_rates_are_wrong_by_the_same_factors_for_every_worker_and_policy_of_one_seed() -> None:
    identities = [NODE.identity(name, role) for name, role in (("a", Role.PREFILL), ("b", Role.DECODE))]
    first, again, other = wrong_rates(1), wrong_rates(1), wrong_rates(2)
    rates = [book.join(each.worker_id, each) for book in (first, again) for each in identities]
    assert len(set(rates)) == 1
    assert other.join("a", identities[0]) != rates[0]


def test_errors_of_rates_are_log_normal() -> None:
    rng, right = Random(3), CostRates()
    errors = []
    for _ in range(400):
        wrong = perturbed(right, rng, 0.3)
        errors += [math.log(got / was) for got, was in zip(wrong[:6], right[:6], strict=True)]
        assert wrong.links == right.links
    assert statistics.fmean(errors) == pytest.approx(0.0, abs=0.03)
    assert statistics.stdev(errors) == pytest.approx(0.3, rel=0.05)
    assert perturbed(right, rng, 0.0) == right
    assert perturbed_links(DEFAULT_LINKS, rng, 0.0) == DEFAULT_LINKS
    assert perturbed_links(DEFAULT_LINKS, rng) != DEFAULT_LINKS


def test_a_grid_begins_with_the_published_defaults() -> None:
    assert points({"a": (1.0, 2.0), "b": (3.0, 4.0)}) == (
        (("a", 1.0), ("b", 3.0)),
        (("a", 1.0), ("b", 4.0)),
        (("a", 2.0), ("b", 3.0)),
        (("a", 2.0), ("b", 4.0)),
    )
    for policy, grid in GRIDS.items():
        at_default, plain = (
            Contender(policy, policy, point).make(Disaggregation.NEVER, 1) for point in (points(grid)[0], ())
        )
        assert settings_of(at_default) == settings_of(plain)
        others = [Contender(policy, policy, point).make(Disaggregation.NEVER, 1) for point in points(grid)]
        assert len({repr(settings_of(each)) for each in others}) == len(others)


def settings_of(policy: object) -> dict[str, object]:
    return {name: value for name, value in vars(policy).items() if isinstance(value, (int, float, tuple))}


def test_the_best_point_is_chosen_and_the_default_where_none_is_better() -> None:
    low, high = (("a", 1.0),), (("a", 2.0),)
    assert chosen("x", {low: 1.0, high: 2.0}) == Contender("x_tuned", "x", high)
    assert chosen("x", {low: 2.0, high: 2.0}) == Contender("x_tuned", "x")


def test_the_target_is_over_the_best_of_all_defaults_and_tuned_ones() -> None:
    speeds = {"cost": 2.0, "x": 1.0, "x_tuned": 1.5}
    row = goodput_row("cost", "16 workers", speeds, best_peer(speeds))
    assert (row.peer, row.ratio, row.target_ratio) == (1.5, 2.0 / 1.5, 1.05)
    assert best_peer({"cost": 2.0}) is None


def test_load_is_compared_within_a_pool() -> None:
    def outcome(*work: tuple[Role, float]) -> ReplayOutcome:
        found = ReplayOutcome(1)
        found.workers = tuple(WorkerOutcome("w", role, work_s, work_s, 0, 0) for role, work_s in work)
        return found

    apart = outcome((Role.PREFILL, 8.0), (Role.PREFILL, 8.0), (Role.DECODE, 1.0), (Role.DECODE, 3.0))
    assert apart.imbalance() == 1.5
    assert outcome((Role.BOTH, 1.0), (Role.BOTH, 3.0)).imbalance() == 1.5
    assert outcome((Role.PREFILL, 8.0), (Role.DECODE, 1.0)).imbalance() == 1.0


def test_the_mixed_trace_has_sessions_documents_and_agents_at_a_time(small: Workload) -> None:
    times = [each.arrival_s for each in small.requests]
    assert times == sorted(times)
    kinds = [each.session.partition("-")[0] for each in small.requests]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"chat": 60, "": 60, "agents": 60}
    first_half = kinds[: len(kinds) // 2]
    assert all(first_half.count(kind) > 15 for kind in ("chat", "", "agents"))
    assert small.infinite_hits() > 0.3 * small.prompt_tokens
    assert mixed(1, 60) == small
    assert mixed(2, 60) != small


def test_a_trace_tells_its_working_set_and_its_longest_request(small: Workload) -> None:
    twice = replace(small, requests=small.requests * 2)
    assert distinct_blocks(twice) == distinct_blocks(small)
    longest = max(small.requests, key=lambda each: each.prompt_tokens + each.output_tokens)
    blocks = longest_blocks(small)
    tokens = longest.prompt_tokens + longest.output_tokens
    assert blocks * small.block_tokens > tokens > (blocks - 2) * small.block_tokens


def test_every_policy_of_the_comparison_can_be_made() -> None:
    for contender in defaults(NEAR):
        assert contender.make(Disaggregation.NEVER, 1)
    assert Fleet(Path("x.csv"), 4).shares is False
    assert Fleet(None, 4).shares is True
