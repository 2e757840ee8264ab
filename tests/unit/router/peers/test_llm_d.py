"""llm-d's decisions, computed by an independent transcription of its Go sources.

One row after the other, since cold requests are remembered: blocks of the prompt; for each place the blocks
that it holds on the device, in CPU memory and on disk, its queue, and the KV tokens in use of 10,000; the
place with the highest score, and that score. For the first row nobody holds anything, w0 was never used
before: 3 * 0 + 2 * (1 - 500 / 10000) + 2 * 1 + 2 * 1 = 5.9.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidates, RequestView
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.llm_d import LlmD

Fleet = Callable[..., Candidates]
Prompt = Callable[..., RequestView]
Draws = Callable[..., Rng]

GOLDENS: list[tuple[int, list[tuple[int, int, int, int, int]], int, float]] = [
    (10, [(0, 0, 0, 0, 500), (0, 0, 0, 0, 500), (0, 0, 0, 0, 1500), (0, 0, 0, 6, 4000)], 0, 5.9000),
    (20, [(10, 0, 0, 2, 500), (0, 0, 0, 2, 500)], 0, 6.4000),
    (4, [(4, 0, 0, 1, 4000), (0, 0, 0, 1, 9000), (0, 0, 0, 2, 500)], 0, 7.2000),
    (20, [(0, 0, 0, 3, 500), (0, 0, 0, 3, 4000), (0, 0, 0, 0, 1500)], 2, 4.7000),
    (4, [(0, 0, 0, 6, 4000), (4, 0, 0, 6, 500), (0, 0, 0, 0, 0)], 1, 5.9000),
    (10, [(5, 0, 0, 6, 0), (0, 0, 0, 1, 9000), (0, 0, 0, 2, 1500)], 0, 4.5000),
    (20, [(0, 0, 0, 6, 500), (10, 1, 1, 2, 500), (5, 2, 0, 0, 9000)], 1, 5.8983),
    (20, [(0, 0, 0, 0, 0), (0, 0, 0, 1, 500), (0, 0, 0, 2, 500)], 0, 5.0000),
    (20, [(0, 0, 0, 2, 500), (0, 0, 0, 1, 0), (0, 0, 0, 1, 500)], 1, 6.0000),
    (20, [(0, 0, 0, 3, 0), (0, 0, 0, 1, 500)], 1, 3.9000),
    (10, [(0, 0, 0, 2, 4000), (0, 0, 0, 2, 1500), (0, 0, 0, 3, 0), (0, 0, 0, 0, 0)], 3, 6.0000),
    (20, [(10, 0, 0, 6, 500), (5, 0, 1, 6, 1500), (0, 0, 0, 6, 500)], 0, 6.4000),
    (10, [(0, 0, 0, 2, 4000), (2, 0, 1, 1, 1500), (5, 0, 0, 2, 1500), (5, 0, 0, 2, 9000)], 1, 5.3900),
    (4, [(0, 0, 0, 1, 0), (1, 1, 0, 6, 500), (1, 2, 1, 6, 500), (2, 1, 1, 2, 0)], 3, 6.9250),
    (20, [(0, 0, 0, 3, 1500), (0, 0, 0, 3, 4000)], 0, 3.7000),
    (10, [(5, 2, 1, 3, 9000), (10, 0, 0, 6, 0), (0, 0, 0, 1, 0)], 1, 6.0000),
    (4, [(1, 1, 0, 0, 4000), (2, 0, 0, 2, 1500)], 0, 5.5500),
    (4, [(2, 2, 0, 6, 500), (1, 1, 0, 1, 4000), (4, 0, 0, 2, 9000)], 2, 5.8000),
    (20, [(0, 0, 0, 0, 9000), (0, 0, 0, 0, 4000), (0, 0, 0, 3, 0), (0, 0, 0, 0, 1500)], 1, 4.5333),
    (4, [(0, 0, 0, 6, 0), (0, 0, 0, 3, 9000), (0, 0, 0, 1, 0), (0, 0, 0, 3, 1500)], 2, 6.0000),
    (10, [(0, 0, 0, 3, 0), (0, 0, 0, 2, 0), (0, 0, 0, 0, 1500), (0, 0, 0, 3, 500)], 3, 3.9000),
    (4, [(0, 0, 0, 6, 4000), (0, 0, 0, 0, 0), (2, 0, 0, 1, 1500)], 2, 5.8667),
    (20, [(20, 0, 0, 1, 9000), (0, 0, 0, 6, 0)], 0, 6.2000),
    (4, [(0, 0, 0, 0, 0), (0, 0, 0, 3, 4000), (0, 0, 0, 0, 1500)], 0, 6.0000),
    (20, [(20, 0, 0, 0, 1500), (10, 0, 0, 0, 0), (0, 0, 0, 2, 9000)], 0, 7.7000),
    (4, [(0, 0, 0, 0, 9000), (2, 0, 0, 0, 4000)], 1, 5.7000),
]


def columns(pods: list[tuple[int, int, int, int, int]]) -> dict[str, object]:
    return {
        "cached_tokens": [device * 16 for device, *_ in pods],
        "tier_tokens": [[cpu * 16, disk * 16, 0] for _, cpu, disk, *_ in pods],
        "waiting": [queue for *_, queue, _ in pods],
        "reserved_kv_tokens": [used for *_, used in pods],
    }


def test_requests_go_where_llm_d_sends_them(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    policy = LlmD(Disaggregation.NEVER, draws())
    for number, (blocks, pods, chosen, score) in enumerate(GOLDENS):
        plan = policy.decide(prompt(range(blocks)), fleet(len(pods), **columns(pods)), 0.0)
        assert plan is not None
        assert plan.decode.worker_id == f"w{chosen}", number
        assert plan.tables[0].values.sum(axis=1).max() == pytest.approx(score, abs=1e-4), number


def test_a_prompt_is_placed_by_the_same_profile_when_parts_run_apart(
    fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    together, apart = (LlmD(mode, draws()) for mode in (Disaggregation.NEVER, Disaggregation.ALWAYS))
    for blocks, pods, *_ in GOLDENS:
        extra = [*pods, (0, 0, 0, 0, 0)]
        one = together.decide(prompt(range(blocks)), fleet(len(pods), **columns(pods)), 0.0)
        two = apart.decide(
            prompt(range(blocks)), fleet(len(extra), "p" * len(pods) + "d", **columns(extra)), 0.0
        )
        assert one is not None
        assert two is not None
        assert two.prefill == one.decode


def test_output_goes_to_the_place_with_the_fewest_requests(
    fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    candidates = fleet(4, "pddd", waiting=[0, 1, 0, 2], streams=[0, 3, 5, 1])
    plan = LlmD(Disaggregation.ALWAYS, draws()).decide(prompt(range(4)), candidates, 0.0)
    assert plan is not None
    assert plan.decode.worker_id == "w3"


def test_cold_requests_visit_one_place_after_the_other(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    policy = LlmD(Disaggregation.NEVER, draws())
    plans = [policy.decide(prompt([number]), fleet(3), 0.0) for number in range(6)]
    assert [plan.decode.worker_id for plan in plans if plan] == ["w0", "w1", "w2", "w0", "w1", "w2"]


def test_a_weight_scales_its_score(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    candidates = fleet(2, cached_tokens=[64, 0], waiting=[1, 0])
    plain = LlmD(Disaggregation.NEVER, draws()).decide(prompt(range(8)), candidates, 0.0)
    policy = LlmD(Disaggregation.NEVER, draws(), prefix_weight=8.0, queue_weight=1.0)
    weighted = policy.decide(prompt(range(8)), candidates, 0.0)
    assert plain is not None
    assert weighted is not None
    assert (plain.decode.worker_id, weighted.decode.worker_id) == ("w1", "w0")
    assert weighted.tables[0].values[0, 0] == pytest.approx(8 / 3 * plain.tables[0].values[0, 0])
