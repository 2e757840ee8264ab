"""Algorithm 1 of the Mooncake paper, computed by an independent line-by-line transcription.

Of each instance: prompt tokens that it holds on the device and in its memory, tokens that wait, and the
requests that they belong to. Prefill takes 10 ms and 0.2 ms a token, a transfer 2 ms and 0.2 ns a byte of
128 KiB a token. The instance that is chosen, and its TTFT. In the first row w0 holds 256 tokens and the
others nothing: w2 is to get them in 0.002 + 256 * 131072 * 0.2e-9 s, and to compute the other 1,792 in
0.01 + 1792 * 0.0002 s, together 0.377111 s.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvasir.ports.clock import Rng
from kvasir.ports.routing import Candidates, RequestView
from kvasir_router.decide.eligible import Disaggregation
from kvasir_router.decide.peers.mooncake import Mooncake

Fleet = Callable[..., Candidates]
Prompt = Callable[..., RequestView]
Draws = Callable[..., Rng]

GOLDENS: list[tuple[int, list[tuple[int, int, int, int]], int, float]] = [
    (2048, [(256, 0, 2048, 4), (0, 0, 64, 1), (0, 0, 0, 0)], 2, 0.377111),
    (8192, [(1024, 64, 0, 0), (2048, 256, 0, 0), (0, 0, 64, 1)], 1, 1.187600),
    (2048, [(1792, 64, 0, 0), (512, 64, 256, 4), (1024, 0, 0, 0)], 0, 0.048400),
    (8192, [(2048, 256, 8192, 4), (0, 0, 0, 0), (4096, 256, 0, 0)], 2, 0.778000),
    (512, [(448, 48, 0, 0), (256, 0, 128, 2), (256, 0, 0, 0)], 0, 0.013200),
    (512, [(448, 48, 0, 0), (64, 0, 2048, 4), (0, 0, 0, 0)], 0, 0.013200),
    (8192, [(2048, 256, 0, 0), (0, 0, 256, 4)], 0, 1.187600),
    (2048, [(0, 0, 4096, 2), (0, 0, 2048, 1), (0, 0, 0, 0)], 2, 0.419600),
    (512, [(448, 0, 0, 0), (0, 0, 256, 4), (448, 48, 4096, 2)], 0, 0.022800),
    (512, [(64, 64, 2048, 4), (128, 0, 0, 0)], 1, 0.086800),
    (512, [(128, 0, 64, 1), (0, 0, 64, 1)], 0, 0.109600),
    (8192, [(1024, 0, 8192, 4), (1024, 0, 64, 1), (0, 0, 512, 1)], 1, 1.466400),
    (8192, [(1024, 64, 0, 0), (2048, 0, 0, 0), (1024, 0, 0, 0)], 1, 1.238800),
    (2048, [(0, 0, 512, 1), (512, 0, 256, 4)], 1, 0.408400),
    (8192, [(1024, 0, 0, 0), (2048, 0, 128, 2), (7168, 64, 1024, 2)], 0, 0.366739),
    (2048, [(1024, 0, 512, 1), (1024, 0, 0, 0), (512, 256, 256, 4)], 1, 0.214800),
    (512, [(128, 0, 0, 0), (64, 256, 1024, 2), (64, 0, 8192, 4)], 0, 0.055433),
    (2048, [(512, 0, 0, 0), (1024, 64, 4096, 2)], 0, 0.219099),
    (2048, [(1024, 0, 0, 0), (0, 0, 256, 4), (1792, 0, 128, 2), (512, 0, 0, 0)], 3, 0.096754),
    (2048, [(0, 0, 0, 0), (1792, 0, 0, 0)], 1, 0.061200),
    (2048, [(0, 0, 0, 0), (1792, 64, 0, 0), (1792, 240, 0, 0), (256, 0, 1024, 2)], 2, 0.013200),
    (2048, [(0, 0, 0, 0), (1024, 64, 2048, 4), (256, 0, 2048, 4)], 0, 0.232521),
    (512, [(0, 0, 0, 0), (128, 256, 4096, 2), (256, 240, 2048, 1)], 0, 0.028202),
    (8192, [(0, 0, 8192, 4), (1024, 64, 128, 2), (0, 0, 0, 0)], 2, 1.461321),
    (8192, [(0, 0, 0, 0), (2048, 0, 2048, 1), (0, 0, 2048, 1)], 0, 1.294487),
    (512, [(0, 0, 0, 0), (448, 0, 128, 2)], 0, 0.036544),
]


def instances(rows: list[tuple[int, int, int, int]]) -> dict[str, object]:
    count = len(rows)
    return {
        "cached_tokens": [device for device, *_ in rows],
        "tier_tokens": [[memory, 0, 0] for _, memory, *_ in rows],
        "queued_prefill_tokens": [queued for *_, queued, _ in rows],
        "waiting": [waiting for *_, waiting in rows],
        "kv_token_bytes": [131_072.0] * count,
        "prefill_fixed_s": [0.01] * count,
        "prefill_token_s": [0.0002] * count,
        "transfer_fixed_s": [0.002] * count,
        "transfer_byte_s": [2e-10] * count,
    }


@pytest.mark.parametrize("golden", GOLDENS)
def test_prompts_go_where_the_algorithm_sends_them(
    golden: tuple[int, list[tuple[int, int, int, int]], int, float],
    fleet: Fleet,
    prompt: Prompt,
    draws: Draws,
) -> None:
    tokens, rows, chosen, ttft = golden
    policy = Mooncake(Disaggregation.NEVER, draws())
    plan = policy.decide(prompt(tokens=tokens), fleet(len(rows), **instances(rows)), 0.0)
    assert plan is not None
    assert plan.decode.worker_id == f"w{chosen}"
    assert plan.predicted_ttft_s == pytest.approx(ttft, abs=1e-6)
    assert plan.tables[0].values.sum(axis=1).min() == pytest.approx(ttft, abs=1e-6)


def test_without_migration_nobody_counts_on_what_another_holds(
    fleet: Fleet, prompt: Prompt, draws: Draws
) -> None:
    rows = [(1792, 0, 512, 1), (0, 0, 0, 0)]
    request, candidates = prompt(tokens=2048), fleet(2, **instances(rows))
    moving = Mooncake(Disaggregation.NEVER, draws()).decide(request, candidates, 0.0)
    staying = Mooncake(Disaggregation.NEVER, draws(), migrates=False).decide(request, candidates, 0.0)
    assert moving is not None
    assert staying is not None
    assert moving.decode.worker_id == "w1"  # 0.049 + 0.0612 s against 0.1124 + 0.0612 s
    assert staying.decode.worker_id == "w0"  # 0.4196 s against 0.1736 s
    assert staying.predicted_ttft_s == pytest.approx(0.1124 + 0.0612)


def test_output_goes_where_a_step_is_shortest(fleet: Fleet, prompt: Prompt, draws: Draws) -> None:
    candidates = fleet(
        3,
        "pdd",
        streams=[0, 2, 4],
        step_fixed_s=[0.0, 0.02, 0.01],
        step_stream_s=[0.0, 0.002, 0.001],
    )
    plan = Mooncake(Disaggregation.ALWAYS, draws()).decide(prompt(tokens=64), candidates, 0.0)
    assert plan is not None
    assert plan.decode.worker_id == "w2"
    assert plan.tables[1].values[:, 0] == pytest.approx([0.026, 0.015])


@pytest.mark.parametrize(
    "case",
    [(9_000, 1, "mooncake"), (11_000, 1, "mooncake_over_slo"), (9_000, 60, "mooncake_over_slo")],
)
def test_a_request_that_the_paper_would_reject_is_marked(
    fleet: Fleet, prompt: Prompt, draws: Draws, case: tuple[int, int, str]
) -> None:
    tokens, streams, reason = case
    candidates = fleet(
        2, "pd", prefill_token_s=[0.0002, 0.0], step_stream_s=[0.0, 0.002], streams=[0, streams]
    )
    plan = Mooncake(Disaggregation.ALWAYS, draws()).decide(prompt(tokens=tokens), candidates, 0.0)
    assert plan is not None
    assert plan.reason == reason
